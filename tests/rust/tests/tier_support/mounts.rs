//! Small file systems, mounted for one test.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub struct Mount {
    at: PathBuf,
    _place: TempDir,
    /// What lies below, to be unmounted after.
    _below: Option<Box<Self>>,
}

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

impl Mount {
    /// Mounts with `program`, given `arguments` and the place; `None`, said on standard error,
    /// where this machine or user cannot.
    fn new(program: &str, arguments: &[&str], place: TempDir, below: Option<Self>) -> Option<Self> {
        let at = place.path().join("mounted");
        std::fs::create_dir(&at).unwrap();
        let mut all = arguments.to_vec();
        all.push(at.to_str().unwrap());
        if !run(program, &all) {
            eprintln!("skipped: {program} {} does not work here", all.join(" "));
            return None;
        }
        Some(Self {
            at,
            _place: place,
            _below: below.map(Box::new),
        })
    }

    /// A tmpfs of `bytes`.
    pub fn tmpfs(bytes: u64) -> Option<Self> {
        let options = format!("size={bytes}");
        Self::new(
            "mount",
            &["-t", "tmpfs", "-o", &options, "tmpfs"],
            place(),
            None,
        )
    }

    /// A new ext4 in a sparse image of `bytes` with about `inodes` inodes.
    pub fn ext4(bytes: u64, inodes: u64) -> Option<Self> {
        let place = place();
        let image = place.path().join("image");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        let (image, inodes) = (image.to_str().unwrap(), inodes.to_string());
        if !run("mkfs.ext4", &["-q", "-F", "-m", "0", "-N", &inodes, image]) {
            eprintln!("skipped: mkfs.ext4 does not work here");
            return None;
        }
        Self::new("mount", &["-o", "loop", image], place, None)
    }

    /// A FUSE file system that shows `below`, and refuses `fallocate`.
    pub fn fuse(below: Self) -> Option<Self> {
        let source = below.at.to_str().unwrap().to_owned();
        Self::new("bindfs", &[&source], place(), Some(below))
    }

    /// A directory on it for a root.
    pub fn root(&self) -> PathBuf {
        self.at.join("kv")
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// What the file system says of itself.
    pub fn statistics(&self) -> rustix::fs::StatVfs {
        rustix::fs::statvfs(&self.at).unwrap()
    }

    /// Bytes that may still be allocated.
    pub fn available(&self) -> u64 {
        let room = self.statistics();
        room.f_bavail * room.f_frsize
    }
}

fn place() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A file that a failing test left open does not keep the mount.
        assert!(run("umount", &["-l", self.at.to_str().unwrap()]));
    }
}
