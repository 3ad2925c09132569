//! Instructions that a block takes on the two paths of every policy, counted by valgrind: the same
//! on every run, whatever else the machine does. `cargo bench --bench instructions [-- POLICY,...]`
//!
//! The program runs itself under `valgrind --tool=cachegrind` with some requests and with more; the
//! difference is theirs alone.

use std::process::Command;

use kvstrata_benches::paths::{BLOCKS, Paths};
use kvstrata_benches::say;
use kvstrata_core::eviction::POLICIES;

const ENTRIES: usize = 8_192;
const FEW: u64 = 50;
const MANY: u64 = 350;
/// What makes the program the one that is counted.
const COUNTED: &str = "--counted";
const PATHS: [&str; 2] = ["touch", "store"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, policy, path, requests] = arguments.as_slice()
        && first == COUNTED
    {
        run(policy, path, requests.parse().unwrap_or(FEW));
        return;
    }
    let chosen = arguments.iter().find(|one| !one.starts_with('-')).cloned();
    let chosen = chosen.unwrap_or_else(|| POLICIES.join(","));
    say("instructions a block, by valgrind:");
    say(&format!(
        "{:10}{:>10}{:>18}",
        "", "touch", "store and evict"
    ));
    for policy in chosen.split(',') {
        let counts: Result<Vec<u64>, String> = PATHS
            .iter()
            .map(|path| instructions(policy, path))
            .collect();
        match counts.as_deref() {
            Ok([touch, store]) => say(&format!("{policy:10}{touch:>10}{store:>18}")),
            Ok(_) => {}
            Err(problem) => {
                say(problem);
                std::process::exit(1);
            }
        }
    }
}

fn run(policy: &str, path: &str, requests: u64) {
    let mut full = Paths::new(policy, ENTRIES);
    for _ in 0..requests {
        match path {
            "touch" => full.touch(),
            _ => full.store(),
        }
    }
}

fn instructions(policy: &str, path: &str) -> Result<u64, String> {
    let few = counted(policy, path, FEW)?;
    let many = counted(policy, path, MANY)?;
    Ok(many.saturating_sub(few) / ((MANY - FEW) * u64::from(BLOCKS)))
}

/// Instructions of a whole run.
fn counted(policy: &str, path: &str, requests: u64) -> Result<u64, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let ran = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=no"])
        .arg("--cachegrind-out-file=/dev/null")
        .arg(own)
        .args([COUNTED, policy, path, &requests.to_string()])
        .output();
    let ran = ran.map_err(|error| {
        format!("valgrind cannot be run ({error}): install it (Debian: valgrind) and try again")
    })?;
    let text = String::from_utf8_lossy(&ran.stderr);
    let line = text
        .lines()
        .find(|line| line.contains("I ") && line.contains("refs:"));
    let count = line.and_then(|line| {
        line.rsplit(':')
            .next()?
            .trim()
            .replace(',', "")
            .parse()
            .ok()
    });
    count
        .filter(|_| ran.status.success())
        .ok_or_else(|| format!("valgrind failed:\n{text}"))
}
