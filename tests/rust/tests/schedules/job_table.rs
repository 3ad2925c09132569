//! Beginning, settling, polling and waiting by several threads at once.

use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::job::{JobKind, JobResult, JobTable, Outcome, Settlement};
use kvstrata_core::sys::clock::SystemClock;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use crate::{explore, is_found_out};

const LONG: Duration = Duration::from_hours(1);

fn table() -> Arc<JobTable> {
    Arc::new(JobTable::new(Arc::new(SystemClock)).unwrap())
}

fn settle(table: &JobTable, job: u64, position: usize, outcome: Outcome) {
    let settlement = Settlement {
        position,
        outcome,
        bytes: 10,
        busy: false,
    };
    table.settle(job, &[settlement], None);
}

/// Whether the table's descriptor says that there is something to poll.
fn is_readable(table: &JobTable) -> bool {
    let mut poll = libc::pollfd {
        fd: table.fileno(),
        events: libc::POLLIN,
        revents: 0,
    };
    #[expect(unsafe_code, reason = "the descriptor stays the table's")]
    // SAFETY: one valid `pollfd`, and no waiting.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready == 1
}

#[test]
fn each_job_is_polled_once_whoever_settles_polls_and_waits() {
    explore(|| {
        let table = table();
        for job in 0..3 {
            table.begin(job, JobKind::Load, 2).unwrap();
        }
        // Two threads settle the same keys in opposite orders: the first outcome stays.
        let settlers: Vec<_> = [Outcome::Ok, Outcome::Miss]
            .into_iter()
            .map(|outcome| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    for step in 0..6 {
                        let at = if outcome == Outcome::Ok {
                            step
                        } else {
                            5 - step
                        };
                        settle(&table, at / 2, usize::try_from(at % 2).unwrap(), outcome);
                    }
                })
            })
            .collect();
        let poller = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.poll())
        };
        let mut results: Vec<JobResult> = Vec::new();
        let idle = {
            let table = Arc::clone(&table);
            thread::spawn(move || assert!(table.wait_idle(LONG)))
        };
        for settler in settlers {
            settler.join().unwrap();
        }
        idle.join().unwrap();
        results.extend(poller.join().unwrap());
        results.extend(table.poll());
        let mut jobs: Vec<u64> = results.iter().map(|result| result.job_id).collect();
        jobs.sort_unstable();
        assert_eq!(jobs, [0, 1, 2]);
        for result in &results {
            assert_eq!(result.outcomes.len(), 2);
            assert_eq!(result.bytes, 20, "each key counts once");
        }
        assert_eq!((table.running(), table.unpolled()), (0, 0));
        assert!(!is_readable(&table));
    });
}

#[test]
fn a_waiter_is_woken_by_the_last_key_and_the_descriptor_tells_of_it() {
    explore(|| {
        let table = table();
        table.begin(7, JobKind::Store, 2).unwrap();
        let waiter = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.wait(LONG))
        };
        let threads: Vec<_> = (0..2)
            .map(|position| {
                let table = Arc::clone(&table);
                thread::spawn(move || settle(&table, 7, position, Outcome::Ok))
            })
            .collect();
        let results = waiter.join().unwrap();
        assert_eq!(results.len(), 1);
        assert!(results[0].success());
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(!is_readable(&table));
    });
}

#[test]
fn a_descriptor_is_readable_whenever_a_result_waits() {
    explore(|| {
        let table = table();
        table.begin(1, JobKind::Load, 1).unwrap();
        table.begin(2, JobKind::Load, 1).unwrap();
        let settler = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                settle(&table, 1, 0, Outcome::Ok);
                settle(&table, 2, 0, Outcome::Ok);
            })
        };
        // What an engine's loop does: polls only when told to.
        let mut results = 0;
        while results < 2 {
            if is_readable(&table) {
                results += table.poll().len();
            }
            thread::yield_now();
        }
        settler.join().unwrap();
        assert!(!is_readable(&table));
    });
}

#[test]
fn a_number_is_free_again_once_its_job_is_polled_and_not_before() {
    explore(|| {
        let table = table();
        table.begin(1, JobKind::Load, 1).unwrap();
        let settler = {
            let table = Arc::clone(&table);
            thread::spawn(move || settle(&table, 1, 0, Outcome::Ok))
        };
        let again = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.begin(1, JobKind::Load, 0).is_ok())
        };
        let first = table.wait(LONG).len();
        settler.join().unwrap();
        let begun = again.join().unwrap();
        let rest = table.poll().len();
        assert_eq!(first + rest, 1 + usize::from(begun));
    });
}

/// A table that forgets to hold the lock between looking and sleeping: what the checker is for.
#[test]
fn a_lost_wake_up_is_found() {
    assert!(is_found_out(|| {
        let shared = Arc::new((Mutex::new(()), Condvar::new(), AtomicBool::new(false)));
        let other = Arc::clone(&shared);
        let waiter = thread::spawn(move || {
            let (lock, changed, done) = &*other;
            if !done.load(Ordering::SeqCst) {
                drop(changed.wait(lock.lock().unwrap()).unwrap());
            }
        });
        shared.2.store(true, Ordering::SeqCst);
        shared.1.notify_all();
        waiter.join().unwrap();
    }));
}
