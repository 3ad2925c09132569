//! Files that options name and that give no bytes: alone in its process, for it counts threads.
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

use kvstrata_core::object::ObjectOptions;
use kvstrata_core::object::options::Environment;
use kvstrata_core::tier::Tier;
use kvstrata_testkit::Bucket;
use kvstrata_testkit::memory::leaked;
use object_support::{eventually, options};

/// A file that gives no bytes until somebody writes some.
fn fifo(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
    path
}

/// Credentials by variables that name files.
fn by(bucket: &Bucket, variables: &[(&str, &Path)]) -> ObjectOptions {
    let variables = variables.iter();
    let named = variables.map(|(name, path)| ((*name).to_owned(), path.display().to_string()));
    ObjectOptions {
        environment: Environment(named.collect()),
        ..options(&bucket.endpoint())
    }
}

fn refusal(options: ObjectOptions) -> String {
    let opened = Tier::open_object(options, leaked(5000, 0).unwrap());
    opened.unwrap_err().to_string()
}

/// Threads of this process that read such files.
fn readers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == "kvstrata-file").count()
}

#[test]
fn files_that_give_no_bytes_are_named_in_time_and_cost_one_thread_each() {
    let directory = tempfile::tempdir().unwrap();
    let bucket = Bucket::start().unwrap();
    let path = |name| fifo(directory.path(), name);
    let (keys, bundle, token) = (path("keys"), path("bundle"), path("token"));
    let pem = ObjectOptions {
        ca_bundle: Some(bundle.clone()),
        ..options(&bucket.endpoint())
    };
    let mut identity = by(&bucket, &[("AWS_WEB_IDENTITY_TOKEN_FILE", &token)]);
    let Environment(variables) = &mut identity.environment;
    variables.extend(BTreeMap::from([
        (
            "AWS_ROLE_ARN".to_owned(),
            "arn:aws:iam::1:role/r".to_owned(),
        ),
        // Never reached.
        (
            "AWS_ENDPOINT_URL_STS".to_owned(),
            "https://127.0.0.1:1".to_owned(),
        ),
    ]));
    for (options, words, path) in [
        (
            by(&bucket, &[("AWS_SHARED_CREDENTIALS_FILE", &keys)]),
            "the credentials file ",
            &keys,
        ),
        (pem, "ca_bundle: ", &bundle),
        (identity, "the token file ", &token),
    ] {
        let before = readers();
        for _ in 0..5 {
            let begun = Instant::now();
            let said = refusal(options.clone());
            // A second, and no other attempt's second.
            assert!(begun.elapsed() < Duration::from_secs(10), "{said}");
            assert!(
                said.contains(&format!("{words}{}", path.display())),
                "{said}"
            );
            // The end of a long text is cut.
            assert!(
                said.contains("it gives no") || words.contains("token"),
                "{said}"
            );
        }
        assert_eq!(readers(), before + 1, "{words}");
        // The thread ends with the file.
        drop(std::fs::OpenOptions::new().write(true).open(path).unwrap());
        eventually("read", || readers() == before);
    }
}
