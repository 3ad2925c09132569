//! Files that options and the environment name: read with a bound, for a file can be a FIFO that
//! nobody writes to, or lie on a mount that hangs.

use core::time::Duration;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::sys::fs::read_small;
use crate::sys::sync::{Arc, Condvar, Mutex, lock, spawn, wait_timeout_while};

/// How long a file's bytes are waited for. It is short, since it is small, and requests wait.
const PATIENCE: Duration = Duration::from_secs(1);

/// What reading came to; the system's error by its kind and its words.
type Bytes = Result<Vec<u8>, (io::ErrorKind, String)>;

/// A file that is being read, or was and nobody has looked since.
#[derive(Debug, Default)]
struct Reading {
    state: Mutex<Progress>,
    told: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    bytes: Option<Bytes>,
    /// Whether it was waited for in vain; nobody waits again.
    overdue: bool,
}

/// Reads them. Clones know of each other: a file that hangs costs one thread in all.
#[derive(Clone, Debug, Default)]
pub struct NamedFiles(Arc<Mutex<BTreeMap<PathBuf, Arc<Reading>>>>);

impl NamedFiles {
    /// The bytes of a file of at most so many. Takes a second at most, and no time where an earlier
    /// call still hangs at it.
    ///
    /// # Errors
    /// The system's; `TimedOut` for a file that gives no bytes.
    pub(super) fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
        let reading = self.begin(path, bytes_max)?;
        let mut state = wait_timeout_while(
            &reading.told,
            lock(&reading.state),
            PATIENCE,
            |state: &mut Progress| state.bytes.is_none() && !state.overdue,
        );
        let Some(bytes) = state.bytes.clone() else {
            state.overdue = true;
            let text = "it gives no bytes (a FIFO that nobody writes to, or a mount that hangs?)";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        };
        drop(state);
        let mut all = lock(&self.0);
        if all.get(path).is_some_and(|of| Arc::ptr_eq(of, &reading)) {
            all.remove(path);
        }
        bytes.map_err(|(kind, text)| io::Error::new(kind, text))
    }

    /// [`read`](Self::read) for tasks, which must not wait.
    pub(super) async fn read_aside(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
        let (own, path) = (self.clone(), path.to_path_buf());
        let read = tokio::task::spawn_blocking(move || own.read(&path, bytes_max));
        read.await.map_err(io::Error::other)?
    }

    /// The reading of a file that is under way, or another one.
    fn begin(&self, path: &Path, bytes_max: u64) -> io::Result<Arc<Reading>> {
        let mut all = lock(&self.0);
        if let Some(reading) = all.get(path) {
            return Ok(Arc::clone(reading));
        }
        let reading = Arc::<Reading>::default();
        let (own, name) = (Arc::clone(&reading), path.to_path_buf());
        // Nobody waits for its end: it may have none.
        spawn("kvstrata-file", move || {
            let bytes = read_small(&name, bytes_max);
            let bytes = bytes.map_err(|error| (error.kind(), error.to_string()));
            lock(&own.state).bytes = Some(bytes);
            own.told.notify_all();
        })?;
        all.insert(path.to_path_buf(), Arc::clone(&reading));
        Ok(reading)
    }
}
