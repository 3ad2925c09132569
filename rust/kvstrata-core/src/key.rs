//! The key of a row, as vLLM makes it.

use core::fmt;

use crate::error::{Error, ErrorKind};

/// Fewest bytes of a block hash in a key.
pub const HASH_BYTES_MIN: usize = 16;
/// Most bytes of a block hash in a key.
pub const HASH_BYTES_MAX: usize = 64;
/// Bytes of the group id at the end of a key.
pub const GROUP_BYTES: usize = 4;
/// Most bytes of a whole key.
pub const KEY_BYTES_MAX: usize = HASH_BYTES_MAX + GROUP_BYTES;

/// Number of a KV cache group, as vLLM counts them in its `kv_cache_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

impl fmt::Display for GroupId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// vLLM's `OffloadKey`: the block hash bytes (16 to 64), then the group id as 4 bytes big-endian.
///
/// The bytes are kept whole; nothing in this crate shortens a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    length: u8,
    bytes: [u8; KEY_BYTES_MAX],
}

impl Key {
    /// Takes the bytes of a key.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the length is not 20 to 68 bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, Error> {
        let range = HASH_BYTES_MIN + GROUP_BYTES..=KEY_BYTES_MAX;
        let length = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
        let mut own = [0; KEY_BYTES_MAX];
        match own.get_mut(..bytes.len()) {
            Some(target) if range.contains(&bytes.len()) => target.copy_from_slice(bytes),
            _ => {
                return Err(Error::new(
                    ErrorKind::Argument,
                    format!(
                        "a key has {} bytes; a block hash of {HASH_BYTES_MIN} to {HASH_BYTES_MAX} \
                         bytes and a 4-byte group id are expected",
                        bytes.len()
                    ),
                ));
            }
        }
        Ok(Self { length, bytes: own })
    }

    /// The key's bytes: hash, then group.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or(&[])
    }

    /// The bytes padded with zeros to [`KEY_BYTES_MAX`], as a row table entry holds them.
    pub const fn padded(&self) -> &[u8; KEY_BYTES_MAX] {
        &self.bytes
    }

    /// Number of bytes of the key.
    pub const fn length(&self) -> u8 {
        self.length
    }

    /// The group that the last four bytes name.
    pub fn group(&self) -> GroupId {
        let mut id = [0; GROUP_BYTES];
        if let Some(tail) = self.as_bytes().last_chunk::<GROUP_BYTES>() {
            id = *tail;
        }
        GroupId(u32::from_be_bytes(id))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.as_bytes() {
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_bytes_and_names_its_group() {
        let mut bytes = vec![7; 32];
        bytes.extend([0, 0, 1, 2]);
        let key = Key::new(&bytes).unwrap();
        assert_eq!(key.as_bytes(), bytes.as_slice());
        assert_eq!(key.group(), GroupId(258));
    }

    #[test]
    fn a_key_of_the_wrong_length_is_refused() {
        for length in [0, 4, 19, 69, 300] {
            let error = Key::new(&vec![0; length]).unwrap_err();
            assert!(error.to_string().contains(&format!("{length} bytes")));
        }
        for length in [20, 68] {
            assert!(Key::new(&vec![0; length]).is_ok());
        }
    }
}
