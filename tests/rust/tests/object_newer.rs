//! Objects of newer builds belong to newer peers: they are misses here, and left alone.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test fails where these fail"
)]

mod object_support;
mod tier_support;

use kvstrata_core::job::Outcome;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{found_in_the_end, open, options, row_names};
use tier_support::keys;

/// The same object as a build of version 2 would write it: with a right sum over its header.
fn newer(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[8..12].copy_from_slice(&2_u32.to_le_bytes());
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, &bytes[..252]);
    let sum = u32::try_from(sum).unwrap();
    bytes[252..256].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn a_newer_objects_place_is_not_stored_into_nor_served_whatever_its_length() {
    for ignores_conditions in [false, true] {
        let bucket = Bucket::start().unwrap();
        if ignores_conditions {
            bucket.ignore_conditions();
        }
        let own = keys(0..3);
        {
            let mut harness = open(options(&bucket.endpoint()), 4);
            assert_eq!(harness.store(&own), [Outcome::Ok; 3]);
        }
        let names = row_names(&bucket);
        let objects: Vec<Vec<u8>> = names
            .iter()
            .zip([0_usize, 100, 10_000])
            .map(|(name, change)| {
                let mut bytes = newer(bucket.get(name).unwrap());
                match change {
                    0 => {}
                    100 => bytes.truncate(bytes.len() - 100),
                    more => bytes.resize(bytes.len() + more, 7),
                }
                bucket.put(name, bytes.clone());
                bytes
            })
            .collect();
        let mut harness = open(options(&bucket.endpoint()), 4);
        assert_eq!(harness.store(&own), [Outcome::Dropped; 3]);
        assert_eq!(harness.load(&own), [Outcome::Miss; 3]);
        assert_eq!(found_in_the_end(&harness, &own), [false; 3]);
        assert_eq!(harness.store(&own), [Outcome::Dropped; 3]);
        assert_eq!(harness.stat("newer_objects"), 9);
        assert_eq!(harness.stat("corrupt_rows"), 0);
        assert_eq!(harness.stat("healed_objects"), 0);
        for (name, bytes) in names.iter().zip(&objects) {
            assert!(bucket.get(name).as_ref() == Some(bytes), "{name}");
        }
        // When it is gone the place is free.
        for name in &names {
            bucket.remove(name);
        }
        assert_eq!(harness.store(&own), [Outcome::Ok; 3]);
        assert_eq!(harness.load(&own), [Outcome::Ok; 3]);
    }
}

#[test]
fn a_newer_object_that_took_the_place_of_a_corrupt_one_is_left_alone() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let name = row_names(&bucket).remove(0);
    let sound = bucket.get(&name).unwrap();
    let mut damaged = sound.clone();
    damaged[1000] ^= 1;
    bucket.put(&name, damaged);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(403)));
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Corrupt]);
    bucket.heal();
    bucket.put(&name, newer(sound.clone()));
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Dropped]);
    assert!(bucket.get(&name) == Some(newer(sound)));
}

#[test]
fn a_corrupt_payload_below_a_right_header_is_overwritten() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let name = row_names(&bucket).remove(0);
    let mut damaged = bucket.get(&name).unwrap();
    damaged[1000] ^= 1;
    bucket.put(&name, damaged);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(403)));
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Corrupt]);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}
