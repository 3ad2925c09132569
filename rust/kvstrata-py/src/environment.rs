//! The environment's variables that say where credentials are: the core reads none itself.

use std::collections::BTreeMap;

use kvstrata_core::object::options::Environment;

/// Starts of the names of variables that object stores' tools share.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// The variables for object stores, and where the user's files are.
pub(crate) fn read() -> Environment {
    let wanted = |name: &str| name == "HOME" || PREFIXES.iter().any(|p| name.starts_with(p));
    let all = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| wanted(name))?;
        Some((name, value.into_string().ok()?))
    });
    Environment(all.collect::<BTreeMap<_, _>>())
}
