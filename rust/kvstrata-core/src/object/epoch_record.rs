//! What the record of an epoch holds. Pure.
//!
//! An epoch is more than its number: a bucket that was emptied has no records, and the next process
//! begins with number 1 again while an old one may still write rows of an earlier number 1. So each
//! record names a random number of its own, which joins the epoch.

use crate::object::names::Epoch;

const BEFORE: &str = "an epoch of kvstrata, ";
const AFTER: &str = "; without it rows that were reset could come back\n";
/// The record of an epoch without a random number.
const PLAIN: &[u8] = b"an epoch of kvstrata; without it rows that were reset could come back\n";

/// The bytes of an epoch's record: fewer than any row's, so that rules about old objects can leave
/// it alone.
#[must_use]
pub fn body(epoch: Epoch) -> String {
    format!("{BEFORE}{epoch}{AFTER}")
}

/// The epoch of this number that a record names; `None` for anything but a record of it.
#[must_use]
pub fn parse(number: u32, body: &[u8]) -> Option<Epoch> {
    if body == PLAIN {
        return Some(Epoch { number, suffix: 0 });
    }
    let text = core::str::from_utf8(body).ok()?;
    let name = text.strip_prefix(BEFORE)?.strip_suffix(AFTER)?;
    Epoch::parse(name).filter(|epoch| epoch.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_others_are_none() {
        let epoch = Epoch {
            number: 7,
            suffix: 0xAB,
        };
        let text = body(epoch);
        assert!(text.contains("0000000007-00000000000000ab"), "{text}");
        assert_eq!(parse(7, text.as_bytes()), Some(epoch));
        assert_eq!(parse(8, text.as_bytes()), None);
        let plain = Epoch {
            number: 7,
            suffix: 0,
        };
        assert_eq!(parse(7, PLAIN), Some(plain));
        for other in ["", "an epoch of kvstrata, 7; without", "x"] {
            assert_eq!(parse(7, other.as_bytes()), None, "{other}");
        }
        assert_eq!(parse(7, &[0xFF; 10]), None);
    }
}
