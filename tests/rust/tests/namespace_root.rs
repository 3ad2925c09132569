//! What a root must be, and what the file layer refuses below it.

#![expect(
    clippy::disallowed_methods,
    reason = "roots are prepared from the outside"
)]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use kvstrata_core::error::ErrorKind;
use kvstrata_core::sys::fs::{
    Access, Allocation, Direct, Directory, EntryKind, ShareMode, is_symbolic_link,
};

fn open(path: &Path) -> Directory {
    Directory::open_root(path, true, ShareMode::Private).unwrap()
}

fn refusal(path: &Path) -> String {
    refusal_in(path, ShareMode::Private)
}

fn refusal_in(path: &Path, share: ShareMode) -> String {
    let error = Directory::open_root(path, true, share).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let message = error.to_string();
    let named = path.components().collect::<std::path::PathBuf>();
    assert!(
        message.contains(named.to_str().unwrap()),
        "no path: {message}"
    );
    message
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn a_root_that_others_can_write_is_refused_with_mode_and_remedy() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("root");
    open(&path);
    for (mode, whom) in [
        (0o777, "everyone"),
        (0o1777, "everyone"),
        (0o770, "its group"),
    ] {
        set_mode(&path, mode);
        let message = refusal(&path);
        assert!(
            message.contains(whom) && message.contains(&format!("{mode:04o}")),
            "{message}"
        );
        assert!(message.contains("chmod"), "{message}");
    }
    assert!(Directory::open_root(&path, true, ShareMode::Group).is_ok());
    set_mode(&path, 0o772);
    assert!(refusal_in(&path, ShareMode::Group).contains("chmod o-w"));
    set_mode(&path, 0o755);
    open(&path);
}

#[test]
fn a_root_or_namespace_directory_of_someone_else_is_refused() {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can give a directory away");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("root");
    let root = open(&path);
    root.create_directory("inner").unwrap();
    chown(path.join("inner"), Some(12345), None).unwrap();
    let error = root.directory("inner").unwrap_err();
    assert!(error.to_string().contains("uid 12345"), "{error}");
    chown(&path, Some(12345), None).unwrap();
    let message = refusal(&path);
    assert!(
        message.contains("uid 12345") && message.contains("uid 0"),
        "{message}"
    );
}

#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

#[test]
fn a_directory_below_the_root_that_others_can_write_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let root = open(&place.path().join("root"));
    root.create_directory("inner").unwrap();
    set_mode(&root.path_of("inner"), 0o770);
    let error = root.create_directory("inner").unwrap_err();
    assert!(
        error.to_string().contains("writable by others (mode 0770)"),
        "{error}"
    );
}

#[test]
fn a_root_that_is_a_link_or_a_file_or_cannot_be_made_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("link");
    symlink(place.path(), &path).unwrap();
    assert!(refusal(&path).contains("is a symbolic link"));
    assert!(
        refusal(&path.join("")).contains("is a symbolic link"),
        "with a slash behind it"
    );
    assert!(
        refusal(&path.join(".")).contains("is a symbolic link"),
        "with a dot behind it"
    );
    let path = place.path().join("file");
    std::fs::write(&path, "").unwrap();
    assert!(refusal(&path).contains("is not a directory"));
    assert!(refusal(&path.join("below")).contains("cannot be created"));
    assert!(refusal(Path::new("/proc/nothing/here")).contains("cannot be created"));
    assert!(refusal(Path::new("")).contains("empty"));
    let missing = place.path().join("missing");
    let error = Directory::open_root(&missing, false, ShareMode::Private).unwrap_err();
    assert!(
        error.to_string().contains("missing cannot be opened"),
        "{error}"
    );
    assert!(!missing.exists());
}

#[test]
fn a_root_that_cannot_be_written_is_refused() {
    // The superuser may write whatever the mode; only a read-only file system stops it.
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("root");
    let root = open(&path);
    set_mode(&path, 0o500);
    if root.create_directory("probe").is_ok() {
        skipped("this user may write whatever the mode");
        return;
    }
    let message = refusal(&path);
    assert!(message.contains("is not writable"), "{message}");
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let root = open(&place.path().join("root"));
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "/etc", "../x", "a\0b", &long] {
        let kinds = [
            root.open(name, Access::Read, Direct::No)
                .unwrap_err()
                .kind(),
            root.create_new(name, Access::Write, Direct::No)
                .unwrap_err()
                .kind(),
            root.create_directory(name).unwrap_err().kind(),
            root.unlink(name).unwrap_err().kind(),
            root.rename("x", name).unwrap_err().kind(),
            root.publish(name, b"").unwrap_err().kind(),
        ];
        assert_eq!(kinds, [std::io::ErrorKind::InvalidInput; 6], "{name:?}");
    }
}

#[test]
fn links_fifos_and_devices_are_not_opened_and_never_block() {
    let place = tempfile::tempdir().unwrap();
    let root = open(&place.path().join("root"));
    std::fs::write(root.path_of("file"), "x").unwrap();
    symlink(root.path_of("file"), root.path_of("link")).unwrap();
    rustix::fs::mkfifoat(&root, "fifo", rustix::fs::Mode::RWXU).unwrap();
    for access in [Access::Read, Access::Write] {
        let error = root.open("link", access, Direct::No).unwrap_err();
        assert!(is_symbolic_link(&error), "{error}");
        assert!(root.open("fifo", access, Direct::No).is_err());
    }
    let error = root
        .create_new("link", Access::Write, Direct::No)
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
    let mut kinds: Vec<_> = root.entries().unwrap();
    kinds.sort_by(|one, two| one.name.cmp(&two.name));
    let kinds: Vec<_> = kinds.into_iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [EntryKind::Other, EntryKind::File, EntryKind::Other]);
}

#[test]
fn a_file_is_written_read_reserved_and_locked() {
    let place = tempfile::tempdir().unwrap();
    let root = open(&place.path().join("root"));
    let file = root.create_new("file", Access::Write, Direct::No).unwrap();
    let allocation = file.allocate(1 << 20).unwrap();
    let stat = file.stat().unwrap();
    assert_eq!(
        (stat.size_bytes, stat.mode, stat.links),
        (1 << 20, 0o600, 1)
    );
    if allocation == Allocation::Reserved {
        assert!(stat.allocated_bytes >= 1 << 20);
    }
    file.write_all_at(b"hello", (1 << 20) - 2).unwrap();
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, (1 << 20) - 2).unwrap();
    assert_eq!(&bytes, b"hello");
    let error = file.read_exact_at(&mut bytes, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    assert!(file.try_lock_exclusive().unwrap());
    let other = root.open("file", Access::Write, Direct::No).unwrap();
    assert!(!other.try_lock_exclusive().unwrap());
    drop(file);
    assert!(other.try_lock_exclusive().unwrap());
    root.unlink("file").unwrap();
    assert_eq!(other.stat().unwrap().links, 0);
    let statistics = root.statistics().unwrap();
    assert!(statistics.available_bytes <= statistics.total_bytes && statistics.block_bytes > 0);
    // Longer than a file can be: of one that merely has no room ext4 takes all that is left first.
    assert!(other.allocate(1 << 62).is_err());
}

#[test]
fn a_published_file_replaces_the_old_one_whole_and_a_bounded_read_has_a_bound() {
    let place = tempfile::tempdir().unwrap();
    let root = open(&place.path().join("root"));
    root.publish("file", b"old and long").unwrap();
    root.publish("file", b"new").unwrap();
    assert_eq!(root.read_file("file", 3).unwrap(), b"new");
    let error = root.read_file("file", 2).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    assert_eq!(
        root.entries().unwrap().len(),
        1,
        "no temporary file is left"
    );
    root.create_directory("directory").unwrap();
    assert!(root.publish("directory", b"").is_err());
    assert_eq!(root.entries().unwrap().len(), 2, "nor after a failure");
}
