//! The entry of a row: no entry, no row.

use thiserror::Error;

use super::checksum::{CHECKSUM_FIELD_BYTES, crc32};
use super::field::Field;
use super::geometry::Geometry;
use super::superblock::FileId;
use crate::key::{KEY_BYTES_MAX, Key};

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 128;

/// The last epoch. Whatever bears a larger number, record or row, is none of ours.
pub const EPOCH_LAST: u32 = 4_000_000_000;

/// A free entry: what a writer leaves before it overwrites a row.
pub const FREE_ENTRY: [u8; ENTRY_BYTES] = [0; ENTRY_BYTES];

const KEY: Field<KEY_BYTES_MAX> = Field::first();
const KEY_LENGTH: Field<1> = Field::after(KEY);
const STATE: Field<1> = Field::after(KEY_LENGTH);
const RESERVED_LOW: Field<2> = Field::after(STATE);
const INCARNATION: Field<4> = Field::after(RESERVED_LOW);
const COUNTER: Field<8> = Field::after(INCARNATION);
const EPOCH: Field<4> = Field::after(COUNTER);
const PAYLOAD_BYTES: Field<4> = Field::after(EPOCH);
const STORE_ORDER: Field<8> = Field::after(PAYLOAD_BYTES);
const ACCESS_TIME: Field<4> = Field::after(STORE_ORDER);
const CHECKSUM: Field<CHECKSUM_FIELD_BYTES> = Field::after(ACCESS_TIME);
const RESERVED_HIGH: Field<4> = Field::after(CHECKSUM);
const CRC: Field<4> = Field::after(RESERVED_HIGH);

const _: () = assert!(KEY_BYTES_MAX == 68);
const _: () = assert!(CRC.start() == 124 && CRC.end() == ENTRY_BYTES);

/// The state byte of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// The row holds nothing.
    Free,
    /// The row holds the payload of the entry's key.
    Valid,
}

impl RowState {
    /// The state's byte.
    pub const fn number(self) -> u8 {
        match self {
            Self::Free => 0,
            Self::Valid => 1,
        }
    }
}

/// Tells two contents of a row apart: no two writes to a row have the same generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation {
    /// The file's incarnation when the row was written.
    pub incarnation: u32,
    /// Number of the write within the incarnation.
    pub counter: u64,
}

/// Why an entry is refused; its row counts as free, and as corrupt in the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EntryError {
    /// Changed after it was written, or written for another row or file.
    #[error("the entry's CRC is {found:08x} and its bytes give {computed:08x}")]
    Crc {
        /// The CRC in the entry.
        found: u32,
        /// The CRC of its bytes, the file id and the row number.
        computed: u32,
    },
    /// A state this version does not have.
    #[error("row state {0} does not exist")]
    State(u8),
    /// The key's length is impossible, or bytes lie behind its end.
    #[error("the entry's key of {0} bytes is not one")]
    Key(u8),
    /// The key is not of the file's group.
    #[error("the entry's key is of another group than the file")]
    Group,
    /// The payload is not as long as the file's rows.
    #[error("the entry's payload of {0} bytes is not as long as the file's rows")]
    PayloadBytes(u32),
    /// No epoch has this number.
    #[error("the entry's epoch {0} is beyond the last")]
    Epoch(u32),
}

/// The entry of a row that holds a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowEntry {
    /// Whose payload it is.
    pub key: Key,
    /// Which content of the row it is.
    pub generation: Generation,
    /// The epoch it was stored in; other epochs do not see it.
    pub epoch: u32,
    /// Payload bytes.
    pub payload_bytes: u32,
    /// Orders the stores of a namespace; see the clean mark of the superblock.
    pub store_order: u64,
    /// When the row was last used, seconds since 1970 UTC; coarse.
    pub access_time: u32,
    /// Checksum or tag of the row.
    pub checksum: [u8; CHECKSUM_FIELD_BYTES],
}

impl RowEntry {
    /// The entry's bytes for `row` of the file `file_id`.
    pub fn encode(&self, file_id: FileId, row: u32) -> [u8; ENTRY_BYTES] {
        let mut entry = FREE_ENTRY;
        KEY.write(&mut entry, *self.key.padded());
        KEY_LENGTH.write(&mut entry, [self.key.length()]);
        STATE.write(&mut entry, [RowState::Valid.number()]);
        INCARNATION.write(&mut entry, self.generation.incarnation.to_le_bytes());
        COUNTER.write(&mut entry, self.generation.counter.to_le_bytes());
        EPOCH.write(&mut entry, self.epoch.to_le_bytes());
        PAYLOAD_BYTES.write(&mut entry, self.payload_bytes.to_le_bytes());
        STORE_ORDER.write(&mut entry, self.store_order.to_le_bytes());
        ACCESS_TIME.write(&mut entry, self.access_time.to_le_bytes());
        CHECKSUM.write(&mut entry, self.checksum);
        let crc = entry_crc(&entry, file_id, row);
        CRC.write(&mut entry, crc.to_le_bytes());
        entry
    }

    /// Reads the entry of `row` of the file `file_id`; `None` when the row is free.
    ///
    /// # Errors
    /// [`EntryError`] for anything but a free entry or an unchanged one of this row.
    pub fn decode(
        entry: &[u8; ENTRY_BYTES],
        file_id: FileId,
        row: u32,
    ) -> Result<Option<Self>, EntryError> {
        // The first bytes of a key are hardly ever zero: one look tells most entries from free ones.
        if entry.first_chunk() == Some(&[0; 8]) && *entry == FREE_ENTRY {
            return Ok(None);
        }
        let computed = entry_crc(entry, file_id, row);
        let found = u32::from_le_bytes(CRC.read(entry));
        if found != computed {
            return Err(EntryError::Crc { found, computed });
        }
        match STATE.read(entry) {
            [0] => return Ok(None),
            [1] => {}
            [state] => return Err(EntryError::State(state)),
        }
        Ok(Some(Self {
            key: decode_key(entry)?,
            generation: Generation {
                incarnation: u32::from_le_bytes(INCARNATION.read(entry)),
                counter: u64::from_le_bytes(COUNTER.read(entry)),
            },
            epoch: u32::from_le_bytes(EPOCH.read(entry)),
            payload_bytes: u32::from_le_bytes(PAYLOAD_BYTES.read(entry)),
            store_order: u64::from_le_bytes(STORE_ORDER.read(entry)),
            access_time: u32::from_le_bytes(ACCESS_TIME.read(entry)),
            checksum: CHECKSUM.read(entry),
        }))
    }

    /// Whether the entry can be one of a file of `geometry`.
    ///
    /// # Errors
    /// [`EntryError::Group`], [`EntryError::PayloadBytes`] and [`EntryError::Epoch`].
    pub fn check(&self, geometry: &Geometry) -> Result<(), EntryError> {
        if self.key.group() != geometry.group() {
            return Err(EntryError::Group);
        }
        if u64::from(self.payload_bytes) != geometry.row_bytes() {
            return Err(EntryError::PayloadBytes(self.payload_bytes));
        }
        if self.epoch > EPOCH_LAST {
            return Err(EntryError::Epoch(self.epoch));
        }
        Ok(())
    }
}

/// What an entry's CRC covers behind the entry's own bytes.
const COVERED_FILE: Field<8> = Field::first();
const COVERED_ROW: Field<4> = Field::after(COVERED_FILE);
/// Bytes that an entry's CRC covers.
const CRC_COVERED_BYTES: usize = CRC.start() + COVERED_ROW.end();

/// The CRC of an entry's bytes before it, the file id and the row number.
fn entry_crc(entry: &[u8; ENTRY_BYTES], file_id: FileId, row: u32) -> u32 {
    // In one piece: tables of millions of entries are checked at open.
    let mut covered = [0; CRC_COVERED_BYTES];
    if let Some((own, place)) = covered.split_first_chunk_mut::<{ CRC.start() }>() {
        *own = *entry.first_chunk().unwrap_or(&[0; CRC.start()]);
        COVERED_FILE.write(place, file_id.0.to_le_bytes());
        COVERED_ROW.write(place, row.to_le_bytes());
    }
    crc32(&covered)
}

/// The key in `entry`.
fn decode_key(entry: &[u8; ENTRY_BYTES]) -> Result<Key, EntryError> {
    let [length] = KEY_LENGTH.read(entry);
    let padded = KEY.read(entry);
    padded
        .get(..usize::from(length))
        .and_then(|bytes| Key::new(bytes).ok())
        .filter(|key| *key.padded() == padded)
        .ok_or(EntryError::Key(length))
}
