//! The checksum of a row: who it belongs to, how long it is, and its bytes.

use core::fmt;

use crc_fast::{CrcAlgorithm, Digest};

use super::superblock::NamespaceDigest;
use crate::key::Key;

/// Bytes of the checksum or tag field of an entry.
pub const CHECKSUM_FIELD_BYTES: usize = 16;

/// How the rows of a file are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChecksumKind {
    /// CRC-64/NVME in the first 8 bytes of the field, the rest zero.
    Crc64Nvme,
}

impl ChecksumKind {
    /// The kind's name in the manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "crc64nvme",
        }
    }

    /// The kind's number in the superblock.
    pub const fn number(self) -> u32 {
        match self {
            Self::Crc64Nvme => 1,
        }
    }

    /// The kind with `number`.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Crc64Nvme),
            _ => None,
        }
    }
}

/// The CRC-64/NVME of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowChecksum(pub u64);

impl RowChecksum {
    /// The checksum as an entry holds it: 8 bytes little-endian, then zeros.
    pub const fn to_field(self) -> [u8; CHECKSUM_FIELD_BYTES] {
        // The upper half of the wider number is the field's zero half.
        #[expect(
            clippy::as_conversions,
            reason = "u64 to u128 loses nothing; From is not const"
        )]
        let field = (self.0 as u128).to_le_bytes();
        field
    }
}

impl RowChecksum {
    /// The checksum that an entry's field holds; `None` when the field's other half is in use.
    pub fn from_field(field: &[u8; CHECKSUM_FIELD_BYTES]) -> Option<Self> {
        let value = u64::try_from(u128::from_le_bytes(*field)).ok()?;
        Some(Self(value))
    }
}

/// Computes the checksum of a row whose payload comes in pieces.
pub struct RowHasher(Digest);

impl RowHasher {
    /// Starts on the row of `key` in the namespace, with `payload_bytes` bytes of payload to come.
    pub fn new(namespace: &NamespaceDigest, key: &Key, payload_bytes: u64) -> Self {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&namespace.0);
        digest.update(&[key.length()]);
        digest.update(key.as_bytes());
        digest.update(&payload_bytes.to_le_bytes());
        Self(digest)
    }

    /// Takes the next piece of the payload.
    pub fn update(&mut self, payload: &[u8]) {
        self.0.update(payload);
    }

    /// The checksum of all pieces.
    pub fn finish(self) -> RowChecksum {
        RowChecksum(self.0.finalize())
    }
}

impl fmt::Debug for RowHasher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RowHasher")
    }
}

/// The checksum of the row of `key` in the namespace with `payload`.
pub fn row_checksum(namespace: &NamespaceDigest, key: &Key, payload: &[u8]) -> RowChecksum {
    let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
    let mut hasher = RowHasher::new(namespace, key, length);
    hasher.update(payload);
    hasher.finish()
}

/// CRC-32 (ISO-HDLC, as in zip and Ethernet) of `bytes`.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    // Of the crates for it the one that is quickest with the bytes of an entry, by a factor of four.
    crc32fast::hash(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_polynomials_give_their_published_check_values() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(b"123456789");
        assert_eq!(digest.finalize(), 0xAE8B_1486_0A79_9888);
    }

    #[test]
    fn namespace_key_length_and_payload_all_change_the_checksum() {
        let namespace = NamespaceDigest([1; 32]);
        let key = Key::new(&[7; 36]).unwrap();
        let base = row_checksum(&namespace, &key, &[0; 100]);
        assert_ne!(
            base,
            row_checksum(&NamespaceDigest([2; 32]), &key, &[0; 100])
        );
        assert_ne!(
            base,
            row_checksum(&namespace, &Key::new(&[8; 36]).unwrap(), &[0; 100])
        );
        assert_ne!(
            base,
            row_checksum(&namespace, &Key::new(&[7; 37]).unwrap(), &[0; 100])
        );
        assert_ne!(base, row_checksum(&namespace, &key, &[0; 101]));
        assert_ne!(base, row_checksum(&namespace, &key, &[1; 100]));
    }

    #[test]
    fn a_payload_in_pieces_has_the_checksum_of_the_whole() {
        let namespace = NamespaceDigest([1; 32]);
        let key = Key::new(&[7; 36]).unwrap();
        let mut hasher = RowHasher::new(&namespace, &key, 5);
        hasher.update(&[1, 2]);
        hasher.update(&[]);
        hasher.update(&[3, 4, 5]);
        assert_eq!(
            hasher.finish(),
            row_checksum(&namespace, &key, &[1, 2, 3, 4, 5])
        );
        assert_eq!(RowChecksum(0x0102).to_field()[..3], [2, 1, 0]);
    }
}
