//! Leases: each writer holds the lock of a file of its own, and who holds it is alive.
//!
//! The kernel gives the lock back when the last descriptor of it is closed, however the process
//! ends. An engine that leaves work with the kernel keeps one of them
//! ([`Engine::guard`](crate::io::Engine::guard)): while a write of a dead process may still land,
//! its lease is held.

use std::io;

use super::layout::{LOCK_NAME, WRITERS_NAME, parse_writer_name, writer_name};
use crate::format::WriterId;
use crate::sys::fs::{Access, Direct, Directory, EntryKind, File};
use crate::sys::process::ProcessIdentity;

/// Longest text of a lease that is read back.
const TEXT_BYTES_MAX: usize = 1024;

/// This process's lease. Dropping it closes the descriptor, no more: that is for a forked child.
#[derive(Debug)]
pub struct Lease {
    writers: Directory,
    name: String,
    file: File,
}

/// What [`clear`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Leases of dead writers that are gone now.
    pub removed: u64,
    /// Who is alive, in the words of the leases.
    pub alive: Vec<String>,
}

impl Lease {
    /// Takes the lease of a new writer of a namespace, and writes down who it is.
    ///
    /// # Errors
    /// The kernel's. On a full disk the lease is taken all the same, by an unknown process.
    pub fn take(namespace: &Directory, writer: WriterId) -> io::Result<Self> {
        let writers = namespace.create_directory(WRITERS_NAME)?;
        let name = writer_name(writer);
        let directory = writers.create_directory(&name)?;
        let file = directory.create_new(LOCK_NAME, Access::Write, Direct::No)?;
        if !file.try_lock_exclusive()? {
            // Nobody else knows the name yet.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let text = ProcessIdentity::own().to_string();
        if file.write_all_at(text.as_bytes(), 0).is_err() {
            let _ = file.set_length(0);
        }
        Ok(Self {
            writers,
            name,
            file,
        })
    }

    /// The file whose lock is the lease.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Ends the lease: nothing of this writer is under way any more. What cannot be removed is
    /// removed by whoever opens the namespace next.
    pub fn release(self) {
        let _ = remove(&self.writers, &self.name);
        // A child forked meanwhile has a copy of the descriptor: closing ours would not do.
        let _ = self.file.unlock();
    }
}

/// Removes the leases of dead writers. Strangers' names, links and special files stay as they are.
///
/// # Errors
/// The kernel's, for the directory itself.
pub fn clear(namespace: &Directory) -> io::Result<Cleared> {
    let mut cleared = Cleared::default();
    let writers = match namespace.directory(WRITERS_NAME) {
        Ok(writers) => writers,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(cleared),
        Err(error) => return Err(error),
    };
    for entry in writers.entries()? {
        let name = entry
            .name
            .to_str()
            .filter(|name| entry.kind == EntryKind::Directory && parse_writer_name(name).is_some());
        let Some(name) = name else {
            continue;
        };
        match state(&writers, name) {
            State::Alive(text) => cleared.alive.push(text),
            State::Dead => cleared.removed += u64::from(remove(&writers, name).is_ok()),
            State::Strange => {}
        }
    }
    Ok(cleared)
}

/// What a lease says of its writer.
enum State {
    /// It holds the lease; who it is in the lease's words.
    Alive(String),
    /// Nobody holds the lease, or it was never taken.
    Dead,
    /// What bears the lease's name is not one.
    Strange,
}

fn state(writers: &Directory, name: &str) -> State {
    let Ok(directory) = writers.directory(name) else {
        return State::Strange;
    };
    let file = match directory.open(LOCK_NAME, Access::Write, Direct::No) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return State::Dead,
        Err(_) => return State::Strange,
    };
    match file.try_lock_exclusive() {
        Ok(true) => return State::Dead,
        Ok(false) => {}
        Err(_) => return State::Strange,
    }
    let text = directory
        .read_file(LOCK_NAME, TEXT_BYTES_MAX)
        .unwrap_or_default();
    let text = String::from_utf8_lossy(&text).trim().replace('\n', ", ");
    State::Alive(if text.is_empty() {
        "an unknown process".to_owned()
    } else {
        text
    })
}

/// Removes a writer's directory with its lock, and nothing else: one with other things stays.
fn remove(writers: &Directory, name: &str) -> io::Result<()> {
    let directory = writers.directory(name)?;
    match directory.unlink(LOCK_NAME) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    writers.remove_directory(name)
}
