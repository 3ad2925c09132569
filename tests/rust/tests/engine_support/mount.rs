//! A FUSE mount of our own, whose daemon a test can stop.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_core::sys::fs::{Directory, ShareMode};
use rustix::process::{Pid, Signal, kill_process};

/// A directory seen through a FUSE daemon of our own.
pub(crate) struct Mount {
    daemon: Child,
    holder: tempfile::TempDir,
}

impl Mount {
    /// None, and a line that says so, where `bindfs` cannot be mounted.
    pub(crate) fn new() -> Option<Self> {
        let mount = Self::mounted();
        if mount.is_none() {
            #[expect(clippy::print_stdout, reason = "what a test did not do")]
            {
                println!("not run: bindfs cannot be mounted here");
            }
        }
        mount
    }

    fn mounted() -> Option<Self> {
        let holder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (below, above) = (holder.path().join("below"), holder.path().join("above"));
        for directory in [&below, &above] {
            Command::new("mkdir").arg(directory).status().unwrap();
        }
        let mut command = Command::new("bindfs");
        command
            .args(["-f", "--no-allow-other", "-o", "attr_timeout=600"])
            .args([&below, &above]);
        let mut mount = Self {
            daemon: command.spawn().ok()?,
            holder,
        };
        for _ in 0..500 {
            let directory = Directory::open_root(&above, false, ShareMode::Private).ok();
            let statistics = directory.and_then(|directory| directory.statistics().ok());
            if statistics.is_some_and(|found| found.name == "fuse") {
                return Some(mount);
            }
            if mount.daemon.try_wait().unwrap().is_some() {
                return None;
            }
            SystemClock.sleep(Duration::from_millis(10));
        }
        None
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.holder.path().join("above")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.daemon.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.daemon.try_wait().map(|ended| {
            if ended.is_none() {
                self.signal(Signal::CONT);
                let mut unmount = Command::new("fusermount3");
                let _ = unmount.arg("-uz").arg(self.path()).status();
                let _ = self.daemon.wait();
            }
        });
    }
}

/// Lets the next reads of the file go to the daemon.
pub(crate) fn drop_cache(path: &Path) {
    let name = path.join("rows");
    let status = Command::new("dd")
        .arg(format!("of={}", name.display()))
        .args([
            "oflag=nocache",
            "conv=notrunc,fdatasync",
            "count=0",
            "status=none",
        ])
        .status();
    assert!(status.unwrap().success());
}
