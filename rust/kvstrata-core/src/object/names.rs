//! Names of objects below a prefix. Pure: makes and reads names, asks no server.
//!
//! ```text
//! <prefix>/<model>-<digest>/namespace.json
//! <prefix>/<model>-<digest>/epochs/<epoch>
//! <prefix>/<model>-<digest>/rows/<epoch>/<fan-out>/<key>
//! ```

use core::fmt;

use object_store::path::Path;

use crate::format::row_table::EPOCH_LAST;
use crate::key::Key;
use crate::namespace::layout::{EPOCHS_NAME, MANIFEST_NAME, ROWS_NAME};

/// Number of fan-outs: parts into which the rows of an epoch are divided, for parallel listings.
pub const FAN_OUTS: u32 = 256;

/// Most numbers that are left out between one epoch and the next. None are, but for records that
/// were removed; a stranger's record of a large number would use up the numbers below it.
const LEFT_OUT_MAX: u32 = 100_000_000;

/// Which rows count: those of one epoch. No two are equal, whoever made them and whenever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch {
    /// The larger, the newer; from 1.
    pub number: u32,
    /// Random; 0 in epochs of older builds.
    pub suffix: u64,
}

impl fmt::Display for Epoch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:010}", self.number)?;
        if self.suffix != 0 {
            write!(formatter, "-{:016x}", self.suffix)?;
        }
        Ok(())
    }
}

impl Epoch {
    /// Reads an epoch's name; beyond [`EPOCH_LAST`] there are none.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (number, suffix) = match name.split_once('-') {
            Some((number, suffix)) => (number, u64::from_str_radix(suffix, 16).ok()?),
            None => (name, 0),
        };
        let epoch = Self {
            number: number.parse().ok()?,
            suffix,
        };
        let able = (1..=EPOCH_LAST).contains(&epoch.number);
        (epoch.to_string() == name && able).then_some(epoch)
    }

    /// Whether it can be one of ours where this is the largest number below it, or 0.
    #[must_use]
    pub const fn can_follow(self, number: u32) -> bool {
        self.number.saturating_sub(number) <= LEFT_OUT_MAX
    }
}

/// Names of everything in one namespace.
#[derive(Clone, Debug)]
pub struct Names {
    base: String,
}

impl Names {
    /// The names below `base`: prefix and namespace, joined by `/`.
    #[must_use]
    pub fn new(base: String) -> Self {
        Self { base }
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> Path {
        Path::from(format!("{}/{MANIFEST_NAME}", self.base))
    }

    /// Where the records of epochs are.
    #[must_use]
    pub fn epochs(&self) -> Path {
        Path::from(format!("{}/{EPOCHS_NAME}", self.base))
    }

    /// The record of an epoch: one for each number where the server can keep two processes from
    /// making both; else one for each epoch.
    #[must_use]
    pub fn record(&self, epoch: Epoch, conditional_put: bool) -> Path {
        let epoch = Epoch {
            suffix: if conditional_put { 0 } else { epoch.suffix },
            ..epoch
        };
        Path::from(format!("{}/{EPOCHS_NAME}/{epoch}", self.base))
    }

    /// Where the rows of all epochs are.
    #[must_use]
    pub fn rows(&self) -> Path {
        Path::from(format!("{}/{ROWS_NAME}", self.base))
    }

    /// Where the rows of an epoch are.
    #[must_use]
    pub fn rows_of(&self, epoch: Epoch) -> Path {
        Path::from(format!("{}/{ROWS_NAME}/{epoch}", self.base))
    }

    /// A name before which, in the order of names, the rows of an epoch and of all older ones come,
    /// but for those of its number without a suffix.
    #[must_use]
    pub fn after_rows_of(&self, epoch: Epoch) -> Path {
        // '-' comes before '/', and '0' behind it.
        Path::from(format!("{}/{ROWS_NAME}/{epoch}0", self.base))
    }

    /// The epoch whose rows an object below [`rows`](Self::rows) is among.
    #[must_use]
    pub fn epoch_of(&self, path: &Path) -> Option<Epoch> {
        // Part by part: characters of the prefix may be written in another way.
        let rows = self.rows();
        let mut parts = path.prefix_match(&rows)?;
        let epoch = Epoch::parse(parts.next()?.as_ref());
        epoch.filter(|_| parts.next().is_some())
    }

    /// A name after which, in the order of names, exactly the fan-outs from `fan_out` on come.
    #[must_use]
    pub fn before_fan_out(&self, epoch: Epoch, fan_out: u32) -> Path {
        // '/' is the only character below '0' that these names have.
        Path::from(format!("{}/{ROWS_NAME}/{epoch}/{fan_out:02x}", self.base))
    }

    /// A row.
    #[must_use]
    pub fn row(&self, epoch: Epoch, key: &Key) -> Path {
        use core::fmt::Write;
        let mut name = format!("{}/{ROWS_NAME}/{epoch}/{:02x}/", self.base, fan_out(key));
        for byte in key.as_bytes() {
            // Writing to a string cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        Path::from(name)
    }
}

/// The part of an epoch's rows that a key is in.
#[must_use]
pub fn fan_out(key: &Key) -> u32 {
    crc32fast::hash(key.as_bytes()) % FAN_OUTS
}

/// The key and the fan-out of a row, from the last two parts of its name.
#[must_use]
pub fn parse_row(name: &str) -> Option<(u32, Key)> {
    let mut parts = name.rsplit('/');
    let digits = parts.next()?;
    let own = u32::from_str_radix(parts.next()?, 16).ok()?;
    let mut bytes = [0_u8; crate::key::KEY_BYTES_MAX];
    let length = digits.len() / 2;
    let target = bytes.get_mut(..length)?;
    for (byte, pair) in target.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let [high, low] = pair else { return None };
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    let key = Key::new(target).ok()?;
    (digits.len() % 2 == 0 && fan_out(&key) == own).then_some((own, key))
}

/// The value of a lower-case hexadecimal digit.
const fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => Some(character - b'0'),
        b'a'..=b'f' => Some(character - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rows_are_read_back_and_others_are_not_ours() {
        let names = Names::new("p/m-0".to_owned());
        let key = Key::new(&[0xA7; 36]).unwrap();
        let epoch = Epoch {
            number: 3,
            suffix: 0,
        };
        let path = names.row(epoch, &key);
        assert!(
            path.as_ref().starts_with("p/m-0/rows/0000000003/"),
            "{path}"
        );
        assert_eq!(parse_row(path.as_ref()), Some((fan_out(&key), key)));
        assert_eq!(names.epoch_of(&path), Some(epoch));
        assert_eq!(names.epoch_of(&names.rows_of(epoch)), None);
        for name in ["", "00/aa", "zz/a7", "00/A7A7", "x"] {
            assert_eq!(parse_row(name), None, "{name}");
        }
        let moved = path.as_ref().replace(
            &format!("/{:02x}/", fan_out(&key)),
            &format!("/{:02x}/", (fan_out(&key) + 1) % FAN_OUTS),
        );
        assert_eq!(parse_row(&moved), None);
    }

    #[test]
    fn epochs_are_ordered_by_number_and_read_back() {
        let plain = Epoch {
            number: 2,
            suffix: 0,
        };
        let suffixed = Epoch {
            number: 2,
            suffix: 0xF,
        };
        assert_eq!(suffixed.to_string(), "0000000002-000000000000000f");
        for epoch in [plain, suffixed] {
            assert_eq!(Epoch::parse(&epoch.to_string()), Some(epoch));
        }
        assert!(
            plain < suffixed
                && suffixed
                    < Epoch {
                        number: 3,
                        suffix: 0
                    }
        );
        for name in [
            "2",
            "0000000000",
            "0000000002-f",
            "0000000002-0000000000000000",
            "x",
        ] {
            assert_eq!(Epoch::parse(name), None, "{name}");
        }
    }
}
