//! Row files whose header or table cannot be written, or that are not there any more.

use std::io;

use crate::eviction::ContainerId;
use crate::io::{Direction, Failure};
use crate::notice::Level;
use crate::sys::sync::{Arc, lock};
use crate::tier::disk::DiskTier;
use crate::tier::growth::is_full;
use crate::tier::last_error::{Cause, tail};
use crate::tier::state::State;

/// What fails here, for people.
const OPERATION: &str = "write to the row table";

impl DiskTier {
    /// The header or table of a file could not be read or written: a file that is no longer there
    /// is lost at once; a full disk passes by itself; from any other, stores keep away for a while.
    pub(super) fn file_failed(&self, id: ContainerId, error: &io::Error) {
        let mut cause = Cause::of(error);
        if is_gone(error) {
            // One file's trouble, not the device's.
            cause = Cause::Os(libc::ENOENT);
            self.lose_file(&mut lock(&self.state), id);
        } else if !is_full(error) {
            self.cannot_write(id, error);
            return;
        }
        self.around.metrics.errors.add(1);
        let path = lock(&self.state).inventory.container(id).map_or_else(
            || self.root.path().to_path_buf(),
            |container| container.row_file.path(),
        );
        self.around.notices.say(Level::Warning, "store", || {
            format!("store failed: {OPERATION} of {}: {error}", tail(&path))
        });
        self.device_failed(Direction::Write, cause, OPERATION, &path);
    }

    /// Takes note that a file's header or table cannot be written: no store takes its rows until
    /// it is tried again.
    pub(super) fn cannot_write(&self, id: ContainerId, error: &io::Error) {
        let mut state = lock(&self.state);
        let Some(container) = state.inventory.container_mut(id) else {
            return;
        };
        container.unwritable = true;
        let path = container.row_file.path();
        let file = Arc::clone(&container.row_file.file);
        drop(state);
        // It may have been opened for reading only.
        file.close();
        self.around.metrics.errors.add(1);
        self.around.notices.say(Level::Warning, "unwritable", || {
            format!(
                "{} cannot be written, its rows are only read: {error}",
                path.display()
            )
        });
        let of_this_file = [libc::EPERM, libc::EACCES, libc::EBADF].map(Some);
        if !of_this_file.contains(&error.raw_os_error()) {
            self.device_failed(Direction::Write, Cause::of(error), OPERATION, &path);
        }
    }

    /// Takes note that a file is not there any more, or was cut.
    pub(super) fn lose_file(&self, state: &mut State, id: ContainerId) {
        if state.inventory.container(id).is_some_and(|file| !file.lost) {
            state.inventory.lose_container(id);
            self.around.metrics.lost_files.add(1);
        }
    }
}

/// Whether an error says that a file is not there under its name any more.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
        || matches!(
            error.raw_os_error(),
            Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENXIO)
        )
}

/// Whether a failed transfer says that a file is not there any more, or was cut.
pub(super) fn is_lost(failure: Failure) -> bool {
    match failure {
        Failure::Os(errno) => is_gone(&io::Error::from_raw_os_error(errno)),
        failure => failure == Failure::Short,
    }
}
