//! A tier over an engine that fails, tears, stalls and holds operations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kvstrata_core::config::TierOptions;
use kvstrata_core::io::probe::probe;
use kvstrata_core::io::{Direction, Operation};
use kvstrata_core::tier::{CircuitLimits, Seams};
use kvstrata_testkit::faulty::{Fault, FaultyEngine};
use tempfile::TempDir;

use super::{Harness, ROW_BYTES, options};

pub const CAPACITY: u64 = 16 << 20;

type Chooser = Arc<Mutex<Box<dyn FnMut(&Operation) -> Fault + Send>>>;
type Handle = Arc<Mutex<Option<Arc<FaultyEngine>>>>;

/// What a test's root is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mount {
    /// A local disk.
    Local,
    /// One whose calls can hang, so that loads go through buffers.
    MayHang,
}

/// A tier whose engine does what `choose` says, with a handle on that engine.
pub struct Faulty {
    pub harness: Harness,
    pub engine: Arc<FaultyEngine>,
    pub choose: Chooser,
    pub root: TempDir,
}

impl Faulty {
    pub fn open(change: impl FnOnce(&mut TierOptions)) -> Self {
        Self::open_with(change, Seams::default())
    }

    /// The same with another clock, or another circuit.
    pub fn open_with(change: impl FnOnce(&mut TierOptions), other: Seams) -> Self {
        Self::open_as(Mount::Local, 64, change, other)
    }

    /// The same with so many slots, on a root that is taken for a mount of this kind, and with a
    /// device that is never given up.
    pub fn open_on(mount: Mount, slots: usize, change: impl FnOnce(&mut TierOptions)) -> Self {
        let circuit = CircuitLimits {
            failures_max: u32::MAX,
            ..CircuitLimits::default()
        };
        let other = Seams {
            circuit,
            ..Seams::default()
        };
        Self::open_as(mount, slots, change, other)
    }

    fn open_as(
        mount: Mount,
        slots: usize,
        change: impl FnOnce(&mut TierOptions),
        other: Seams,
    ) -> Self {
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut own = options(root.path(), ROW_BYTES, CAPACITY);
        change(&mut own);
        let choose: Chooser = Arc::new(Mutex::new(Box::new(|_| Fault::None)));
        let (plan, engine) = (Arc::clone(&choose), Handle::default());
        let made = Arc::clone(&engine);
        let seams = Seams {
            probe_root: Arc::new(move |root, backend| {
                let mut found = probe(root, backend)?;
                found.may_hang = mount == Mount::MayHang;
                Ok(found)
            }),
            start_engine: Arc::new(move |capabilities, files, clock, sink| {
                let plan = Arc::clone(&plan);
                let wrapped = FaultyEngine::new(
                    sink,
                    Box::new(move |operation| (plan.lock().unwrap())(operation)),
                    |sink| (Seams::default().start_engine)(capabilities, files, clock, sink),
                )?;
                let wrapped = Arc::new(wrapped);
                *made.lock().unwrap() = Some(Arc::clone(&wrapped));
                Ok(wrapped)
            }),
            ..other
        };
        let harness = Harness::open_with(own, slots, seams);
        let engine = engine.lock().unwrap().clone().unwrap();
        Self {
            harness,
            engine,
            choose,
            root,
        }
    }

    pub fn choose(&self, choose: impl FnMut(&Operation) -> Fault + Send + 'static) {
        *self.choose.lock().unwrap() = Box::new(choose);
    }

    /// Holds every read, and counts their bytes, padding included.
    pub fn hold_reads(&self) -> Arc<AtomicU64> {
        let read_bytes = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&read_bytes);
        self.choose(move |operation| match operation.direction {
            Direction::Read => {
                counter.fetch_add(operation.bytes(), Ordering::SeqCst);
                Fault::Hold
            }
            Direction::Write => Fault::None,
        });
        read_bytes
    }

    /// Waits until so many operations are held.
    pub fn wait_held(&self, count: usize) {
        while self.engine.held() < count {
            std::thread::yield_now();
        }
    }

    pub fn fail(&self, direction: Direction, fault: Fault) {
        self.choose(move |operation| {
            if operation.direction == direction {
                fault
            } else {
                Fault::None
            }
        });
    }
}
