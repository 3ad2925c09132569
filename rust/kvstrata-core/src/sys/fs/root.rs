//! Opening a root: the one place where a whole path from the outside is trusted or refused.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{
    Access as Permission, AtFlags, CWD, FileType, Mode, Stat, accessat, fstat, statat,
};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};

use super::ShareMode;
use super::directory::{Directory, create_directory, open_directory};
use crate::error::{Error, Result};

/// Opens (and with `create` makes) the root at `path`; see [`Directory::open_root`].
pub(super) fn open(path: &Path, create: bool, share: ShareMode) -> Result<Directory> {
    // Without a trailing `/` or `/.`: with one, the kernel would follow a link before it.
    let path: PathBuf = path.components().collect();
    if path.as_os_str().is_empty() {
        return Err(Error::config("the root path is empty; name a directory"));
    }
    if create {
        create_missing(&path, share)?;
    }
    let fd = open_directory(CWD, path.as_path()).map_err(|errno| refused(&path, errno))?;
    let stat = fstat(&fd).map_err(|errno| refused(&path, errno))?;
    check_owner(&path, &stat, share)?;
    check_mode(&path, &stat, share)?;
    accessat(
        &fd,
        ".",
        Permission::WRITE_OK | Permission::EXEC_OK,
        AtFlags::EACCESS,
    )
    .map_err(|errno| context(format!("root {} is not writable", path.display()), errno))?;
    Ok(Directory::from_parts(fd, path, share))
}

/// An error of `message` because of `errno`.
fn context(message: String, errno: Errno) -> Error {
    Error::config(message).with_source(io::Error::from(errno))
}

/// Makes `path` and those of its parents that are missing.
fn create_missing(path: &Path, share: ShareMode) -> Result<()> {
    let mut missing = Vec::new();
    for ancestor in path
        .ancestors()
        .filter(|ancestor| !ancestor.as_os_str().is_empty())
    {
        match statat(CWD, ancestor, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => break,
            Err(Errno::NOENT) => missing.push(ancestor),
            Err(errno) => return Err(cannot_create(path, ancestor, errno)),
        }
    }
    for directory in missing.into_iter().rev() {
        create_directory(CWD, directory, share.directory_mode())
            .map_err(|errno| cannot_create(path, directory, errno))?;
    }
    Ok(())
}

/// The error of a root that cannot be made because of `at`.
fn cannot_create(path: &Path, at: &Path, errno: Errno) -> Error {
    let (display, own) = (path.display(), geteuid().as_raw());
    let place = if at == path {
        String::new()
    } else {
        format!(" at {}", at.display())
    };
    context(
        format!(
            "root {display} cannot be created{place}{}",
            by_whom(
                errno,
                &format!("make it for that user (as root: `install -d -m 700 -o {own} {display}`)")
            )
        ),
        errno,
    )
}

/// Who may not use a place, and what can be done about it; nothing of other errors.
fn by_whom(errno: Errno, remedy: &str) -> String {
    if matches!(errno, Errno::ACCESS | Errno::PERM) {
        let own = geteuid().as_raw();
        format!(" by uid {own}; {remedy} or choose another directory")
    } else {
        String::new()
    }
}

/// The error of a root that does not open; says what is there instead of a directory.
fn refused(path: &Path, errno: Errno) -> Error {
    let display = path.display();
    let kind = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
        .map(|stat| FileType::from_raw_mode(stat.st_mode));
    let message = match kind {
        Ok(FileType::Symlink) => format!(
            "root {display} is a symbolic link, which is not followed; name the directory itself"
        ),
        Ok(FileType::Directory) | Err(_) => {
            let whose = by_whom(errno, "run as the user that it belongs to");
            format!("root {display} cannot be opened{whose}")
        }
        Ok(_) => format!("root {display} is not a directory"),
    };
    context(message, errno)
}

/// Refuses a root that someone else owns.
fn check_owner(path: &Path, stat: &Stat, share: ShareMode) -> Result<()> {
    let own = geteuid().as_raw();
    let shared = match share {
        ShareMode::Private => false,
        ShareMode::Group => in_group(stat.st_gid),
    };
    if stat.st_uid == own || shared {
        return Ok(());
    }
    Err(Error::config(format!(
        "root {} is owned by uid {} and this process runs as uid {own}, so its owner could read \
         and replace what is stored; chown it to {own} or choose another directory",
        path.display(),
        stat.st_uid
    )))
}

/// Whether this process is in the group `gid`.
fn in_group(gid: u32) -> bool {
    getegid().as_raw() == gid
        || getgroups().is_ok_and(|groups| groups.iter().any(|group| group.as_raw() == gid))
}

/// Refuses a root in which others may put or replace names.
fn check_mode(path: &Path, stat: &Stat, share: ShareMode) -> Result<()> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    if !mode.intersects(share.forbidden_bits()) {
        return Ok(());
    }
    let (whom, remedy) = match (mode.contains(Mode::WOTH), share) {
        (true, ShareMode::Private) => ("everyone", "go-w"),
        (true, ShareMode::Group) => ("everyone", "o-w"),
        (false, _) => ("its group", "g-w"),
    };
    Err(Error::config(format!(
        "root {0} is writable by {whom} (mode {1:04o}); run `chmod {remedy} {0}` or choose another \
         directory",
        path.display(),
        mode.as_raw_mode() & 0o7777
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_this_process_may_not_use_is_told_with_what_can_be_done() {
        let path = Path::new("/var/kv");
        let own = geteuid().as_raw();
        for (error, remedy) in [
            (refused(Path::new("/"), Errno::ACCESS), "run as the user"),
            (cannot_create(path, path, Errno::ACCESS), "make it for that"),
        ] {
            let told = error.to_string();
            assert!(
                told.contains(&format!(" by uid {own}; {remedy} ")),
                "{told}"
            );
            assert!(told.contains("Permission denied"), "{told}");
        }
        for (at, beginning) in [
            ("/var/kv", "root /var/kv cannot be created: Read-only"),
            ("/var", "root /var/kv cannot be created at /var: Read-only"),
        ] {
            let told = cannot_create(path, Path::new(at), Errno::ROFS).to_string();
            assert!(told.starts_with(beginning), "{told}");
        }
    }
}
