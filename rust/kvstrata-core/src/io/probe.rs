//! What a root can do, tried out when a tier opens it.

use core::fmt;
use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde_json::{Map, Value, json};

use super::{Alignment, uring};
use crate::buffer::aligned::PAGE_BYTES;
use crate::buffer::{AlignedBuffer, Memory};
use crate::error::{Error, Result};
use crate::sys::fs::{Access, Allocation, Direct, Directory, File, IoVector, TEMPORARY_SUFFIX};
use crate::sys::sync::Arc;

/// How the names of files that are tried begin; one left by a killed process is rubbish.
pub const TRIAL_PREFIX: &str = "probe.";

/// Whether `name` is that of a file that is tried: a stranger's is not removed.
pub fn is_trial_name(name: &str) -> bool {
    let unique = name
        .strip_prefix(TRIAL_PREFIX)
        .and_then(|name| name.strip_suffix(TEMPORARY_SUFFIX))
        .map(|name| name.strip_suffix(RENAMED_SUFFIX).unwrap_or(name));
    unique.is_some_and(|unique| {
        unique.len() == 16
            && unique
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// What the name of a tried file ends in after its renaming, before the suffix of all.
const RENAMED_SUFFIX: &str = ".renamed";

/// Length of the file that is tried, in bytes.
const TRIAL_BYTES: u64 = 65536;

/// File systems that keep files in memory: there is no cache to go round.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];

/// File systems whose calls can hang as long as some other machine or process likes.
const MAY_HANG: [&str; 9] = [
    "nfs", "fuse", "9p", "cifs", "smb2", "ceph", "lustre", "gpfs", "unknown",
];

/// Kinds of local disks, where `"auto"` takes a ring that works. It takes threads elsewhere: in
/// memory and on FUSE, network and stacked mounts a ring hands each operation to a kernel thread.
const LOCAL_DISKS: [&str; 6] = ["ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"];

/// What a root can do and which way was chosen for it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is one independent answer"
)]
pub struct Capabilities {
    /// The engine: `"threads"` or `"uring"`.
    pub io_backend: &'static str,
    /// Whether it was asked for by name.
    pub is_named: bool,
    /// Whether rows go round the page cache.
    pub direct: Direct,
    /// Alignment that direct transfers need; none in buffered mode.
    pub alignment: Alignment,
    /// Kind of the file system, `"unknown"` where we have no name for it.
    pub file_system: &'static str,
    /// Whether its calls can hang for ever (network, FUSE): a deadline is then worth having.
    pub may_hang: bool,
    /// Whether space can be reserved before it is written.
    pub fallocate: bool,
    /// Whether `flock` works.
    pub locks: bool,
    /// Whether a directory can be made durable.
    pub directory_sync: bool,
    /// Why something was chosen that is not the best, in order of trial.
    pub remarks: Vec<String>,
}

impl Capabilities {
    /// `"direct"` or `"buffered"`.
    pub const fn io_mode(&self) -> &'static str {
        match self.direct {
            Direct::Yes => "direct",
            Direct::No => "buffered",
        }
    }

    /// Whether files are kept in memory, so that there is no page cache to keep small.
    pub fn in_memory(&self) -> bool {
        IN_MEMORY.contains(&self.file_system)
    }

    /// Slots and rows whose address and length are multiples of this, in bytes, are moved without
    /// a copy.
    pub fn slot_align(&self) -> usize {
        self.alignment.slot_bytes()
    }

    /// What the root can do, whichever the engine.
    pub fn of_root(&self) -> String {
        let yes = |flag: bool| if flag { "yes" } else { "no" };
        let facts = format!(
            "{}: {} I/O aligned to {} bytes, fallocate {}, locks {}, directory sync {}",
            self.file_system,
            self.io_mode(),
            self.slot_align(),
            yes(self.fallocate),
            yes(self.locks),
            yes(self.directory_sync),
        );
        let remarks = self.remarks.iter().map(String::as_str);
        let all: Vec<&str> = core::iter::once(facts.as_str()).chain(remarks).collect();
        all.join("; ")
    }

    /// One line for the log.
    pub fn summary(&self) -> String {
        self.to_string()
    }

    /// The facts by name, for the tier's `capabilities()`.
    pub fn to_map(&self) -> Map<String, Value> {
        let facts = json!({
            "io_backend": self.io_backend,
            "io_mode": self.io_mode(),
            "slot_align": self.slot_align(),
            "file_system": self.file_system,
            "may_hang": self.may_hang,
            "fallocate": self.fallocate,
            "locks": self.locks,
            "directory_sync": self.directory_sync,
            "registered_files": 0,
            "registered_buffers": 0,
            "remarks": self.remarks,
        });
        match facts {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

impl fmt::Display for Capabilities {
    /// One line for the log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} on {}", self.io_backend, self.of_root())
    }
}

/// Tries out `root` with a file of its own, which it removes. A full file system is no error: what
/// could not be tried is taken to work, since everything has a fallback when it does not.
///
/// # Errors
/// [`crate::error::ErrorKind::Config`] for an `io_backend` that is not known or, named, does not
/// work here, and when files cannot be created, renamed or removed in the root.
pub fn probe(root: &Directory, io_backend: &str) -> Result<Capabilities> {
    if !matches!(io_backend, "auto" | "threads" | "uring") {
        return Err(Error::config(format!(
            "io_backend {io_backend:?} is not available; \"auto\", \"threads\" or \"uring\" is \
             expected"
        )));
    }
    let cannot = |what: &str, source: io::Error| {
        Error::config(format!(
            "{} cannot be used: {what} fails",
            root.path().display()
        ))
        .with_source(source)
    };
    let file_system = root
        .statistics()
        .map_err(|error| cannot("statfs", error))?
        .name;
    let mut capabilities = Capabilities {
        io_backend: "threads",
        is_named: io_backend != "auto",
        direct: Direct::No,
        alignment: Alignment::NONE,
        file_system,
        may_hang: MAY_HANG.contains(&file_system),
        fallocate: true,
        locks: true,
        directory_sync: root.sync().is_ok(),
        remarks: Vec::new(),
    };
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())
        .map_err(|errno| cannot("a random number", errno.into()))?;
    let unique = u64::from_le_bytes(random);
    let first = format!("{TRIAL_PREFIX}{unique:016x}{TEMPORARY_SUFFIX}");
    let second = format!("{TRIAL_PREFIX}{unique:016x}{RENAMED_SUFFIX}{TEMPORARY_SUFFIX}");
    let file = match root.create_new(&first, Access::Write, Direct::No) {
        Ok(file) => file,
        Err(error) if is_full(&error) => {
            capabilities.remarks.push(format!("not tried ({error})"));
            try_direct(None, root, &first, &mut capabilities);
            choose_engine(None, io_backend, &mut capabilities)?;
            return Ok(capabilities);
        }
        Err(error) => return Err(cannot("creating a file", error)),
    };
    try_file(&file, &mut capabilities);
    try_direct(Some(&file), root, &first, &mut capabilities);
    let chosen = choose_engine(Some(&file), io_backend, &mut capabilities);
    let renamed = root.rename(&first, &second);
    let removed = root.unlink(if renamed.is_ok() { &second } else { &first });
    renamed.map_err(|error| cannot("renaming a file", error))?;
    removed.map_err(|error| cannot("removing a file", error))?;
    chosen?;
    Ok(capabilities)
}

/// Chooses the engine: a ring is set up and reads the file that is tried, if there is one. A ring
/// that does not work is an error when it was asked for by name, else a reason for threads.
fn choose_engine(
    trial: Option<&File>,
    io_backend: &str,
    capabilities: &mut Capabilities,
) -> Result<()> {
    let is_named = match io_backend {
        "uring" => true,
        "threads" => return Ok(()),
        _ => false,
    };
    let file_system = capabilities.file_system;
    if !(is_named || LOCAL_DISKS.contains(&file_system)) {
        let remark = format!("io_uring is not taken on {file_system} unless asked for");
        capabilities.remarks.push(remark);
        return Ok(());
    }
    match trial.map_or_else(uring::trial_set_up, uring::trial) {
        Ok(()) => capabilities.io_backend = "uring",
        Err(error) if is_named => {
            let message = "io_backend: \"uring\" does not work here; \"auto\" and \"threads\" do";
            return Err(Error::config(message).with_source(error));
        }
        Err(error) => capabilities
            .remarks
            .push(format!("io_uring is refused ({error})")),
    }
    Ok(())
}

fn is_full(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    errno == Some(Errno::NOSPC.raw_os_error()) || errno == Some(Errno::DQUOT.raw_os_error())
}

/// Tries to reserve space and to lock.
fn try_file(file: &File, capabilities: &mut Capabilities) {
    match file.allocate(TRIAL_BYTES) {
        Ok(Allocation::Reserved) => {}
        Ok(Allocation::Sparse) => {
            capabilities.fallocate = false;
            capabilities
                .remarks
                .push("space cannot be reserved, so files are sparse".to_owned());
        }
        Err(error) => capabilities
            .remarks
            .push(format!("allocation was refused ({error})")),
    }
    match file.try_lock_exclusive() {
        Ok(true) => {}
        Ok(false) => capabilities.locks = false,
        Err(error) => {
            capabilities.locks = false;
            capabilities
                .remarks
                .push(format!("flock is refused ({error})"));
        }
    }
}

/// Decides whether rows go round the page cache, and with which alignment. Without a file to try
/// on, direct mode is assumed; the engine falls back at run time when that is wrong.
fn try_direct(trial: Option<&File>, root: &Directory, name: &str, capabilities: &mut Capabilities) {
    if IN_MEMORY.contains(&capabilities.file_system) {
        return;
    }
    let page = Alignment {
        memory_bytes: PAGE_BYTES,
        offset_bytes: PAGE_BYTES,
    };
    let Some(trial) = trial else {
        capabilities.direct = Direct::Yes;
        capabilities.alignment = page;
        return;
    };
    let stated = trial.direct_alignment().and_then(|stated| {
        let memory_bytes = usize::try_from(stated.memory_bytes).ok()?;
        let offset_bytes = usize::try_from(stated.offset_bytes).ok()?;
        Some(Alignment {
            memory_bytes,
            offset_bytes,
        })
    });
    let sector = Alignment {
        memory_bytes: 512,
        offset_bytes: 512,
    };
    let candidates = stated.into_iter().chain([sector, page]);
    let opened = root.open(name, Access::Write, Direct::Yes);
    let file = match opened {
        Ok(file) => file,
        Err(error) => {
            capabilities
                .remarks
                .push(format!("O_DIRECT is refused at open ({error})"));
            return;
        }
    };
    let mut refusal = None;
    for alignment in candidates {
        match round_trip(&file, alignment) {
            Ok(()) => {
                capabilities.direct = Direct::Yes;
                capabilities.alignment = alignment;
                return;
            }
            Err(error) => refusal = Some(error),
        }
    }
    if let Some(error) = refusal {
        capabilities
            .remarks
            .push(format!("O_DIRECT does not work ({error})"));
    }
}

/// Writes and reads one unit of `alignment` at an address and offset that are no better aligned.
fn round_trip(file: &File, alignment: Alignment) -> io::Result<()> {
    let length = alignment.offset_bytes;
    let memory = |fill: u8| -> io::Result<(Memory, IoVector)> {
        let bytes = alignment.slot_bytes().saturating_mul(2);
        let mut buffer = AlignedBuffer::zeroed(bytes, PAGE_BYTES.max(alignment.slot_bytes()))
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        buffer.fill(fill);
        let memory = Memory::Buffer(Arc::new(buffer));
        let address = memory.address(alignment.memory_bytes, length);
        let address = address.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok((memory, IoVector::new(address, length)))
    };
    let offset = u64::try_from(alignment.offset_bytes).unwrap_or(0);
    let (source, from) = memory(0xA5)?;
    let (target, to) = memory(0)?;
    #[expect(unsafe_code, reason = "the trial uses the same calls as the engine")]
    // SAFETY: both vectors lie within buffers that live until the end of this function and that
    // nobody else knows.
    let (written, read) = unsafe {
        (
            file.write_vectored_at(&[from], offset)?,
            file.read_vectored_at(&[to], offset)?,
        )
    };
    let (mut was, mut is) = (vec![0; length], vec![1; length]);
    let copied = source.copy_out(alignment.memory_bytes, &mut was)
        && target.copy_out(alignment.memory_bytes, &mut is);
    if written == length && read == length && copied && was == is {
        Ok(())
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}
