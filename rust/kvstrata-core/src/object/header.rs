//! The header of an object: who the row belongs to, how long it is, its checksum.
//!
//! `docs/FORMAT.md` states it byte for byte.

use crate::format::checksum::{CHECKSUM_FIELD_BYTES, RowChecksum};
use crate::format::{ChecksumKind, NamespaceDigest};
use crate::key::{KEY_BYTES_MAX, Key};
use crate::object::names::Epoch;

/// Bytes of the header of every object with a row.
pub const HEADER_BYTES: usize = 256;
/// Version of this form.
pub const OBJECT_VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"KVSTROBJ";

/// What an object says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowHeader {
    /// The namespace.
    pub namespace: NamespaceDigest,
    /// The whole key.
    pub key: Key,
    /// Bytes behind the header.
    pub payload_bytes: u64,
    /// Over namespace, key, length and payload.
    pub checksum: RowChecksum,
    /// The epoch in which it was stored.
    pub epoch: Epoch,
}

/// Why bytes are not the header of a row of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// They do not begin as one, or are too few.
    NotOurs,
    /// A newer build's.
    NewerVersion,
    /// The header's own checksum is wrong, or a field is impossible.
    Damaged,
}

fn put<const N: usize>(bytes: &mut [u8; HEADER_BYTES], at: usize, field: [u8; N]) {
    if let Some(target) = bytes
        .get_mut(at..)
        .and_then(|rest| rest.first_chunk_mut::<N>())
    {
        *target = field;
    }
}

fn get<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    found.copied().unwrap_or([0; N])
}

impl RowHeader {
    /// The bytes of the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 8, OBJECT_VERSION.to_le_bytes());
        put(
            &mut bytes,
            12,
            ChecksumKind::Crc64Nvme.number().to_le_bytes(),
        );
        put(&mut bytes, 16, self.namespace.0);
        put(&mut bytes, 48, *self.key.padded());
        put(&mut bytes, 116, [self.key.length()]);
        put(&mut bytes, 120, self.payload_bytes.to_le_bytes());
        put(&mut bytes, 128, self.checksum.to_field());
        put(&mut bytes, 144, self.epoch.number.to_le_bytes());
        put(&mut bytes, 152, self.epoch.suffix.to_le_bytes());
        let sum = crc32fast::hash(bytes.get(..252).unwrap_or(&[]));
        put(&mut bytes, 252, sum.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`HeaderError`]: nothing of the object may be used.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let bytes: &[u8; HEADER_BYTES] = bytes
            .first_chunk::<HEADER_BYTES>()
            .ok_or(HeaderError::NotOurs)?;
        if get::<8>(bytes, 0) != MAGIC {
            return Err(HeaderError::NotOurs);
        }
        let sum = crc32fast::hash(bytes.get(..252).unwrap_or(&[]));
        if u32::from_le_bytes(get(bytes, 252)) != sum {
            return Err(HeaderError::Damaged);
        }
        match u32::from_le_bytes(get(bytes, 8)) {
            OBJECT_VERSION => {}
            0 => return Err(HeaderError::Damaged),
            _ => return Err(HeaderError::NewerVersion),
        }
        let kind = u32::from_le_bytes(get(bytes, 12));
        ChecksumKind::from_number(kind).ok_or(HeaderError::Damaged)?;
        let [length] = get::<1>(bytes, 116);
        let padded = get::<KEY_BYTES_MAX>(bytes, 48);
        let own = padded
            .get(..usize::from(length))
            .ok_or(HeaderError::Damaged)?;
        let key = Key::new(own).map_err(|_| HeaderError::Damaged)?;
        if *key.padded() != padded {
            return Err(HeaderError::Damaged);
        }
        let checksum = RowChecksum::from_field(&get::<CHECKSUM_FIELD_BYTES>(bytes, 128));
        Ok(Self {
            namespace: NamespaceDigest(get(bytes, 16)),
            key,
            payload_bytes: u64::from_le_bytes(get(bytes, 120)),
            checksum: checksum.ok_or(HeaderError::Damaged)?,
            epoch: Epoch {
                number: u32::from_le_bytes(get(bytes, 144)),
                suffix: u64::from_le_bytes(get(bytes, 152)),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> RowHeader {
        RowHeader {
            namespace: NamespaceDigest([3; 32]),
            key: Key::new(&[7; 36]).unwrap(),
            payload_bytes: 5000,
            checksum: RowChecksum(0x1122_3344_5566_7788),
            epoch: Epoch {
                number: 9,
                suffix: 0xABCD,
            },
        }
    }

    #[test]
    fn a_header_comes_back_and_every_flipped_bit_is_noticed() {
        let bytes = header().encode();
        assert_eq!(RowHeader::decode(&bytes), Ok(header()));
        for at in 0..HEADER_BYTES {
            for bit in 0..8 {
                let mut flipped = bytes;
                flipped[at] ^= 1 << bit;
                assert!(RowHeader::decode(&flipped).is_err(), "byte {at} bit {bit}");
            }
        }
        assert_eq!(RowHeader::decode(&bytes[..255]), Err(HeaderError::NotOurs));
    }

    #[test]
    fn a_newer_version_is_told_apart_from_damage() {
        let mut bytes = header().encode();
        put(&mut bytes, 8, 2_u32.to_le_bytes());
        let sum = crc32fast::hash(&bytes[..252]);
        put(&mut bytes, 252, sum.to_le_bytes());
        assert_eq!(RowHeader::decode(&bytes), Err(HeaderError::NewerVersion));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = RowHeader::decode(&bytes);
        }
    }
}
