//! Opening a disk tier: the root, the namespace, what lies there, the threads.

use core::sync::atomic::AtomicBool;
use std::collections::BTreeMap;
use std::io;

use crate::buffer::aligned::AlignedBuffer;
use crate::config::TierOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::eviction;
use crate::format::geometry::Geometry;
use crate::format::superblock::WriterId;
use crate::index::{Fingerprinter, Index, recovery};
use crate::io::file::{DESCRIPTORS_MAX, FileCache};
use crate::io::{Completion, CompletionSink, Engine, probe, threads};
use crate::key::GroupId;
use crate::namespace::epoch::Epochs;
use crate::namespace::manifest::Manifest;
use crate::namespace::{Namespace, layout};
use crate::notice::Level;
use crate::sys::fs::{Directory, ShareMode, fill_random};
use crate::sys::sync::{Arc, Condvar, Mutex, OnceLock, Weak, lock, spawn};
use crate::tier::disk::{DiskTier, Surroundings};
use crate::tier::foreign;
use crate::tier::inventory::Inventory;
use crate::tier::plan::PADDING_BYTES;
use crate::tier::recover;
use crate::tier::root_lock;
use crate::tier::space::{Space, file_bytes};
use crate::tier::state::{Phase, State};

/// The directories of a namespace, opened.
struct Place {
    root: Arc<Directory>,
    namespace: Namespace,
    directories: Vec<Arc<Directory>>,
    groups: Vec<(GroupId, u64)>,
}

impl DiskTier {
    /// Opens the tier; on return it serves what earlier runs stored.
    ///
    /// # Errors
    /// `Config`, naming the field or path: a wrong option, an unusable root, a root that another
    /// process holds, a namespace that is not what it should be.
    pub fn open(options: &TierOptions, around: Surroundings) -> Result<Arc<Self>> {
        options.validate()?;
        let policy = eviction::create(&options.policy)?;
        let manifest = Manifest::new(options.identity.clone(), &options.row_bytes)?;
        let root = Arc::new(Directory::open_root(&options.root, true, ShareMode::Private)?);
        let root_lock = root_lock::acquire(&root)?;
        let place = open_place(options, root, &manifest)?;
        let system = place.root.statistics().map_err(|e| unusable(&place.root, &e))?;
        let capacity_bytes = options.capacity.resolve(system.total_bytes);
        check_capacity(&place.groups, capacity_bytes)?;
        let capabilities = probe::probe(&place.root, &options.io_backend)?;
        around.notices.say(Level::Info, "capabilities", || capabilities.summary());

        let mut epochs = Epochs::open(place.namespace.directory())
            .map_err(|error| unusable(&place.root, &error))?;
        let cache = Arc::new(FileCache::new(DESCRIPTORS_MAX));
        let mut inventory = Inventory::new(Index::default(), policy, place.groups.iter().copied());
        let secret = random::<32>().map_err(|error| unusable(&place.root, &error))?;
        let fingerprinter = Fingerprinter::new(secret);
        let recovered = recover::recover(&recover::Source {
            directories: &place.directories,
            groups: &place.groups,
            digest: place.namespace.digest(),
            cache: &cache,
            fingerprinter: &fingerprinter,
            around: &around,
        }, &mut epochs, &mut inventory)
        .map_err(|error| unusable(&place.root, &error))?;
        let survey = foreign::survey(&place.root, &layout::directory_name(&manifest))
            .map_err(|error| unusable(&place.root, &error))?;
        let foreign_bytes: u64 = survey.foreign.iter().map(|file| file.allocated_bytes).sum();
        let space = Space {
            capacity_bytes,
            min_free: options.min_free,
            used_bytes: survey.other_bytes + foreign_bytes + recovered.allocated_bytes,
            foreign: survey.foreign,
            root: Arc::clone(&place.root),
            directories: place.directories,
            cache: Arc::clone(&cache),
            file_bytes: file_bytes(capacity_bytes, place.groups.len()),
        };
        let groups = class_map(&inventory, &place.groups);
        let writer = random::<16>().map_err(|error| unusable(&place.root, &error))?;
        let buffer = || AlignedBuffer::zeroed(PADDING_BYTES, PADDING_BYTES).map(Arc::new);
        let tier = Arc::new(Self {
            groups,
            fingerprinter,
            digest: place.namespace.digest(),
            writer: WriterId(writer),
            deadline: options.deadline,
            honours_busy: options.honours_busy,
            capabilities,
            engine: OnceLock::new(),
            state: Mutex::new(State::new(
                inventory,
                epochs.current(),
                recovered.last_store_order.saturating_add(1),
            )),
            work: Condvar::new(),
            watch: Condvar::new(),
            done: Condvar::new(),
            space: Mutex::new(space),
            epochs: Mutex::new(epochs),
            scratch: buffer()?,
            zeros: buffer()?,
            first_store_order: recovered.last_store_order.saturating_add(1),
            poisoned: AtomicBool::new(false),
            root_lock: Mutex::new(Some(root_lock)),
            threads: Mutex::default(),
            around,
        });
        tier.shrink_to_capacity();
        tier.start(cache)?;
        Ok(tier)
    }

    /// Starts the engine and the tier's own threads.
    fn start(self: &Arc<Self>, cache: Arc<FileCache>) -> Result<()> {
        let weak = Arc::downgrade(self);
        let sink: CompletionSink = Arc::new(move |completion: Completion| {
            if let Some(tier) = Weak::upgrade(&weak) {
                tier.complete(completion);
            }
        });
        let clock = Arc::clone(&self.around.clock);
        let engine: Arc<dyn Engine> =
            Arc::new(threads::Threads::start(&self.capabilities, cache, clock, sink)?);
        let _ = self.engine.set(engine);
        let started = self.spawn_loop("kvstrata-writer", |tier| tier.write_loop()).and_then(|()| {
            self.spawn_loop("kvstrata-keeper", |tier| tier.keep_loop())
        });
        started.map_err(|error| {
            let mut state = lock(&self.state);
            state.phase = Phase::Stopping;
            state.writer_done = true;
            drop(state);
            self.watch.notify_all();
            self.work.notify_all();
            Error::new(ErrorKind::Unavailable, "the tier's threads cannot be started")
                .with_source(error)
        })
    }

    fn spawn_loop(self: &Arc<Self>, name: &str, body: fn(&Self)) -> io::Result<()> {
        let tier = Arc::clone(self);
        let handle = spawn(name, move || body(&tier))?;
        lock(&self.threads).push(handle);
        Ok(())
    }
}

/// Opens or makes the namespace and a directory for each group.
fn open_place(options: &TierOptions, root: Arc<Directory>, manifest: &Manifest) -> Result<Place> {
    let namespace = Namespace::open(&root, manifest)?;
    let groups: Vec<(GroupId, u64)> =
        options.row_bytes.iter().map(|(group, bytes)| (*group, *bytes)).collect();
    let mut directories = Vec::with_capacity(groups.len());
    for (group, _) in &groups {
        let directory =
            namespace.group_directory(*group).map_err(|error| unusable(&root, &error))?;
        directories.push(Arc::new(directory));
    }
    Ok(Place { root, namespace, directories, groups })
}

/// Refuses a capacity in which a group could not store a single row.
fn check_capacity(groups: &[(GroupId, u64)], capacity_bytes: u64) -> Result<()> {
    for (group, row_bytes) in groups {
        let least = Geometry::minimum_file_bytes(*row_bytes)
            .map_err(|error| Error::config(format!("row_bytes: group {group}: {error}")))?;
        if capacity_bytes < least {
            return Err(Error::config(format!(
                "capacity: {capacity_bytes} bytes cannot hold one row of group {group}, whose \
                 smallest file takes {least} bytes"
            )));
        }
    }
    Ok(())
}

fn class_map(
    inventory: &Inventory,
    groups: &[(GroupId, u64)],
) -> BTreeMap<GroupId, (crate::eviction::Class, usize)> {
    groups
        .iter()
        .filter_map(|(group, row_bytes)| {
            Some((*group, (inventory.class_of(*group)?, usize::try_from(*row_bytes).ok()?)))
        })
        .collect()
}

/// Bytes from the operating system's random source.
fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}

/// The error of a root that cannot be used.
fn unusable(root: &Directory, error: &io::Error) -> Error {
    let source = error.raw_os_error().map_or_else(
        || io::Error::new(error.kind(), error.to_string()),
        io::Error::from_raw_os_error,
    );
    Error::config(format!("root {} cannot be used", root.path().display())).with_source(source)
}
