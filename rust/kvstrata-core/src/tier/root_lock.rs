//! One process per root: a lock that the kernel gives back however the holder ends.

use core::time::Duration;
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::error::{Error, Result};
use crate::sys::clock::Clock;
use crate::sys::fs::{Access, Direct, Directory, File};

/// The lock file in the root; it also names its holder for the refusal of a second one.
pub const ROOT_LOCK_NAME: &str = "kvstrata.lock";
/// Longest text about the holder that is read back.
const HOLDER_BYTES_MAX: usize = 256;

/// How long an opener waits for a lock whose holder is dead: until the kernel has taken down the
/// dead process's ring, with all that it was still writing.
pub(crate) const DRAIN_TIME_MAX: Duration = Duration::from_secs(10);
/// How long it waits for any other: a process that forks keeps what it has let go of until its
/// child runs another program.
pub(crate) const FORK_TIME_MAX: Duration = Duration::from_millis(500);
/// Pause between two looks at the lock.
pub(crate) const DRAIN_PAUSE: Duration = Duration::from_millis(5);

/// Takes the root's lock and writes down who holds it. Waits a little for another to let go of it,
/// and longer for a process that has died.
///
/// # Errors
/// `Config` naming the root and the holder when another tier, of this process or another, has it.
pub(crate) fn acquire(root: &Directory, clock: &dyn Clock) -> Result<File> {
    let refused = |error: io::Error| {
        Error::config(format!(
            "root {}: {ROOT_LOCK_NAME} cannot be used",
            root.path().display()
        ))
        .with_source(error)
    };
    let file = open_or_create(root).map_err(refused)?;
    let begun = clock.now();
    while !file.try_lock_exclusive().map_err(refused)? {
        let holder = root
            .read_file(ROOT_LOCK_NAME, HOLDER_BYTES_MAX)
            .unwrap_or_default();
        let holder = String::from_utf8_lossy(&holder).trim().to_owned();
        let waited = clock.now().saturating_duration_since(begun);
        let patience = if is_dead(&holder) {
            DRAIN_TIME_MAX
        } else {
            FORK_TIME_MAX
        };
        if waited < patience {
            clock.sleep(DRAIN_PAUSE);
            continue;
        }
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
    let text = format!(
        "process {} on host {}\n",
        rustix::process::getpid().as_raw_nonzero(),
        host()
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

fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Whether the text names a process of this host that does not exist (any more).
fn is_dead(holder: &str) -> bool {
    let named = holder
        .strip_prefix("process ")
        .and_then(|rest| rest.split_once(" on host "))
        .filter(|(_, named)| *named == host());
    let pid = named.and_then(|(pid, _)| Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?));
    pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

fn open_or_create(root: &Directory) -> io::Result<File> {
    match root.create_new(ROOT_LOCK_NAME, Access::Write, Direct::No) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            root.open(ROOT_LOCK_NAME, Access::Write, Direct::No)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_this_host_that_does_not_exist_is_dead() {
        let own = rustix::process::getpid().as_raw_nonzero();
        let host = host();
        // Numbers of processes are below 2^22.
        assert!(is_dead(&format!("process 2147483647 on host {host}")));
        for text in [
            format!("process {own} on host {host}"),
            format!("process 2147483647 on host not-{host}"),
            format!("process -2147483647 on host {host}"),
            format!("process 0 on host {host}"),
            "process 2147483647".to_owned(),
            String::new(),
        ] {
            assert!(!is_dead(&text), "{text}");
        }
    }
}
