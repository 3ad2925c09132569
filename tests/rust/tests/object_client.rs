//! What the HTTP client makes of servers and of the ways to them.
#![expect(clippy::unwrap_used, reason = "a test fails where these fail")]

mod object_support;
mod tier_support;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::connect::{Style, connect};
use kvstrata_core::object::options::Environment;
use kvstrata_core::sys::clock::{Clock, SystemClock};
use kvstrata_testkit::Bucket;
use object_support::relay::{Relay, Twist};
use object_support::{ACCESS_KEY, SECRET_KEY, open, open_hasty, options, row_names};
use tier_support::keys;

fn listener(host: &str) -> TcpListener {
    TcpListener::bind((host, 0)).unwrap()
}

#[test]
fn redirects_are_not_followed() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("127.0.0.1"), &bucket.endpoint());
    let elsewhere = listener("127.0.0.1");
    elsewhere.set_nonblocking(true).unwrap();
    let mut harness = open_hasty(options(&relay.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    let location = format!("http://{}/x", elsewhere.local_addr().unwrap());
    for status in [301, 302, 303, 307, 308] {
        relay.twist(Twist::Redirect(status, location.clone()));
        assert_eq!(harness.load(&keys(0..1)), [Outcome::IoError], "{status}");
        let stored = harness.store(&keys(1..2));
        assert_eq!(stored, [Outcome::IoError], "{status}");
        let told = harness.tier.stats().unwrap()["last_error"].to_string();
        assert!(told.contains(&status.to_string()), "{told}");
        assert!(!told.contains(SECRET_KEY), "{told}");
    }
    let error = elsewhere.accept().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn interim_answers_change_nothing() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("127.0.0.1"), &bucket.endpoint());
    let mut harness = open(options(&relay.endpoint()), 4);
    relay.twist(Twist::Interim);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.stat("retries"), 0);
}

#[test]
fn answers_that_cannot_be_taken_cost_the_load_and_no_object() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("127.0.0.1"), &bucket.endpoint());
    let mut harness = open_hasty(options(&relay.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    for (twist, outcome) in [
        // Nobody knows how much of it there is to come.
        (Twist::Chunked, Outcome::IoError),
        (Twist::Headers(1 << 20), Outcome::IoError),
        // The checksum tells whether it is.
        (Twist::Encoded, Outcome::Ok),
    ] {
        relay.twist(twist.clone());
        assert_eq!(harness.load(&keys(0..1)), [outcome], "{twist:?}");
        assert_eq!(row_names(&bucket).len(), 1, "{twist:?}");
    }
    relay.twist(Twist::Nothing);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
}

#[test]
fn a_server_is_found_by_an_address_of_the_sixth_version() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("::1"), &bucket.endpoint());
    assert!(relay.endpoint().starts_with("http://[::1]:"));
    let mut harness = open(options(&relay.endpoint()), 4);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
}

#[test]
fn of_several_addresses_one_that_says_nothing_does_not_keep_the_others_from_being_tried() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("::1"), &bucket.endpoint());
    // The same port of the other address takes no connections and refuses none.
    let Ok(silent) = TcpListener::bind(("127.0.0.1", relay.port())) else {
        return;
    };
    rustix::net::listen(&silent, 0).unwrap();
    let address = silent.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
        waiting.push(stream);
    }
    let named = options(&format!("http://two.localhost:{}", relay.port()));
    let mut harness = open(named, 4);
    assert_eq!(harness.store(&keys(0..4)), [Outcome::Ok; 4]);
    assert_eq!(harness.load(&keys(0..4)), [Outcome::Ok; 4]);
    drop(waiting);
}

#[test]
fn a_server_that_was_started_again_costs_nothing() {
    let bucket = Bucket::start().unwrap();
    let relay = Relay::start(listener("127.0.0.1"), &bucket.endpoint());
    let mut harness = open(options(&relay.endpoint()), 32);
    assert_eq!(harness.store(&keys(0..32)), [Outcome::Ok; 32]);
    for round in 1..4 {
        assert!(relay.restart() > 0);
        let (from, to) = (round * 32, round * 32 + 32);
        assert_eq!(harness.load(&keys(0..32)), [Outcome::Ok; 32]);
        assert_eq!(harness.store(&keys(from..to)), [Outcome::Ok; 32]);
    }
}

#[test]
fn connections_are_used_again_and_again() {
    let bucket = Bucket::start().unwrap();
    let mut harness = open(options(&bucket.endpoint()), 1);
    let before = bucket.connections();
    for key in keys(0..50) {
        assert_eq!(harness.store(&[key]), [Outcome::Ok]);
        assert_eq!(harness.load(&[key]), [Outcome::Ok]);
    }
    let more = bucket.connections() - before;
    assert!(more < 10, "{more}");
}

#[test]
fn a_client_shows_nothing_of_its_credentials() {
    let mut named = options("http://127.0.0.1:1");
    let token = "the-session-of-these-tests";
    let Environment(variables) = &mut named.environment;
    variables.insert("AWS_SESSION_TOKEN".into(), token.into());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    for on_this_machine in [true, false] {
        if !on_this_machine {
            named.endpoint = Some("http://192.0.2.1:1".to_owned());
        }
        let store = connect(&named, Style::Path, &clock, &Arc::default()).unwrap();
        let shown = format!("{store:?} {store:#?} {store} {named:?}");
        for hidden in [SECRET_KEY, ACCESS_KEY, token] {
            assert!(!shown.contains(hidden), "{shown}");
        }
    }
}
