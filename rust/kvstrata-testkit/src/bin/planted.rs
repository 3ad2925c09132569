//! `planted use-after-free|race`: does what a sanitizer has to report, so that a clean run of the
//! tests under it means something. Without a sanitizer it ends well, by luck.

use std::error::Error;
use std::hint::black_box;
use std::thread;

/// A counter that two threads change without a lock.
static mut UNGUARDED: u64 = 0;

fn use_after_free() -> u8 {
    let row = black_box(vec![7_u8; 4096].into_boxed_slice());
    let address = row.as_ptr();
    drop(row);
    #[expect(unsafe_code, reason = "the fault itself")]
    // SAFETY: none; this is the fault that must be reported.
    unsafe {
        address.add(100).read_volatile()
    }
}

fn race() {
    let add = || {
        for _ in 0..1000 {
            #[expect(unsafe_code, reason = "the fault itself")]
            // SAFETY: none; this is the fault that must be reported.
            unsafe {
                let counter = &raw mut UNGUARDED;
                counter.write_volatile(counter.read_volatile().wrapping_add(1));
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(add);
        scope.spawn(add);
    });
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("use-after-free") => {
            black_box(use_after_free());
        }
        Some("race") => race(),
        _ => return Err("usage: planted use-after-free|race".into()),
    }
    Ok(())
}
