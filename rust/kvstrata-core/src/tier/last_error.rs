//! The last operation that failed, and what its failure says of the device.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use crate::io::Failure;
use crate::sys::errno::errno_name;

/// Last components of a path that are told: a namespace's file by group and name.
const PATH_COMPONENTS: usize = 3;

/// What went wrong with one operation of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The operating system's errno.
    Os(i32),
    /// It did not end by its deadline.
    Late,
}

impl Cause {
    /// The cause behind an error of a call; `EIO` where the error has no errno.
    pub(crate) fn of(error: &std::io::Error) -> Self {
        Self::Os(error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// The cause behind an operation's failure; `None` where the device had no part in it, and for
    /// what is late, which is counted once for its whole job.
    pub(crate) const fn of_failure(failure: Failure) -> Option<Self> {
        match failure {
            Failure::Os(errno) if errno != libc::ECANCELED => Some(Self::Os(errno)),
            Failure::Os(_)
            | Failure::Short
            | Failure::TimedOut
            | Failure::Closed
            | Failure::Poisoned => None,
        }
    }

    /// Whether the device is to blame. A full disk only skips stores, and a missing file is one
    /// file's trouble.
    pub(crate) const fn is_of_device(self) -> bool {
        !matches!(
            self,
            Self::Os(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOENT)
        )
    }

    /// The symbol of the errno.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Os(errno) => errno_name(errno),
            Self::Late => "timeout",
        }
    }

    /// What it means, in words.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Os(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
            Self::Late => "it did not end by its deadline".to_owned(),
        }
    }
}

/// The last operation that failed.
#[derive(Clone, Debug)]
pub(crate) struct LastError {
    /// Symbol of the errno, or `timeout`.
    pub(crate) errno: &'static str,
    /// What was being done.
    pub(crate) operation: &'static str,
    /// The end of the path it was done to.
    pub(crate) path: String,
    /// What the error means.
    pub(crate) text: String,
    /// When it failed.
    pub(crate) at: Instant,
}

impl LastError {
    /// As it is told in the statistics.
    pub(crate) fn to_json(&self, now: Instant) -> Value {
        json!({
            "errno": self.errno,
            "operation": self.operation,
            "path": self.path,
            "text": self.text,
            "seconds_ago": now.saturating_duration_since(self.at).as_secs_f64(),
        })
    }
}

/// The end of a path: enough to find it, short enough for a log line.
pub(crate) fn tail(path: &Path) -> String {
    let components: Vec<_> = path.iter().collect();
    let from = components.len().saturating_sub(PATH_COMPONENTS);
    let kept: PathBuf = components.iter().skip(from).collect();
    kept.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disks_and_missing_files_are_not_the_devices_fault() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG, libc::ENOENT] {
            assert!(!Cause::Os(errno).is_of_device());
        }
        for errno in [
            libc::EIO,
            libc::ENXIO,
            libc::EROFS,
            libc::EACCES,
            libc::ESTALE,
        ] {
            assert!(Cause::Os(errno).is_of_device());
        }
        assert!(Cause::Late.is_of_device());
        assert_eq!(Cause::of_failure(Failure::Os(libc::ECANCELED)), None);
        assert_eq!(Cause::of_failure(Failure::Short), None);
    }

    #[test]
    fn the_tail_of_a_path_names_its_file() {
        assert_eq!(tail(Path::new("/a/b/c/d/e.rows")), "c/d/e.rows");
        assert_eq!(tail(Path::new("/a")), "/a");
    }
}
