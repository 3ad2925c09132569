//! Everything that bounds an object tier, with its default and why.

use core::time::Duration;

use crate::eviction::admission::AdmissionOptions;

/// Bounds of one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObjectLimits {
    /// Requests for rows at a time. 4 keep two cores busy on the way to a server beside them; one
    /// with a round trip of 20 ms takes 64.
    pub requests_max: usize,
    /// Payload bytes of these requests together: what a slow network may hold in its sockets.
    pub bytes_in_flight_max: u64,
    /// Questions for single keys (HEAD) at a time, beside the requests for rows.
    pub questions_max: usize,
    /// Keys that are being asked for and have no answer yet; beyond it lookups answer no.
    pub asked_max: usize,
    /// How long a lookup says "not known yet" before it says no.
    pub lookup_wait: Duration,
    /// How long it is believed that a key is there.
    pub found_for: Duration,
    /// How long it is believed that a key is not there: a peer's rows are found after it.
    pub absent_for: Duration,
    /// Least time between the beginnings of two listings of the whole namespace.
    pub list_every: Duration,
    /// Pages (of 1000 names, as servers cut them) of one listing.
    pub list_pages_max: usize,
    /// Attempts of one operation, the first included.
    pub attempts_max: u32,
    /// First pause before another attempt; doubled each time, and a random part of it is taken.
    pub retry_pause: Duration,
    /// Which rows are stored: all of them.
    pub admission: AdmissionOptions,
}

impl Default for ObjectLimits {
    fn default() -> Self {
        Self {
            requests_max: 32,
            bytes_in_flight_max: 256 << 20,
            questions_max: 32,
            asked_max: 1 << 16,
            lookup_wait: Duration::from_secs(2),
            found_for: Duration::from_mins(10),
            absent_for: Duration::from_secs(15),
            list_every: Duration::from_mins(1),
            list_pages_max: 2000,
            attempts_max: 4,
            retry_pause: Duration::from_millis(50),
            admission: AdmissionOptions::default(),
        }
    }
}
