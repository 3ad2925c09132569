//! What holds for all bytes: no panic, no change unnoticed, no field lost.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use kvstrata_core::format::superblock::SUPERBLOCK_BYTES;
use kvstrata_core::format::{
    ChangePage, ChecksumKind, ENTRY_BYTES, EntryError, FileId, FormatError, Generation, Geometry,
    NamespaceDigest, RowEntry, Superblock, WriterId,
};
use kvstrata_core::key::{GroupId, Key};
use proptest::prelude::*;

prop_compose! {
    fn entries()(
        key in prop::collection::vec(any::<u8>(), 20..=68),
        incarnation in any::<u32>(),
        counter in any::<u64>(),
        epoch in any::<u32>(),
        payload_bytes in any::<u32>(),
        store_order in any::<u64>(),
        access_time in any::<u32>(),
        checksum in any::<[u8; 16]>(),
    ) -> RowEntry {
        RowEntry {
            key: Key::new(&key).unwrap(),
            generation: Generation { incarnation, counter },
            epoch, payload_bytes, store_order, access_time, checksum,
        }
    }
}

prop_compose! {
    fn superblocks()(
        namespace in any::<[u8; 32]>(),
        file_id in any::<u64>(),
        group in any::<u32>(),
        row_bytes in 1_u64..=1 << 30,
        budget in any::<u64>(),
        writer in any::<[u8; 16]>(),
        incarnation in any::<u32>(),
        clean_store_order in any::<u64>(),
    ) -> Superblock {
        Superblock {
            namespace: NamespaceDigest(namespace),
            file_id: FileId(file_id),
            geometry: Geometry::for_budget(GroupId(group), row_bytes, budget).unwrap(),
            writer: WriterId(writer),
            incarnation, clean_store_order,
            checksum_kind: ChecksumKind::Crc64Nvme,
        }
    }
}

/// `page` with a CRC that fits its bytes again.
fn resealed(mut page: [u8; SUPERBLOCK_BYTES]) -> [u8; SUPERBLOCK_BYTES] {
    let Err(FormatError::Crc { computed, .. }) = Superblock::decode(&page) else {
        return page;
    };
    page[508..512].copy_from_slice(&computed.to_le_bytes());
    page
}

proptest! {
    #[test]
    fn an_entry_is_read_back_as_it_was_written(entry in entries(), id: u64, row: u32) {
        let bytes = entry.encode(FileId(id), row);
        prop_assert_eq!(RowEntry::decode(&bytes, FileId(id), row), Ok(Some(entry)));
    }

    #[test]
    fn any_flipped_bit_of_an_entry_is_noticed(
        entry in entries(), id: u64, row: u32, bit in 0..ENTRY_BYTES * 8,
    ) {
        let mut bytes = entry.encode(FileId(id), row);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(RowEntry::decode(&bytes, FileId(id), row).is_err());
    }

    #[test]
    fn no_flipped_bit_makes_a_row_of_a_free_entry(
        id: u64, row: u32, bit in 0..ENTRY_BYTES * 8,
    ) {
        let mut bytes = [0; ENTRY_BYTES];
        prop_assert_eq!(RowEntry::decode(&bytes, FileId(id), row), Ok(None));
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!matches!(RowEntry::decode(&bytes, FileId(id), row), Ok(Some(_))));
    }

    #[test]
    fn an_entry_of_another_row_or_file_is_noticed(entry in entries(), id: u64, row: u32) {
        let bytes = entry.encode(FileId(id), row);
        let crc = |result| matches!(result, Err(EntryError::Crc { .. }));
        prop_assert!(crc(RowEntry::decode(&bytes, FileId(id), row ^ 1)));
        prop_assert!(crc(RowEntry::decode(&bytes, FileId(id ^ 1), row)));
    }

    #[test]
    fn arbitrary_bytes_are_no_entry_and_no_superblock(
        bytes in any::<[u8; ENTRY_BYTES]>(),
        page in prop::collection::vec(any::<u8>(), 0..5000),
        id: u64, row: u32,
    ) {
        prop_assert!(!matches!(RowEntry::decode(&bytes, FileId(id), row), Ok(Some(_))));
        prop_assert!(Superblock::decode(&page).is_err());
    }

    #[test]
    fn a_superblock_is_read_back_as_it_was_written(superblock in superblocks()) {
        let page = superblock.encode();
        prop_assert_eq!(Superblock::decode(&page), Ok(superblock));
        prop_assert_eq!(Superblock::decode(&page[..512]), Ok(superblock));
        prop_assert_eq!(Superblock::decode(&page[..511]), Err(FormatError::Short(511)));
    }

    #[test]
    fn any_flipped_bit_of_a_superblock_is_noticed(
        superblock in superblocks(), bit in 0..512_usize * 8,
    ) {
        let mut page = superblock.encode();
        page[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Superblock::decode(&page).is_err());
    }

    #[test]
    fn a_sealed_superblock_with_any_fields_never_panics_and_never_overflows(
        superblock in superblocks(), at in 8..508_usize, bytes in any::<[u8; 8]>(),
    ) {
        let mut page = superblock.encode();
        for (target, byte) in page[at..508].iter_mut().zip(bytes) {
            *target = byte;
        }
        if let Ok(read) = Superblock::decode(&resealed(page)) {
            let geometry = read.geometry;
            let last = geometry.row_count() - 1;
            prop_assert!(geometry.row_offset(last) < geometry.file_bytes());
            prop_assert!(geometry.entry_offset(last) < geometry.rows_offset());
            prop_assert!(geometry.region_of(last) < 500);
        }
    }

    #[test]
    fn change_counters_are_read_back(regions in prop::collection::vec(0_u32..500, 0..50)) {
        let mut page = ChangePage::default();
        for region in regions {
            prop_assert!(page.raise(region).is_some());
        }
        prop_assert_eq!(ChangePage::decode(&page.encode()), page);
    }
}

#[test]
fn a_superblock_of_a_newer_version_says_so() {
    let mut page = golden_superblock().encode();
    page[8] = 2;
    assert_eq!(
        Superblock::decode(&resealed(page)),
        Err(FormatError::NewerVersion { found: 2 })
    );
    page[8] = 0;
    assert_eq!(
        Superblock::decode(&resealed(page)),
        Err(FormatError::UnknownVersion { found: 0 })
    );
    page[8] = 1;
    page[12] = 9;
    assert_eq!(
        Superblock::decode(&resealed(page)),
        Err(FormatError::ChecksumKind(9))
    );
}

#[test]
fn taking_a_file_over_raises_its_incarnation_until_there_is_none_left() {
    let superblock = golden_superblock();
    let next = superblock.taken_over_by(WriterId([9; 16])).unwrap();
    assert_eq!((next.incarnation, next.writer), (2, WriterId([9; 16])));
    let last = Superblock {
        incarnation: u32::MAX,
        ..superblock
    };
    assert_eq!(last.taken_over_by(WriterId([9; 16])), None);
}

#[test]
fn an_entry_that_cannot_be_of_its_file_is_refused() {
    let geometry = golden_superblock().geometry;
    let mut bytes = vec![1; 32];
    bytes.extend(geometry.group().0.to_be_bytes());
    let entry = RowEntry {
        key: Key::new(&bytes).unwrap(),
        generation: Generation {
            incarnation: 1,
            counter: 1,
        },
        epoch: 1,
        payload_bytes: u32::try_from(geometry.row_bytes()).unwrap(),
        store_order: 1,
        access_time: 0,
        checksum: [0; 16],
    };
    assert_eq!(entry.check(&geometry), Ok(()));
    let short = RowEntry {
        payload_bytes: 1,
        ..entry
    };
    assert_eq!(short.check(&geometry), Err(EntryError::PayloadBytes(1)));
    let other = RowEntry {
        key: Key::new(&[1; 36]).unwrap(),
        ..entry
    };
    assert_eq!(other.check(&geometry), Err(EntryError::Group));
}

fn golden_superblock() -> Superblock {
    Superblock {
        namespace: NamespaceDigest([1; 32]),
        file_id: FileId(7),
        geometry: Geometry::new(GroupId(0), 4096, 10).unwrap(),
        writer: WriterId([2; 16]),
        incarnation: 1,
        clean_store_order: 0,
        checksum_kind: ChecksumKind::Crc64Nvme,
    }
}
