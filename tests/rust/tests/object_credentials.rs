//! Credentials from services and the tokens that these ask for.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, and writes files"
)]

mod object_support;
mod tier_support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use kvstrata_core::job::Outcome;
use kvstrata_core::object::ObjectOptions;
use kvstrata_core::object::options::Environment;
use kvstrata_core::tier::Tier;
use kvstrata_testkit::Bucket;
use kvstrata_testkit::memory::leaked;
use object_support::{ACCESS_KEY, SECRET_KEY, eventually, open, options};
use tier_support::keys;

/// A service that hands out credentials; tells the value of each request's `authorization`.
fn service(session_token: &'static str) -> (String, Receiver<String>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}/credentials", listener.local_addr().unwrap());
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if sender.send(answer(stream, session_token)).is_err() {
                return;
            }
        }
    });
    (url, receiver)
}

fn answer(mut stream: TcpStream, session_token: &str) -> String {
    let mut authorization = String::new();
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        let line = line.unwrap();
        if line.is_empty() {
            break;
        }
        if let Some(("authorization", value)) = line.split_once(": ") {
            value.clone_into(&mut authorization);
        }
    }
    let body = format!(
        "{{\"AccessKeyId\": \"{ACCESS_KEY}\", \"SecretAccessKey\": \"{SECRET_KEY}\", \
         \"Token\": \"{session_token}\", \"Expiration\": \"2099-01-01T00:00:00Z\"}}"
    );
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = stream.write_all(format!("{head}{body}").as_bytes());
    authorization
}

fn by_service(bucket: &Bucket, url: &str, token: &Path) -> ObjectOptions {
    let variables = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", url.to_owned()),
        (
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            token.display().to_string(),
        ),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    ObjectOptions {
        environment: Environment(BTreeMap::from(variables)),
        ..options(&bucket.endpoint())
    }
}

fn refusal(options: ObjectOptions) -> String {
    let opened = Tier::open_object(options, leaked(5000, 0).unwrap());
    opened.unwrap_err().to_string()
}

#[test]
fn a_token_file_that_ends_in_a_newline_is_sent_without_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "a.token+of/these=tests\n").unwrap();
    let bucket = Bucket::start().unwrap();
    let (url, sent) = service("session");
    let mut harness = open(by_service(&bucket, &url, &path), 4);
    assert_eq!(harness.store(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(harness.load(&keys(0..1)), [Outcome::Ok]);
    assert_eq!(sent.recv().unwrap(), "a.token+of/these=tests");
}

#[test]
fn a_token_file_that_holds_no_token_is_named_and_nothing_of_it_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    let bucket = Bucket::start().unwrap();
    let (url, sent) = service("session");
    for text in ["hidden\nhidden\n", "hid\u{1}den", ""] {
        std::fs::write(&path, text).unwrap();
        let said = refusal(by_service(&bucket, &url, &path));
        let shown = path.display().to_string();
        assert!(said.contains("no credentials; give them by"), "{said}");
        assert!(said.contains(&format!("the token file {shown} ")), "{said}");
        assert!(!said.contains("hid"), "{said}");
    }
    let identity = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", path.display().to_string()),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r".to_owned()),
        // Never reached.
        ("AWS_ENDPOINT_URL_STS", "https://127.0.0.1:1".to_owned()),
    ];
    let identity = identity.map(|(name, value)| (name.to_owned(), value));
    std::fs::write(&path, "hidden\nhidden").unwrap();
    let said = refusal(ObjectOptions {
        environment: Environment(BTreeMap::from(identity)),
        ..options(&bucket.endpoint())
    });
    assert!(said.contains("the token file "), "{said}");
    assert!(!said.contains("hidden"), "{said}");
    assert!(sent.try_recv().is_err());
}

#[test]
fn credentials_that_no_header_can_hold_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "token").unwrap();
    let bucket = Bucket::start().unwrap();
    let (url, _sent) = service("hidden\\nhidden");
    let said = refusal(by_service(&bucket, &url, &path));
    assert!(said.contains("no credentials; give them by"), "{said}");
    assert!(
        said.contains("that no header of a request may have"),
        "{said}"
    );
    assert!(!said.contains("hidden"), "{said}");
}

/// A file that gives no bytes until somebody writes some.
fn fifo(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
    path
}

fn by_file(bucket: &Bucket, path: &Path) -> ObjectOptions {
    let name = "AWS_SHARED_CREDENTIALS_FILE".to_owned();
    ObjectOptions {
        environment: Environment(BTreeMap::from([(name, path.display().to_string())])),
        ..options(&bucket.endpoint())
    }
}

#[test]
fn a_tier_joins_once_its_credentials_file_gives_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let bucket = Bucket::start().unwrap();
    let path = fifo(directory.path(), "credentials");
    let later = ObjectOptions {
        required: false,
        ..by_file(&bucket, &path)
    };
    let tier = Tier::open_object(later, leaked(5000, 0).unwrap()).unwrap();
    assert_eq!(tier.lookup(&keys(0..1)).unwrap(), [Some(false)]);
    eventually("the file is named", || {
        let stats = tier.stats().unwrap();
        let error = stats["last_error"]["text"]
            .as_str()
            .unwrap_or("")
            .to_owned();
        error.contains("gives no bytes")
    });
    let text = format!(
        "[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    );
    std::fs::write(&path, &text).unwrap();
    // From now on a file like any other.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &text).unwrap();
    eventually("in use", || tier.stats().unwrap()["health"] == "ok");
}
