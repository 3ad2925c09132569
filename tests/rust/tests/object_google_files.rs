//! Files of Google's credentials that give no bytes: the client reads them by itself.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails where these fail, measures, and makes files"
)]

mod object_support;
mod tier_support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvstrata_core::object::options::Environment;
use kvstrata_core::object::{Location, ObjectOptions};
use kvstrata_core::tier::Tier;
use kvstrata_testkit::memory::leaked;
use object_support::options;

/// A file that gives no bytes until somebody writes some.
fn fifo(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
    path
}

fn refusal(options: ObjectOptions) -> String {
    let opened = Tier::open_object(options, leaked(5000, 0).unwrap());
    opened.unwrap_err().to_string()
}

#[test]
fn files_of_google_that_give_no_bytes_are_named_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let gcloud = directory.path().join(".config/gcloud");
    std::fs::create_dir_all(&gcloud).unwrap();
    let usual = fifo(&gcloud, "application_default_credentials.json");
    let named = fifo(directory.path(), "named");
    let endless = PathBuf::from("/dev/zero");
    for (variable, path, words) in [
        ("GOOGLE_SERVICE_ACCOUNT", &named, "GOOGLE_SERVICE_ACCOUNT: "),
        (
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            &named,
            "GOOGLE_SERVICE_ACCOUNT_PATH: ",
        ),
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            &named,
            "GOOGLE_APPLICATION_CREDENTIALS: ",
        ),
        (
            "GOOGLE_application_credentials",
            &endless,
            "GOOGLE_application_credentials: ",
        ),
        ("HOME", &usual, "the application default credentials "),
    ] {
        let value = if variable == "HOME" {
            directory.path()
        } else {
            path.as_path()
        };
        let google = ObjectOptions {
            location: Location::parse("gs://bucket/prefix").unwrap().unwrap(),
            endpoint: None,
            environment: Environment(BTreeMap::from([(
                variable.to_owned(),
                value.display().to_string(),
            )])),
            ..options("http://127.0.0.1:1")
        };
        let begun = Instant::now();
        let said = refusal(google);
        assert!(begun.elapsed() < Duration::from_secs(10), "{said}");
        assert!(
            said.contains(&format!("{words}{}", path.display())),
            "{said}"
        );
        let why = if path == &endless {
            "file too large"
        } else {
            "it gives no bytes"
        };
        assert!(said.contains(why), "{said}");
    }
}
