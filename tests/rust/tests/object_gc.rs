//! `gc` ends: when it is told to, when its time is over, and whatever the server does.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and measures"
)]

mod object_support;
mod tier_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstrata_core::error::Result;
use kvstrata_core::job::Outcome;
use kvstrata_core::object::gc::{GcEnd, GcOptions, GcReport, run};
use kvstrata_core::object::names::{Epoch, Names};
use kvstrata_core::object::{Addressing, ObjectOptions};
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_testkit::{Bucket, BucketFault, BucketStyle, ManualClock, Method, Rule};
use object_support::{open, options, row_names};
use tier_support::{key, keys};

/// Three times what ending may take on a busy machine.
const SOON: Duration = Duration::from_secs(6);
const EVERYTHING: GcOptions = GcOptions {
    capacity_bytes: Some(0),
    older_than: None,
    dry_run: false,
    time_limit: None,
};

fn stored(bucket: &Bucket, count: u64) {
    let mut harness = open(options(&bucket.endpoint()), usize::try_from(count).unwrap());
    let outcomes = harness.store(&keys(0..count));
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Ok));
}

fn gc(
    options: &ObjectOptions,
    what: GcOptions,
    interrupted: &dyn Fn() -> bool,
) -> Result<GcReport> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    run(options, None, &clock, what, interrupted)
}

fn never() -> bool {
    false
}

#[test]
fn whoever_interrupts_it_is_told_what_was_done() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 40);
    let deletes = || bucket.seen(Method::Delete, "/rows/");
    for _ in 0..5 {
        bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Latency(Duration::ZERO)).times(1));
    }
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Hold));
    // When sixteen hang.
    let report = gc(&options(&bucket.endpoint()), EVERYTHING, &|| {
        deletes() == 21
    })
    .unwrap();
    assert_eq!(report.end, GcEnd::Interrupted);
    assert_eq!((report.removed_rows, report.failed_rows), (5, 0));
    assert_eq!(report.kept_rows, 35);
    assert!(report.emptied.is_empty());
    bucket.heal();
}

#[test]
fn it_is_interrupted_while_it_waits_for_the_first_answer() {
    let bucket = Bucket::start().unwrap();
    bucket.rule(Rule::all(BucketFault::NeverAnswer));
    let begun = Instant::now();
    let asked = || bucket.seen(Method::List, "") > 0;
    let report = gc(&options(&bucket.endpoint()), EVERYTHING, &asked).unwrap();
    assert_eq!(report.end, GcEnd::Interrupted);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn no_request_takes_longer_than_its_deadline() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 4);
    let mut short = options(&bucket.endpoint());
    short.deadline = Duration::from_millis(500);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::NeverAnswer));
    let begun = Instant::now();
    let report = gc(&short, EVERYTHING, &never).unwrap();
    assert_eq!((report.removed_rows, report.failed_rows), (0, 4));
    let said = report.last_error.unwrap();
    assert!(said.contains("no answer by the deadline"), "{said}");
    bucket.rule(Rule::all(BucketFault::NeverAnswer));
    let said = gc(&short, EVERYTHING, &never).unwrap_err().to_string();
    assert!(said.contains("no answer by the deadline"), "{said}");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn its_time_is_bounded_as_a_whole() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 40);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Hold));
    let begun = Instant::now();
    let what = GcOptions {
        time_limit: Some(Duration::from_millis(500)),
        ..EVERYTHING
    };
    let report = gc(&options(&bucket.endpoint()), what, &never).unwrap();
    assert_eq!(report.end, GcEnd::TimeLimit);
    assert_eq!((report.removed_rows, report.kept_rows), (0, 40));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn a_server_that_deletes_nothing_is_not_asked_for_every_row() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 200);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(403)));
    let report = gc(&options(&bucket.endpoint()), EVERYTHING, &never).unwrap();
    assert_eq!(report.end, GcEnd::Done);
    assert_eq!((report.removed_rows, report.failed_rows), (0, 200));
    assert!(report.emptied.is_empty());
    assert!(report.last_error.unwrap().contains("403"));
    assert!(bucket.seen(Method::Delete, "/rows/") < 100);
    assert_eq!(row_names(&bucket).len(), 200);
}

#[test]
fn a_namespace_counts_as_emptied_when_its_last_row_is_gone() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 4);
    bucket.rule(Rule::rows(&[Method::Delete], BucketFault::Status(500)).times(1));
    let report = gc(&options(&bucket.endpoint()), EVERYTHING, &never).unwrap();
    assert_eq!((report.removed_rows, report.failed_rows), (3, 1));
    assert!(report.emptied.is_empty());
    let report = gc(&options(&bucket.endpoint()), EVERYTHING, &never).unwrap();
    assert_eq!((report.removed_rows, report.emptied.len()), (1, 1));
}

#[test]
fn it_finds_the_bucket_by_the_style_by_which_a_tier_does() {
    for only in [BucketStyle::Path, BucketStyle::Virtual] {
        let bucket = Bucket::start().unwrap();
        bucket.only(only);
        let auto = ObjectOptions {
            addressing: Addressing::Auto,
            ..options(&bucket.named_endpoint())
        };
        let mut harness = open(auto.clone(), 4);
        assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
        let report = gc(&auto, EVERYTHING, &never).unwrap();
        assert_eq!((report.removed_rows, report.kept_rows), (4, 0), "{only:?}");
    }
}

#[test]
fn a_listing_that_goes_in_a_circle_is_an_error() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 3);
    bucket.list_in_circles();
    let begun = Instant::now();
    let giving_up = || begun.elapsed() > 3 * SOON;
    let said = gc(&options(&bucket.endpoint()), EVERYTHING, &giving_up).unwrap_err();
    let said = said.to_string();
    assert!(said.contains("the same objects again and again"), "{said}");
    assert_eq!(row_names(&bucket).len(), 3);
}

#[test]
fn no_more_rows_go_than_have_to_and_those_that_are_too_old_all_do() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 10);
    let size = u64::try_from(bucket.get(&row_names(&bucket)[0]).unwrap().len()).unwrap();
    let to_half = GcOptions {
        capacity_bytes: Some(5 * size + 1),
        ..EVERYTHING
    };
    let dry = GcOptions {
        dry_run: true,
        ..to_half
    };
    let would = gc(&options(&bucket.endpoint()), dry, &never).unwrap();
    assert_eq!(row_names(&bucket).len(), 10);
    let report = gc(&options(&bucket.endpoint()), to_half, &never).unwrap();
    assert_eq!(report, would);
    assert_eq!((report.removed_rows, report.kept_rows), (5, 5));
    assert_eq!(
        (report.removed_bytes, report.kept_bytes),
        (5 * size, 5 * size)
    );
    assert_eq!(row_names(&bucket).len(), 5);
    let listings = || bucket.seen(Method::List, "");
    let before = listings();
    let report = gc(&options(&bucket.endpoint()), to_half, &never).unwrap();
    assert_eq!((report.removed_rows, report.kept_rows), (0, 5));
    // One to find the way, one to count.
    assert_eq!(listings(), before + 2);
    // All objects of this server are from 2099.
    let clock = ManualClock::default();
    let day = Duration::from_hours(24);
    clock.advance(Duration::from_secs(4_070_908_800 - 1_000_000_000) + 10 * day);
    let clock: Arc<dyn Clock> = Arc::new(clock);
    for (days, removed) in [(11, 0), (9, 5)] {
        let old = GcOptions {
            capacity_bytes: None,
            older_than: Some(days * day),
            ..EVERYTHING
        };
        let report = run(&options(&bucket.endpoint()), None, &clock, old, &never).unwrap();
        assert_eq!(
            (report.removed_rows, report.kept_rows),
            (removed, 5 - removed)
        );
        assert_eq!(report.emptied.is_empty(), removed == 0);
    }
}

#[test]
fn a_listing_that_ends_early_while_rows_go_says_so_and_what_was_done() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 4);
    let listings = bucket.seen(Method::List, "");
    // The way is found, rows are counted; then it fails.
    let well = Rule {
        part: String::new(),
        ..Rule::rows(&[Method::List], BucketFault::Nothing)
    };
    bucket.rule(well.clone().times(2));
    bucket.rule(Rule {
        fault: BucketFault::Status(500),
        ..well
    });
    let short = ObjectOptions {
        deadline: Duration::from_secs(1),
        ..options(&bucket.endpoint())
    };
    let begun = Instant::now();
    let report = gc(&short, EVERYTHING, &never).unwrap();
    assert_eq!(report.end, GcEnd::NotListed);
    assert_eq!((report.removed_rows, report.kept_rows), (0, 4));
    assert!(report.last_error.unwrap().contains("500"));
    // For as long as a request may take, with pauses that grow.
    assert!(begun.elapsed() >= Duration::from_secs(1) && begun.elapsed() < SOON);
    let tried = bucket.seen(Method::List, "") - listings - 2;
    assert!((2..=4).contains(&tried), "{tried}");
}

/// Rows by plain names, so many that a listing has several pages.
fn many_pages(bucket: &Bucket) -> u64 {
    stored(bucket, 1);
    let name = row_names(bucket).remove(0);
    let bytes = bucket.get(&name).unwrap();
    let (base, rest) = name.split_once("/rows/").unwrap();
    let epoch = Epoch::parse(rest.split('/').next().unwrap()).unwrap();
    let names = Names::new(base.to_owned());
    for number in 1..2500 {
        let row = names.row(epoch, &key(number, 0));
        bucket.put(row.as_ref(), bytes.clone());
    }
    assert_eq!(row_names(bucket).len(), 2500);
    2500
}

#[test]
fn a_listing_that_fails_for_a_while_goes_on_where_it_was() {
    for unaware in [false, true] {
        for fault in [
            BucketFault::Status(500),
            BucketFault::Status(503),
            BucketFault::Status(429),
            BucketFault::Reset,
            BucketFault::ResetHalfway,
            BucketFault::Truncate,
        ] {
            let bucket = Bucket::start().unwrap();
            let rows = many_pages(&bucket);
            if unaware {
                bucket.list_from_the_start();
            }
            let dry = GcOptions {
                dry_run: true,
                ..EVERYTHING
            };
            let list = |fault, times| {
                let rule = Rule {
                    part: String::new(),
                    ..Rule::rows(&[Method::List], fault)
                };
                bucket.rule(rule.times(times));
            };
            // Before the first page, and before the second of the count, twice; and once while rows
            // are being chosen.
            list(fault, 2);
            list(BucketFault::Nothing, 2);
            list(fault, 2);
            list(BucketFault::Nothing, 4);
            list(fault, 1);
            let before = bucket.seen(Method::List, "");
            let report = gc(&options(&bucket.endpoint()), dry, &never).unwrap();
            assert_eq!(report.end, GcEnd::Done, "{fault:?}: {report:?}");
            assert_eq!(
                (report.removed_rows, report.kept_rows, report.failed_rows),
                (rows, 0, 0),
                "{fault:?}, unaware: {unaware}"
            );
            // Three at the start, five for the count, four to choose: no page came twice.
            let listings = bucket.seen(Method::List, "") - before;
            assert!(unaware || listings == 12, "{fault:?}: {listings}");
        }
    }
}

#[test]
fn a_listing_is_tried_again_no_longer_than_it_may_take() {
    let bucket = Bucket::start().unwrap();
    stored(&bucket, 4);
    let well = Rule {
        part: String::new(),
        ..Rule::rows(&[Method::List], BucketFault::Nothing)
    };
    let failing = |kind| Rule {
        fault: kind,
        ..well.clone()
    };
    // One that would not go better is not tried again.
    bucket.rule(well.clone().times(1));
    bucket.rule(failing(BucketFault::Status(403)).times(1));
    let listings = bucket.seen(Method::List, "");
    let said = gc(&options(&bucket.endpoint()), EVERYTHING, &never).unwrap_err();
    assert!(said.to_string().contains("403"), "{said}");
    assert_eq!(bucket.seen(Method::List, ""), listings + 2);
    // The time of the whole run ends it, too.
    bucket.rule(well.clone().times(1));
    bucket.rule(failing(BucketFault::Status(503)));
    let what = GcOptions {
        time_limit: Some(Duration::from_millis(500)),
        ..EVERYTHING
    };
    let begun = Instant::now();
    let report = gc(&options(&bucket.endpoint()), what, &never).unwrap();
    assert_eq!((report.end, report.removed_rows), (GcEnd::TimeLimit, 0));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    // A server that is not there at the start is not waited for as long.
    let begun = Instant::now();
    assert!(gc(&options("http://127.0.0.1:1"), EVERYTHING, &never).is_err());
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}
