//! One process per root: a lock that the kernel gives back however the holder ends.

use std::io;

use crate::error::{Error, Result};
use crate::sys::fs::{Access, Direct, Directory, File};

/// The lock file in the root; it also names its holder for the refusal of a second one.
pub const ROOT_LOCK_NAME: &str = "kvstrata.lock";
/// Longest text about the holder that is read back.
const HOLDER_BYTES_MAX: usize = 256;

/// Takes the root's lock and writes down who holds it.
///
/// # Errors
/// `Config` naming the root and the holder when another tier, of this process or another, has it.
pub(crate) fn acquire(root: &Directory) -> Result<File> {
    let refused = |error: io::Error| {
        Error::config(format!(
            "root {}: {ROOT_LOCK_NAME} cannot be used",
            root.path().display()
        ))
        .with_source(error)
    };
    let file = open_or_create(root).map_err(refused)?;
    if !file.try_lock_exclusive().map_err(refused)? {
        let holder = root
            .read_file(ROOT_LOCK_NAME, HOLDER_BYTES_MAX)
            .unwrap_or_default();
        let holder = String::from_utf8_lossy(&holder).trim().to_owned();
        let holder = if holder.is_empty() {
            "an unknown process".to_owned()
        } else {
            holder
        };
        return Err(Error::config(format!(
            "root {} is in use by {holder}; one process can use a root: close that one or choose \
             another root",
            root.path().display()
        )));
    }
    let node = rustix::system::uname();
    let text = format!(
        "process {} on host {}\n",
        rustix::process::getpid().as_raw_nonzero(),
        node.nodename().to_string_lossy()
    );
    // Only for the refusal of others: on a full disk the root is held all the same, by an unknown
    // process.
    let length = u64::try_from(text.len()).unwrap_or(u64::MAX);
    let told = file
        .write_all_at(text.as_bytes(), 0)
        .and_then(|()| file.set_length(length));
    if told.is_err() {
        let _ = file.set_length(0);
    }
    Ok(file)
}

fn open_or_create(root: &Directory) -> io::Result<File> {
    match root.create_new(ROOT_LOCK_NAME, Access::Write, Direct::No) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            root.open(ROOT_LOCK_NAME, Access::Write, Direct::No)
        }
        other => other,
    }
}
