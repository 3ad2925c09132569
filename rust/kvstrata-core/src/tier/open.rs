//! Opening a disk tier: the root, the namespace, what lies there, the threads.

use std::collections::BTreeMap;
use std::io;

use crate::buffer::aligned::AlignedBuffer;
use crate::config::{Size, TierOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::admission::Admission;
use crate::eviction::{self, Class};
use crate::format::superblock::WriterId;
use crate::index::{Fingerprinter, Index};
use crate::io::file::{FileCache, descriptors_max};
use crate::io::probe::TRIAL_PREFIX;
use crate::io::{Capabilities, Completion, CompletionSink, probe};
use crate::key::GroupId;
use crate::namespace::epoch::Epochs;
use crate::namespace::manifest::Manifest;
use crate::namespace::{Lease, Namespace, layout, lease};
use crate::notice::Level;
use crate::sys::fs::{Directory, EntryKind, ShareMode, TEMPORARY_SUFFIX, fill_random};
use crate::sys::sync::atomic::AtomicBool;
use crate::sys::sync::{Arc, Condvar, Mutex, OnceLock, Weak, lock, spawn};
use crate::tier::disk::DiskTier;
use crate::tier::foreign;
use crate::tier::health::Health;
use crate::tier::inventory::Inventory;
use crate::tier::limits::{check_capacity, check_min_free};
use crate::tier::load_buffers::LoadBuffers;
use crate::tier::nested;
use crate::tier::phase::Phase;
use crate::tier::plan::PADDING_BYTES;
use crate::tier::recover;
use crate::tier::root_lock;
use crate::tier::space::{Space, file_bytes};
use crate::tier::state::State;
use crate::tier::stats::SpaceFigures;
use crate::tier::surroundings::Surroundings;

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
        nested::refuse(&options.root)?;
        let root = Directory::open_root(&options.root, true, ShareMode::Private)?
            .noted_in(&around.descriptors);
        // Again: a path may have led elsewhere before its directories were made.
        nested::refuse(&options.root)?;
        let root_lock = root_lock::acquire(&root, &*around.clock)?;
        remove_trials(&root);
        let place = open_place(options, Arc::new(root), &manifest)?;
        let writer = WriterId(random(&place.root)?);
        let lease = take_lease(&place, writer, &around)?;
        let capabilities = (around.probe_root)(&place.root, &options.io_backend)?;
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
            writer,
            deadline: options.deadline,
            honours_busy: options.honours_busy,
            engine: OnceLock::new(),
            state: Mutex::new(State::new(
                stock.inventory,
                load_buffers(options, &capabilities),
                stock.epochs.current(),
                stock.first_store_order,
            )),
            work: Condvar::new(),
            watch: Condvar::new(),
            done: Condvar::new(),
            space: Mutex::new(stock.space),
            space_figures: SpaceFigures::default(),
            health: Health::new(around.circuit),
            trial_name: trial_name(&place.root)?,
            root: place.root,
            epochs: Mutex::new(stock.epochs),
            first_request: Mutex::default(),
            scratch: buffer()?,
            zeros: buffer()?,
            first_store_order: stock.first_store_order,
            poisoned: AtomicBool::new(false),
            panic_told: AtomicBool::new(false),
            root_lock: Mutex::new(Some(root_lock)),
            lease: Mutex::new(lease),
            threads: Mutex::default(),
            capabilities,
            around,
        });
        tier.meet_limits();
        // The figures are there before anything is stored.
        tier.add_space(&mut serde_json::Map::new());
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
        if let Some(lease) = &*lock(&self.lease) {
            engine.guard(lease.file());
        }
        lock(&self.around.engines).push(Arc::downgrade(&engine));
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
    check_min_free(&options.row_bytes, options.min_free, system.total_bytes)?;
    let policy = eviction::create_with(&options.policy, options.directory)?;
    let admission = Admission::new(options.admission, policy.predicts());
    let mut epochs = Epochs::open(place.namespace.directory()).map_err(failed)?;
    begin_anew_if_used_up(&mut epochs, place, around);
    let cache = Arc::new(FileCache::new(descriptors_max()));
    let mut inventory = Inventory::new(
        Index::default(),
        policy,
        admission,
        place.groups.iter().copied(),
    );
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
        file_bytes: file_bytes(capacity_bytes.min(system.total_bytes), place.groups.len()),
        limit: None,
        starved: Vec::new(),
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

/// Gives up everything stored when the numbers of epochs run out, so that resets go on to work.
fn begin_anew_if_used_up(epochs: &mut Epochs, place: &Place, around: &Surroundings) {
    around.metrics.junk.add(epochs.strange());
    if epochs.strange() > 0 {
        around.notices.say(Level::Warning, "epochs", || {
            let count = epochs.strange();
            format!("{count} names in the directory of epochs are none and are ignored")
        });
    }
    if !epochs.used_up() {
        return;
    }
    // Durably without rows first: none may be found under a number that is used again.
    let emptied = place
        .directories
        .iter()
        .try_for_each(|directory| recover::remove_row_files(directory));
    let begun = emptied.and_then(|()| epochs.begin_anew());
    around
        .notices
        .say(Level::Warning, "epochs", || match begun {
            Ok(()) => "the numbers of epochs ran out; all stored rows are given up".to_owned(),
            Err(error) => format!("the numbers of epochs run out: {error}"),
        });
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

/// A name for the files of this process's trials: the next open removes what is left of them.
fn trial_name(root: &Directory) -> Result<String> {
    let unique = u64::from_le_bytes(random(root)?);
    Ok(format!("{TRIAL_PREFIX}{unique:016x}{TEMPORARY_SUFFIX}"))
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

/// Buffers for loads where reads can hang and the caller reuses a slot as soon as its job ends.
fn load_buffers(options: &TierOptions, capabilities: &Capabilities) -> Option<LoadBuffers> {
    let stride = |row_bytes: &u64| {
        let row_bytes = usize::try_from(*row_bytes).ok()?;
        row_bytes.checked_next_multiple_of(PADDING_BYTES)
    };
    let stride_max = options.row_bytes.values().filter_map(stride).max()?;
    let needed = capabilities.may_hang && !options.honours_busy;
    needed.then(|| LoadBuffers::new(stride_max))
}

/// Takes a lease of the namespace after removing those of dead writers.
///
/// # Errors
/// `Config` naming a writer that is alive: a write of it may still land. With the root's lock in
/// our hands it is a process that was killed and that the kernel has not let go yet, which is
/// waited for, or a child that such a process forked. On a full disk there may be no lease: what is stored can be loaded
/// all the same, and the root's lock keeps others out.
fn take_lease(place: &Place, writer: WriterId, around: &Surroundings) -> Result<Option<Lease>> {
    let root = &place.root;
    let directory = place.namespace.directory();
    let clock = &around.clock;
    let begun = clock.now();
    loop {
        let cleared = lease::clear(directory).map_err(|error| unusable(root, &error))?;
        let Some(alive) = cleared.alive.first() else {
            break;
        };
        if clock.now().saturating_duration_since(begun) >= root_lock::DRAIN_TIME_MAX {
            return Err(Error::config(format!(
                "root {} is in use: a writer of {} has not ended ({alive}); end it or try again",
                root.path().display(),
                directory.path().display()
            )));
        }
        clock.sleep(root_lock::DRAIN_PAUSE);
    }
    match Lease::take(directory, writer) {
        Ok(lease) => Ok(Some(lease)),
        Err(error) if is_full(&error) => {
            around.notices.say(Level::Warning, "lease", || {
                format!(
                    "no lease can be written in {}: {error}",
                    directory.path().display()
                )
            });
            Ok(None)
        }
        Err(error) => Err(unusable(root, &error)),
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
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
