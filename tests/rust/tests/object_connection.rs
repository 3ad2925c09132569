//! How a bucket is reached, and what is said of one that cannot be.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod object_support;
mod tier_support;

use std::sync::Arc;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::options::Environment;
use kvstrata_core::object::{Addressing, ObjectOptions};
use kvstrata_core::tier::Tier;
use kvstrata_testkit::memory::leaked_arena;
use kvstrata_testkit::{Bucket, BucketFault, BucketStyle, Method, Rule};
use object_support::s3s_server::S3sServer;
use object_support::{ACCESS_KEY, SECRET_KEY, eventually, open, open_with, options};
use tier_support::{Harness, ROW_BYTES, keys};

fn named(bucket: &Bucket, addressing: Addressing) -> ObjectOptions {
    ObjectOptions {
        addressing,
        ..options(&bucket.named_endpoint())
    }
}

/// A tier that is opened at the first call.
fn open_once(options: ObjectOptions) -> Harness {
    let arena = leaked_arena(ROW_BYTES, 0).unwrap();
    let seams = kvstrata_core::tier::Seams::default();
    let opened = Tier::open_object_shared(options, Arc::clone(&arena), seams, None);
    Harness::around(opened.unwrap(), arena, ROW_BYTES)
}

/// What opening says, in words.
fn refusal(options: ObjectOptions) -> String {
    let arena = leaked_arena(5000, 0).unwrap();
    let opened = Tier::open_object_shared(
        options,
        Arc::clone(&arena),
        kvstrata_core::tier::Seams::default(),
        None,
    );
    opened.unwrap_err().to_string()
}

#[test]
fn addressing_is_found_out_where_the_server_takes_one_way_only() {
    for (only, found) in [
        (BucketStyle::Path, "path"),
        (BucketStyle::Virtual, "virtual"),
    ] {
        let bucket = Bucket::start().unwrap();
        bucket.only(only);
        let mut harness = open(named(&bucket, Addressing::Auto), 4);
        assert_eq!(harness.store(&keys(0..2)), [Outcome::Ok; 2]);
        assert_eq!(harness.load(&keys(0..2)), [Outcome::Ok; 2]);
        let told = harness.tier.capabilities().unwrap();
        assert_eq!(told["addressing"], found);
    }
}

#[test]
fn an_addressing_that_was_asked_for_is_kept_to() {
    let bucket = Bucket::start().unwrap();
    for (asked, found) in [(Addressing::Path, "path"), (Addressing::Virtual, "virtual")] {
        let mut harness = open(named(&bucket, asked), 4);
        assert!(harness.store(&keys(0..1))[0].is_success());
        let told = harness.tier.capabilities().unwrap();
        assert_eq!(told["addressing"], found);
    }
    bucket.only(BucketStyle::Virtual);
    let said = refusal(named(&bucket, Addressing::Path));
    assert!(said.contains("there is no such bucket"), "{said}");
}

#[test]
fn a_clock_that_differs_from_the_servers_is_named() {
    let bucket = Bucket::start().unwrap();
    bucket.rule(Rule::all(BucketFault::Refuse(403, "RequestTimeTooSkewed")));
    let said = refusal(options(&bucket.endpoint()));
    assert!(said.contains("clock differs too much"), "{said}");
}

#[test]
fn what_fails_is_told_by_status_and_code_whatever_words_the_url_has() {
    for (status, code, words) in [
        (500, "Faulty", "the server fails or is overloaded"),
        (503, "SlowDown", "the server fails or is overloaded"),
        (
            400,
            "InvalidRequest",
            "the server does not take the request as it is",
        ),
        (400, "ExpiredToken", "the server refuses these credentials"),
        (400, "RequestTimeout", "the server cannot be used"),
        (404, "NoSuchBucket", "there is no such bucket"),
        (507, "Faulty", "the bucket is full"),
    ] {
        let bucket = Bucket::start().unwrap();
        bucket.rule(Rule::all(BucketFault::Refuse(status, code)));
        let mut named = options(&bucket.endpoint());
        named.location.prefix =
            "denied/timeout/NoSuchBucket/RequestExpired/169.254.1.1/status code: 404/dns error"
                .to_owned();
        let said = refusal(named);
        assert!(said.contains(words), "{status} {code}: {said}");
        assert!(said.contains(&status.to_string()), "{said}");
        assert!(said.contains(code), "{said}");
    }
}

#[test]
fn one_answer_of_a_busy_server_keeps_no_tier_from_being_opened() {
    for (part, methods) in [
        ("/kvstrata-probe-", vec![Method::Put]),
        ("/namespace.json", vec![Method::Get]),
        ("/epochs", vec![Method::List]),
    ] {
        for status in [500, 503] {
            let bucket = Bucket::start().unwrap();
            let busy = Rule {
                part: part.to_owned(),
                methods: methods.clone(),
                ..Rule::all(BucketFault::Status(status))
            };
            bucket.rule(busy.times(2));
            let mut harness = open_once(options(&bucket.endpoint()));
            assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok], "{part}");
        }
    }
    // What stays wrong is told, and soon.
    let bucket = Bucket::start().unwrap();
    bucket.rule(Rule::all(BucketFault::Status(403)));
    refusal(options(&bucket.endpoint()));
    assert_eq!(bucket.seen(Method::Put, "/kvstrata-probe-"), 1);
    bucket.heal();
    bucket.rule(Rule::all(BucketFault::Status(503)));
    let before = bucket.seen(Method::Put, "/kvstrata-probe-");
    let said = refusal(options(&bucket.endpoint()));
    assert!(said.contains("overloaded"), "{said}");
    let tries = bucket.seen(Method::Put, "/kvstrata-probe-") - before;
    assert_eq!(tries, 4);
}

/// Names of probes that are left.
fn probes(bucket: &Bucket) -> Vec<String> {
    let names = bucket.names().into_iter();
    names
        .filter(|name| name.contains("/kvstrata-probe-"))
        .collect()
}

#[test]
fn a_probe_that_may_not_be_deleted_is_named_and_not_joined_by_others() {
    let bucket = Bucket::start().unwrap();
    drop(open(options(&bucket.endpoint()), 4));
    assert_eq!(probes(&bucket), [""; 0]);
    bucket.rule(Rule {
        methods: vec![Method::Delete],
        ..Rule::all(BucketFault::Status(403))
    });
    let said = refusal(options(&bucket.endpoint()));
    let left = probes(&bucket);
    assert_eq!(left.len(), 1);
    assert!(said.contains("delete: 403"), "{said}");
    assert!(
        said.contains(&format!("the object {} is left behind", left[0])),
        "{said}"
    );
    // One tier tries it out again and again.
    let later = ObjectOptions {
        required: false,
        ..options(&bucket.endpoint())
    };
    let puts = || bucket.seen(Method::Put, "/kvstrata-probe-");
    let before = puts();
    let circuit = kvstrata_core::tier::CircuitLimits::default();
    let harness = open_with(later, 4, None, circuit);
    eventually("tried again", || puts() >= before + 6);
    assert!(probes(&bucket).len() <= 2, "{:?}", probes(&bucket));
    let digits = |name: &String| name.rsplit_once('-').unwrap().1.len();
    assert!(probes(&bucket).iter().all(|name| digits(name) == 2));
    drop(harness);
}

#[test]
fn what_others_try_out_at_the_same_time_changes_nothing() {
    let bucket = Bucket::start().unwrap();
    let conditional = || {
        let harness = open(options(&bucket.endpoint()), 4);
        let told = harness.tier.capabilities().unwrap();
        told["conditional_put"] == true
    };
    std::thread::scope(|scope| {
        let opening: Vec<_> = (0..16).map(|_| scope.spawn(conditional)).collect();
        for opened in opening {
            assert!(opened.join().unwrap());
        }
    });
    // The probe of one is deleted by another between its steps.
    let bucket = Bucket::start().unwrap();
    let slow = BucketFault::Latency(std::time::Duration::from_millis(200));
    bucket.rule(
        Rule {
            part: "kvstrata-probe-".to_owned(),
            ..Rule::all(slow)
        }
        .times(4),
    );
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| open(options(&bucket.endpoint()), 4));
        eventually("a probe is there", || {
            probes(&bucket).iter().any(|name| bucket.remove(name))
        });
        let told = opening.join().unwrap().tier.capabilities().unwrap();
        assert_eq!(told["conditional_put"], true);
    });
}

#[test]
fn a_wrong_secret_is_answered_403_and_no_more_than_four_characters_of_the_key_are_told() {
    let server = S3sServer::start();
    let mut wrong = options(&server.endpoint());
    let Environment(variables) = &mut wrong.environment;
    let secret = "not-the-secret-of-these-tests";
    variables.insert("AWS_SECRET_ACCESS_KEY".into(), secret.into());
    let said = refusal(wrong);
    assert!(said.contains("403"), "{said}");
    let tail = ACCESS_KEY.get(ACCESS_KEY.len() - 4..).unwrap();
    assert!(said.contains(&format!("...{tail}")), "{said}");
    for hidden in [secret, SECRET_KEY, ACCESS_KEY] {
        assert!(!said.contains(hidden), "{said}");
    }
}

#[test]
fn credentials_and_a_region_that_end_in_a_newline_are_taken_without_it() {
    let server = S3sServer::start();
    let mut mounted = options(&server.endpoint());
    mounted.region = Some("us-east-1\n".to_owned());
    let Environment(variables) = &mut mounted.environment;
    for value in variables.values_mut() {
        value.push('\n');
    }
    let mut harness = open(mounted, 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn every_body_comes_with_its_checksum() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 8);
    assert_eq!(harness.store(&keys(0..8)), [Outcome::Ok; 8]);
    assert!(harness.tier.reset().unwrap());
    assert_eq!(bucket.checked(), bucket.seen(Method::Put, ""));
}

#[test]
fn a_body_that_others_could_change_on_its_way_is_signed() {
    let server = S3sServer::start();
    // This machine, by an address that is not known to be its own.
    let mut harness = open(
        options(&server.endpoint().replace("127.0.0.1", "0.0.0.0")),
        4,
    );
    let told = harness.tier.capabilities().unwrap();
    assert_eq!(told["signed_payload"], true);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
}
