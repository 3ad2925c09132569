//! Peers that pause, and such that are not there: what a pause costs, and what it is called.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and measures"
)]

mod object_support;
mod tier_support;

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvstrata_core::job::Outcome;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::tier::Tier;
use kvstrata_testkit::memory::leaked;
use kvstrata_testkit::{Bucket, BucketFault, Method, Rule};
use object_support::{eventually, open_hasty, options};
use tier_support::keys;

#[test]
fn a_pause_longer_than_a_tenth_of_the_deadline_does_not_cost_a_store() {
    let bucket = Bucket::start().unwrap();
    let mut large = ObjectOptions {
        deadline: Duration::from_secs(15),
        ..options(&bucket.endpoint())
    };
    // No attempt but the first for any other reason.
    large.limits.attempts_max = 1;
    for bytes in large.row_bytes.values_mut() {
        *bytes = 32 << 20;
    }
    let mut harness = open_hasty(large, 1);
    let pause = BucketFault::Latency(Duration::from_secs(4));
    bucket.rule(Rule::rows(&[Method::Put], pause).times(1));
    harness.wipe();
    let job = harness.job();
    harness.tier.store(job, &keys(0..1), &[0]).unwrap();
    let result = harness.result(job);
    assert_eq!(result.outcomes, [Outcome::Ok], "{result:?}");
    assert!(harness.stat("retries") > 0);
    assert_eq!(harness.stat("retries_refused"), 0);
}

/// Options of one large row, which a peer that sips takes 25 s for.
fn large(bucket: &Bucket, deadline: Duration) -> ObjectOptions {
    let mut large = ObjectOptions {
        deadline,
        ..options(&bucket.endpoint())
    };
    for bytes in large.row_bytes.values_mut() {
        *bytes = 32 << 20;
    }
    large
}

/// Has a peer take bodies by sips: never with so long a pause that the kernel gives it up.
fn by_sips(fault: BucketFault) -> Rule {
    Rule::rows(&[Method::Put], fault).by_sips(64 << 10, Duration::from_millis(50))
}

#[test]
fn a_peer_that_takes_a_body_sip_by_sip_has_a_slot_no_longer_than_the_deadline() {
    let bucket = Bucket::start().unwrap();
    let deadline = Duration::from_secs(2);
    let mut harness = open_hasty(large(&bucket, deadline), 1);
    bucket.rule(by_sips(BucketFault::Nothing));
    harness.wipe();
    let begun = Instant::now();
    let job = harness.job();
    harness.tier.store(job, &keys(0..1), &[0]).unwrap();
    assert_eq!(harness.result(job).outcomes, [Outcome::Timeout]);
    assert!(begun.elapsed() < 3 * deadline, "{:?}", begun.elapsed());
    harness.tier.close(Duration::ZERO).unwrap();
}

#[test]
fn a_body_that_is_being_sipped_holds_up_no_close() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open_hasty(large(&bucket, Duration::from_mins(1)), 1);
    bucket.rule(by_sips(BucketFault::Nothing));
    harness.wipe();
    let job = harness.job();
    harness.tier.store(job, &keys(0..1), &[0]).unwrap();
    eventually("it is on its way", || {
        bucket.seen(Method::Put, "/rows/") == 1
    });
    // Busy, where the client still had bytes of the slot.
    harness.tier.close(Duration::ZERO).unwrap();
}

#[test]
fn a_peer_that_refuses_a_body_and_sips_it_all_the_same_costs_no_more_than_an_attempt() {
    let bucket = Bucket::start().unwrap();
    // All of the body would take longer.
    let mut harness = open_hasty(large(&bucket, Duration::from_secs(18)), 1);
    bucket.rule(by_sips(BucketFault::EarlyStatus(503)).times(1));
    harness.wipe();
    let job = harness.job();
    harness.tier.store(job, &keys(0..1), &[0]).unwrap();
    let result = harness.result(job);
    assert_eq!(result.outcomes, [Outcome::Ok], "{result:?}");
    assert_eq!(harness.stat("retries"), 1);
}

/// A port of this machine at which connections are neither taken nor refused, while these live.
fn silent() -> (TcpListener, Vec<TcpStream>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
        waiting.push(stream);
    }
    (listener, waiting)
}

#[test]
fn a_connection_that_does_not_come_about_in_time_is_named_so() {
    let (listener, _waiting) = silent();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let refused = Tier::open_object(options(&endpoint), leaked(5000, 0).unwrap());
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("no connection; check endpoint"), "{said}");
    assert!(
        said.contains("connect: put: no connection in time"),
        "{said}"
    );
}
