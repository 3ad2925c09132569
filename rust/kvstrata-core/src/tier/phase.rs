//! Where a tier is in its life, and what a call of a closed one gets.

use crate::error::{Error, ErrorKind, Result};

/// Where a tier is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Takes jobs.
    Open,
    /// Takes no jobs; what runs may end.
    Closing,
    /// The threads end.
    Stopping,
}

impl Phase {
    /// Lets a call through that only an open tier takes.
    ///
    /// # Errors
    /// `Closed` from the beginning of the close on.
    pub(crate) fn require_open(self) -> Result<()> {
        if self == Self::Open {
            Ok(())
        } else {
            Err(closed())
        }
    }
}

/// The error of a call to a closed tier.
pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the tier is closed")
}
