//! Checksums of bytes that begin differently and go on the same, without reading what is the same
//! twice.
//!
//! A CRC is the remainder of a polynomial; that of two pieces in a row is the first one's, moved on
//! by the second one's length, plus the second one's. Bits are in reflected order, as in the CRC:
//! the highest one is the coefficient of 1.

use crc_fast::{CrcAlgorithm, Digest};

use super::checksum::{RowChecksum, RowHasher};
use super::superblock::NamespaceDigest;
use crate::key::Key;

/// The polynomial of CRC-64/NVME without its highest term.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;
const ONE: u64 = 1 << 63;
/// The power of a byte: x to the eighth.
const BYTE: u64 = ONE >> 8;

/// The product of two polynomials modulo that of the CRC.
const fn product(mut a: u64, mut b: u64) -> u64 {
    let mut sum = 0;
    while a != 0 {
        if a & ONE != 0 {
            sum ^= b;
        }
        a <<= 1;
        b = (b >> 1) ^ if b & 1 == 0 { 0 } else { POLYNOMIAL };
    }
    sum
}

/// A payload's length, as what moves a checksum on over it. Making one takes microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift(u64);

impl Shift {
    /// Over so many bytes.
    #[must_use]
    pub const fn over(mut bytes: u64) -> Self {
        let (mut power, mut square) = (ONE, BYTE);
        while bytes != 0 {
            if bytes & 1 != 0 {
                power = product(power, square);
            }
            square = product(square, square);
            bytes >>= 1;
        }
        Self(power)
    }

    /// The checksum of two pieces, the second of which has this length.
    const fn join(self, first: u64, second: u64) -> u64 {
        product(self.0, first) ^ second
    }
}

/// The checksum of a payload alone.
#[derive(Clone, Copy, Debug)]
pub struct PayloadChecksum {
    crc: u64,
    bytes: u64,
    shift: Shift,
}

impl PayloadChecksum {
    /// Reads the payload, whose length `shift` is for.
    #[must_use]
    pub fn of(payload: &[u8], shift: Shift) -> Self {
        Self {
            crc: crc(payload),
            bytes: u64::try_from(payload.len()).unwrap_or(u64::MAX),
            shift,
        }
    }

    /// The checksum of the payload as the row of `key` in the namespace.
    #[must_use]
    pub fn of_row(self, namespace: &NamespaceDigest, key: &Key) -> RowChecksum {
        let RowChecksum(before) = RowHasher::new(namespace, key, self.bytes).finish();
        RowChecksum(self.shift.join(before, self.crc))
    }

    /// The CRC-64/NVME of these bytes and the payload after them.
    #[must_use]
    pub fn after(self, first: &[u8]) -> u64 {
        self.shift.join(crc(first), self.crc)
    }
}

/// The CRC-64/NVME of some bytes.
#[must_use]
pub fn crc(bytes: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(bytes);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::checksum::row_checksum;

    proptest! {
        #[test]
        fn they_are_those_of_the_whole(
            first in prop::collection::vec(any::<u8>(), 0..300),
            payload in prop::collection::vec(any::<u8>(), 0..70_000),
            key in prop::collection::vec(any::<u8>(), 20..=68),
        ) {
            let shift = Shift::over(u64::try_from(payload.len()).unwrap());
            let of_payload = PayloadChecksum::of(&payload, shift);
            let namespace = NamespaceDigest([9; 32]);
            let key = Key::new(&key).unwrap();
            let row = row_checksum(&namespace, &key, &payload);
            prop_assert_eq!(of_payload.of_row(&namespace, &key), row);
            let whole = [first.as_slice(), &payload].concat();
            prop_assert_eq!(of_payload.after(&first), crc(&whole));
        }
    }

    #[test]
    fn a_shift_over_nothing_changes_nothing() {
        assert_eq!(Shift::over(0), Shift(ONE));
        assert_eq!(
            PayloadChecksum::of(&[], Shift::over(0)).after(b"a"),
            crc(b"a")
        );
    }
}
