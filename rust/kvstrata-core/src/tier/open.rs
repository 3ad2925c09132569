//! Opening a disk tier: the root, the namespace, what lies there, the threads.

use core::sync::atomic::AtomicBool;
use std::collections::BTreeMap;
use std::io;

use crate::buffer::aligned::AlignedBuffer;
use crate::config::{Size, TierOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::{self, Class};
use crate::format::geometry::Geometry;
use crate::format::superblock::WriterId;
use crate::index::{Fingerprinter, Index};
use crate::io::file::{DESCRIPTORS_MAX, FileCache};
use crate::io::{Completion, CompletionSink, probe};
use crate::key::GroupId;
use crate::namespace::epoch::Epochs;
use crate::namespace::manifest::Manifest;
use crate::namespace::{Namespace, layout};
use crate::notice::Level;
use crate::sys::fs::{Directory, EntryKind, ShareMode, fill_random};
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
    pub(crate) fn open(options: &TierOptions, around: Surroundings) -> Result<Arc<Self>> {
        let manifest = check_options(options)?;
        let root = Directory::open_root(&options.root, true, ShareMode::Private)?;
        let root_lock = root_lock::acquire(&root)?;
        remove_trials(&root);
        let place = open_place(options, Arc::new(root), &manifest)?;
        let capabilities = probe::probe(&place.root, &options.io_backend)?;
        around
            .notices
            .say(Level::Info, "capabilities", || capabilities.to_string());
        let stock = take_stock(options, &manifest, &place, &around)?;
        let groups = class_map(&stock.inventory, &place.groups);
        let buffer = || AlignedBuffer::zeroed(PADDING_BYTES, PADDING_BYTES).map(Arc::new);
        let cache = Arc::clone(&stock.space.cache);
        let tier = Arc::new(Self {
            groups,
            fingerprinter: stock.fingerprinter,
            digest: place.namespace.digest(),
            writer: WriterId(random(&place.root)?),
            deadline: options.deadline,
            honours_busy: options.honours_busy,
            capabilities,
            engine: OnceLock::new(),
            state: Mutex::new(State::new(
                stock.inventory,
                stock.epochs.current(),
                stock.first_store_order,
            )),
            work: Condvar::new(),
            watch: Condvar::new(),
            done: Condvar::new(),
            space: Mutex::new(stock.space),
            epochs: Mutex::new(stock.epochs),
            scratch: buffer()?,
            zeros: buffer()?,
            first_store_order: stock.first_store_order,
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
                tier.complete(&completion);
            }
        });
        let clock = Arc::clone(&self.around.clock);
        let engine = (self.around.start_engine)(&self.capabilities, cache, clock, sink)?;
        if let Some(root_lock) = &*lock(&self.root_lock) {
            engine.guard(root_lock);
        }
        let _ = self.engine.set(engine);
        let started = self
            .spawn_loop("kvstrata-writer", Self::write_loop)
            .and_then(|()| self.spawn_loop("kvstrata-keeper", Self::keep_loop));
        started.map_err(|error| {
            let mut state = lock(&self.state);
            state.phase = Phase::Stopping;
            state.writer_done = true;
            drop(state);
            self.watch.notify_all();
            self.work.notify_all();
            Error::new(
                ErrorKind::Unavailable,
                "the tier's threads cannot be started",
            )
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

/// What lies in a root, read.
struct Stock {
    epochs: Epochs,
    inventory: Inventory,
    fingerprinter: Fingerprinter,
    space: Space,
    first_store_order: u64,
}

/// Reads what earlier runs left: epoch, rows, and the space that all of it takes.
fn take_stock(
    options: &TierOptions,
    manifest: &Manifest,
    place: &Place,
    around: &Surroundings,
) -> Result<Stock> {
    let failed = |error: io::Error| unusable(&place.root, &error);
    let system = place.root.statistics().map_err(failed)?;
    let capacity_bytes = options.capacity.resolve(system.total_bytes);
    check_capacity(&options.row_bytes, capacity_bytes)?;
    let policy = eviction::create(&options.policy)?;
    let mut epochs = Epochs::open(place.namespace.directory()).map_err(failed)?;
    let cache = Arc::new(FileCache::new(DESCRIPTORS_MAX));
    let mut inventory = Inventory::new(Index::default(), policy, place.groups.iter().copied());
    let fingerprinter = Fingerprinter::new(random(&place.root)?);
    let source = recover::Source {
        directories: &place.directories,
        groups: &place.groups,
        digest: place.namespace.digest(),
        cache: &cache,
        fingerprinter: &fingerprinter,
        around,
    };
    let recovered = recover::recover(&source, &mut epochs, &mut inventory).map_err(failed)?;
    let survey = foreign::survey(&place.root, &layout::directory_name(manifest)).map_err(failed)?;
    let foreign_bytes: u64 = survey.foreign.iter().map(|file| file.allocated_bytes).sum();
    let space = Space {
        capacity_bytes,
        min_free: options.min_free,
        used_bytes: survey.other_bytes + foreign_bytes + recovered.allocated_bytes,
        foreign: survey.foreign,
        root: Arc::clone(&place.root),
        directories: place.directories.clone(),
        cache,
        file_bytes: file_bytes(capacity_bytes, place.groups.len()),
    };
    let first_store_order = recovered.last_store_order.saturating_add(1);
    Ok(Stock {
        epochs,
        inventory,
        fingerprinter,
        space,
        first_store_order,
    })
}

/// Checks everything that does not depend on the root; returns the manifest.
///
/// # Errors
/// `Config` naming the field: no later attempt could succeed.
pub(crate) fn check_options(options: &TierOptions) -> Result<Manifest> {
    options.validate()?;
    eviction::create(&options.policy)?;
    if let Size::Bytes(capacity_bytes) = options.capacity {
        check_capacity(&options.row_bytes, capacity_bytes)?;
    }
    Manifest::new(options.identity.clone(), &options.row_bytes)
}

/// Removes the files of probes that were killed.
fn remove_trials(root: &Directory) {
    for entry in root.entries().unwrap_or_default() {
        let trial = entry
            .name
            .to_str()
            .filter(|name| entry.kind == EntryKind::File && probe::is_trial_name(name));
        if let Some(name) = trial {
            // One that cannot be removed is small, counted and tried again at the next open.
            let _ = root.unlink(name);
        }
    }
}

/// Opens or makes the namespace and a directory for each group.
fn open_place(options: &TierOptions, root: Arc<Directory>, manifest: &Manifest) -> Result<Place> {
    let namespace = Namespace::open(&root, manifest)?;
    let groups: Vec<(GroupId, u64)> = options
        .row_bytes
        .iter()
        .map(|(group, bytes)| (*group, *bytes))
        .collect();
    let mut directories = Vec::with_capacity(groups.len());
    for (group, _) in &groups {
        let directory = namespace
            .group_directory(*group)
            .map_err(|error| unusable(&root, &error))?;
        directories.push(Arc::new(directory));
    }
    Ok(Place {
        root,
        namespace,
        directories,
        groups,
    })
}

/// Refuses a capacity in which a group could not store a single row.
fn check_capacity(row_bytes: &BTreeMap<GroupId, u64>, capacity_bytes: u64) -> Result<()> {
    for (group, row_bytes) in row_bytes {
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
) -> BTreeMap<GroupId, (Class, usize)> {
    groups
        .iter()
        .filter_map(|(group, row_bytes)| {
            Some((
                *group,
                (
                    inventory.class_of(*group)?,
                    usize::try_from(*row_bytes).ok()?,
                ),
            ))
        })
        .collect()
}

/// Bytes from the operating system's random source.
fn random<const N: usize>(root: &Directory) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes).map_err(|error| unusable(root, &error))?;
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
