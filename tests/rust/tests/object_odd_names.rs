//! Objects with names that no path of ours can have stop nothing.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod object_support;
mod tier_support;

use std::sync::Arc;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::gc::{GcOptions, run};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_testkit::Bucket;
use object_support::{eventually, found_in_the_end, open, options, row_names};
use tier_support::keys;

/// Puts odd names wherever we list: below the prefix, among records and rows.
fn litter(bucket: &Bucket) -> usize {
    let row = row_names(bucket).remove(0);
    let (namespace, rest) = row.split_once("/rows/").unwrap();
    let (epoch, _) = rest.split_once('/').unwrap();
    let folders = [
        "some/prefix".to_owned(),
        namespace.to_owned(),
        format!("{namespace}/epochs"),
        format!("{namespace}/rows"),
        format!("{namespace}/rows/{epoch}"),
        format!("{namespace}/rows/{epoch}/00"),
        format!("{namespace}/rows/{epoch}/ff"),
        row.clone(),
    ];
    let names = ["", "/x", "a//b", ".", "..", "a/../b", "\u{1}", "a\u{7f}b"];
    for folder in &folders {
        for name in names {
            bucket.put(&format!("{folder}/{name}"), b"x".to_vec());
        }
    }
    folders.len() * names.len()
}

#[test]
fn opening_listing_and_gc_pass_over_them_and_count_them() {
    let bucket = Bucket::start().unwrap();
    let own = keys(0..20);
    let mut first = open(options(&bucket.endpoint()), 32);
    assert_eq!(first.store(&own), [Outcome::Ok; 20]);
    let odd = litter(&bucket);
    let mut harness = open(options(&bucket.endpoint()), 32);
    let stats = harness.tier.stats().unwrap();
    assert_eq!(stats["epoch"], first.tier.stats().unwrap()["epoch"]);
    // The listing has reached the end, and seen the rows behind and between them.
    eventually("listed", || harness.stat("complete_listings") > 0);
    assert_eq!(harness.stat("listed_names"), 20);
    assert!(harness.stat("odd_names") > 0);
    assert_eq!(found_in_the_end(&harness, &own), [true; 20]);
    assert_eq!(harness.load(&own), [Outcome::Ok; 20]);
    assert!(harness.tier.reset().unwrap());

    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let what = GcOptions {
        capacity_bytes: Some(0),
        ..GcOptions::default()
    };
    let report = run(&options(&bucket.endpoint()), None, &clock, what, &|| false).unwrap();
    assert_eq!((report.removed_rows, report.failed_rows), (20, 0));
    // Once where the bucket is reached, once where it is listed.
    assert!(
        report.odd_names >= u64::try_from(odd).unwrap(),
        "{report:?}"
    );
    let left = bucket.names();
    let strangers = left.iter().filter(|name| bucket.get(name).unwrap() == b"x");
    assert_eq!(strangers.count(), odd);
}
