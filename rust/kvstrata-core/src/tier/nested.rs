//! A root in another one is a mistake: most often a namespace's directory in the root's place.

use std::path::Path;

use crate::error::{Error, Result};
use crate::namespace::layout::MANIFEST_NAME;
use crate::sys::fs::{around_with_file, has_file};
use crate::tier::root_lock::ROOT_LOCK_NAME;

/// Refuses a directory that lies in a root, and one of a namespace.
///
/// # Errors
/// `Config` naming the root that was meant.
pub(super) fn refuse(root: &Path) -> Result<()> {
    let shown = root.display();
    if let Some(outer) = around_with_file(root, ROOT_LOCK_NAME) {
        let outer = outer.display();
        return Err(Error::config(format!(
            "root {shown} lies in the root {outer} (which has a {ROOT_LOCK_NAME}); name {outer}, or \
             a directory that is in no root"
        )));
    }
    if has_file(root, MANIFEST_NAME) {
        return Err(Error::config(format!(
            "root {shown} is the directory of a namespace (it has a {MANIFEST_NAME}); name the root \
             that it is to lie in"
        )));
    }
    Ok(())
}
