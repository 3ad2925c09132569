//! The first page of a row file: what it is, whose, and how its rows lie.

use core::fmt;

use thiserror::Error;

use super::checksum::{ChecksumKind, crc32};
use super::field::Field;
use super::geometry::{Geometry, GeometryError, PAGE_BYTES};
use super::version::FORMAT_VERSION;
use crate::key::GroupId;

/// Bytes of the superblock's page.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Bytes of its start that hold all fields: one sector, which a power cut leaves old or new.
pub const SUPERBLOCK_SECTOR_BYTES: usize = 512;
/// The first bytes of every row file.
pub const MAGIC: [u8; 8] = *b"KVSTRATA";

const MAGIC_FIELD: Field<8> = Field::first();
const VERSION: Field<4> = Field::after(MAGIC_FIELD);
const CHECKSUM_KIND: Field<4> = Field::after(VERSION);
const NAMESPACE: Field<32> = Field::after(CHECKSUM_KIND);
const FILE_ID: Field<8> = Field::after(NAMESPACE);
const ROW_BYTES: Field<8> = Field::after(FILE_ID);
const ROW_STRIDE: Field<8> = Field::after(ROW_BYTES);
const ROW_COUNT: Field<4> = Field::after(ROW_STRIDE);
const GROUP: Field<4> = Field::after(ROW_COUNT);
const WRITER: Field<16> = Field::after(GROUP);
const INCARNATION: Field<4> = Field::after(WRITER);
const RESERVED_LOW: Field<4> = Field::after(INCARNATION);
const CLEAN_STORE_ORDER: Field<8> = Field::after(RESERVED_LOW);
const RESERVED_HIGH: Field<396> = Field::after(CLEAN_STORE_ORDER);
const CRC: Field<4> = Field::after(RESERVED_HIGH);

const _: () = assert!(CRC.start() == 508 && CRC.end() == SUPERBLOCK_SECTOR_BYTES);
const _: () = assert!(FILE_ID.start() == 48 && CLEAN_STORE_ORDER.start() == 104);
const _: () = assert!(PAGE_BYTES == 4096 && SUPERBLOCK_BYTES == 4096);

/// blake3 digest of a namespace's canonical manifest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NamespaceDigest(pub [u8; 32]);

/// Number of a row file, unique in its group of its namespace, chosen at random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u64);

/// Identity of a writer, chosen at random when it opens a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriterId(pub [u8; 16]);

/// Writes `bytes` as lower-case hexadecimal digits.
fn hexadecimal(formatter: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes
        .iter()
        .try_for_each(|byte| write!(formatter, "{byte:02x}"))
}

impl fmt::Display for NamespaceDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        hexadecimal(formatter, &self.0)
    }
}

impl fmt::Debug for NamespaceDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl fmt::Debug for FileId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for WriterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        hexadecimal(formatter, &self.0)
    }
}

impl fmt::Debug for WriterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Why a superblock is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Fewer bytes than a superblock has.
    #[error("a superblock has {SUPERBLOCK_SECTOR_BYTES} bytes and {0} are there")]
    Short(usize),
    /// The magic bytes are not there: not a row file, or never written.
    #[error("the magic bytes of a row file are missing")]
    Magic,
    /// Changed after it was written.
    #[error("the superblock's CRC is {found:08x} and its bytes give {computed:08x}")]
    Crc {
        /// The CRC in the superblock.
        found: u32,
        /// The CRC of its bytes.
        computed: u32,
    },
    /// Written by a newer kvstrata.
    #[error("format version {found} is newer than {FORMAT_VERSION}, the newest this build reads")]
    NewerVersion {
        /// The version found.
        found: u32,
    },
    /// A version that never was.
    #[error("format version {found} does not exist")]
    UnknownVersion {
        /// The version found.
        found: u32,
    },
    /// The shape is outside the format's limits.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A checksum kind this version does not have.
    #[error("checksum kind {0} does not exist in format version {FORMAT_VERSION}")]
    ChecksumKind(u32),
}

/// The superblock of a row file. Its version is always [`FORMAT_VERSION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The namespace whose rows the file holds.
    pub namespace: NamespaceDigest,
    /// The file's number, which its entries' CRCs cover.
    pub file_id: FileId,
    /// Where everything lies.
    pub geometry: Geometry,
    /// The writer that owns the file, or owned it last.
    pub writer: WriterId,
    /// Raised and made durable before a writer's first write to a file it opened or adopted.
    pub incarnation: u32,
    /// Rows up to this store order, and their entries, were made durable; 0 when none ever were.
    pub clean_store_order: u64,
    /// How rows are protected.
    pub checksum_kind: ChecksumKind,
}

impl Superblock {
    /// The page's bytes.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut page = [0; SUPERBLOCK_BYTES];
        MAGIC_FIELD.write(&mut page, MAGIC);
        VERSION.write(&mut page, FORMAT_VERSION.to_le_bytes());
        CHECKSUM_KIND.write(&mut page, self.checksum_kind.number().to_le_bytes());
        NAMESPACE.write(&mut page, self.namespace.0);
        FILE_ID.write(&mut page, self.file_id.0.to_le_bytes());
        ROW_BYTES.write(&mut page, self.geometry.row_bytes().to_le_bytes());
        ROW_STRIDE.write(&mut page, self.geometry.row_stride_bytes().to_le_bytes());
        ROW_COUNT.write(&mut page, self.geometry.row_count().to_le_bytes());
        GROUP.write(&mut page, self.geometry.group().0.to_le_bytes());
        WRITER.write(&mut page, self.writer.0);
        INCARNATION.write(&mut page, self.incarnation.to_le_bytes());
        CLEAN_STORE_ORDER.write(&mut page, self.clean_store_order.to_le_bytes());
        let crc = crc32(page.get(..CRC.start()).unwrap_or(&[]));
        CRC.write(&mut page, crc.to_le_bytes());
        page
    }

    /// Reads the superblock at the start of `bytes`; at least its first sector must be there.
    ///
    /// # Errors
    /// [`FormatError`] for anything but an unchanged superblock of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let sector: &[u8; SUPERBLOCK_SECTOR_BYTES] =
            bytes.first_chunk().ok_or(FormatError::Short(bytes.len()))?;
        if MAGIC_FIELD.read(sector) != MAGIC {
            return Err(FormatError::Magic);
        }
        let computed = crc32(sector.get(..CRC.start()).unwrap_or(&[]));
        let found = u32::from_le_bytes(CRC.read(sector));
        if found != computed {
            return Err(FormatError::Crc { found, computed });
        }
        match u32::from_le_bytes(VERSION.read(sector)) {
            FORMAT_VERSION => {}
            found if found > FORMAT_VERSION => return Err(FormatError::NewerVersion { found }),
            found => return Err(FormatError::UnknownVersion { found }),
        }
        let kind = u32::from_le_bytes(CHECKSUM_KIND.read(sector));
        Ok(Self {
            namespace: NamespaceDigest(NAMESPACE.read(sector)),
            file_id: FileId(u64::from_le_bytes(FILE_ID.read(sector))),
            geometry: decode_geometry(sector)?,
            writer: WriterId(WRITER.read(sector)),
            incarnation: u32::from_le_bytes(INCARNATION.read(sector)),
            clean_store_order: u64::from_le_bytes(CLEAN_STORE_ORDER.read(sector)),
            checksum_kind: ChecksumKind::from_number(kind)
                .ok_or(FormatError::ChecksumKind(kind))?,
        })
    }

    /// The superblock with which `writer` takes the file over: the next incarnation. `None` when
    /// the file has had its last; it may then be read, but not written.
    #[must_use]
    pub fn taken_over_by(&self, writer: WriterId) -> Option<Self> {
        let incarnation = self.incarnation.checked_add(1)?;
        Some(Self {
            writer,
            incarnation,
            ..*self
        })
    }
}

/// The geometry in `sector`, checked.
fn decode_geometry(sector: &[u8; SUPERBLOCK_SECTOR_BYTES]) -> Result<Geometry, GeometryError> {
    let geometry = Geometry::new(
        GroupId(u32::from_le_bytes(GROUP.read(sector))),
        u64::from_le_bytes(ROW_BYTES.read(sector)),
        u32::from_le_bytes(ROW_COUNT.read(sector)),
    )?;
    let row_stride_bytes = u64::from_le_bytes(ROW_STRIDE.read(sector));
    if row_stride_bytes != geometry.row_stride_bytes() {
        let row_bytes = geometry.row_bytes();
        return Err(GeometryError::Stride {
            row_bytes,
            row_stride_bytes,
        });
    }
    Ok(geometry)
}
