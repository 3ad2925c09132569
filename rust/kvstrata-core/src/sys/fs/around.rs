//! What a path lies in: looked at before anything is made there.

use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, statat};

/// Whether a directory has a plain file of this name.
pub fn has_file(directory: &Path, name: &str) -> bool {
    let found = statat(CWD, directory.join(name), AtFlags::SYMLINK_NOFOLLOW);
    found.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// The nearest directory with a plain file of this name of those that `path` lies in, links on the
/// way followed. Neither `path` nor the last of its parents has to be there.
pub fn around_with_file(path: &Path, name: &str) -> Option<PathBuf> {
    for ancestor in path.ancestors() {
        let at = if ancestor.as_os_str().is_empty() {
            Path::new(".")
        } else {
            ancestor
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "the seam every other module goes through"
        )]
        if let Ok(real) = std::fs::canonicalize(at) {
            let itself = usize::from(ancestor == path);
            let mut around = real.ancestors().skip(itself);
            return around
                .find(|directory| has_file(directory, name))
                .map(Path::to_path_buf);
        }
    }
    None
}
