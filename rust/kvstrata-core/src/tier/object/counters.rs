//! What only object tiers count.

use serde_json::{Map, Value};

use crate::metrics::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Everything that an object tier counts beside what all tiers do.
        #[derive(Debug, Default)]
        pub(super) struct ObjectCounters {
            $($(#[$doc])* pub(super) $name: Counter,)*
        }

        impl ObjectCounters {
            /// Adds all counters under their names.
            pub(super) fn add_to(&self, all: &mut Map<String, Value>) {
                $(all.insert(stringify!($name).to_owned(), Value::from(self.$name.get()));)*
            }
        }
    };
}

counters! {
    /// Requests for rows: GET and PUT, attempts counted one by one.
    row_requests,
    /// Keys asked for one by one (HEAD).
    head_requests,
    /// Names read in listings.
    listed_names,
    /// Listings that reached the end of the namespace.
    complete_listings,
    /// Attempts after a failed one.
    retries,
    /// Attempts that were not made because too many others had been.
    retries_refused,
    /// Reads that the server denied (403), answered as misses.
    denied_reads,
    /// Objects that were not what their names said, deleted or overwritten.
    healed_objects,
    /// Objects of newer builds in the places of rows that were stored or loaded: left alone.
    newer_objects,
    /// Attempts to delete the object of a removed row that failed.
    failed_deletions,
    /// Removed rows whose objects stay, because too many waited to be deleted.
    deletions_left_out,
    /// Lookups answered "not known yet", in keys.
    unknown_lookups,
    /// Lookups answered no because no answer came in time, or too many were awaited, in keys.
    late_lookups,
}
