//! What an object tier is opened with. Credentials never stand here in the clear.

use core::fmt;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::config::{check_deadline, shown};
use crate::error::{Error, Result};
use crate::key::GroupId;
use crate::namespace::Manifest;
use crate::object::credentials;
use crate::object::header::HEADER_BYTES;
use crate::object::limits::ObjectLimits;
use crate::object::location::{Location, Scheme};
use crate::object::{Failure, FailureKind, NamedFiles};

/// Largest object: one PUT takes it whole.
pub const OBJECT_BYTES_MAX: u64 = 64 << 20;
/// Most payload bytes of a row.
pub const OBJECT_ROW_BYTES_MAX: u64 = OBJECT_BYTES_MAX - HEADER_BYTES_WIDE;
const HEADER_BYTES_WIDE: u64 = 256;
const _: () = assert!(HEADER_BYTES == 256);

/// Where the bucket's name stands in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// In the path where an endpoint is given, and in the host's name where that does not work or
    /// none is given.
    Auto,
    /// `https://endpoint/bucket/object`.
    Path,
    /// `https://bucket.endpoint/object`.
    Virtual,
}

impl Addressing {
    /// Reads the option.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] for another word.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "path" => Ok(Self::Path),
            "virtual" => Ok(Self::Virtual),
            _ => Err(Error::config(format!(
                "addressing: {text:?} is not \"auto\", \"path\" or \"virtual\""
            ))),
        }
    }
}

/// Variables whose values stand in headers of requests.
const HEADER_VARIABLES: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
];

/// Variables of the environment, which the caller has read: names and values. Shown without values.
#[derive(Clone, Default)]
pub struct Environment(pub BTreeMap<String, String>);

impl Environment {
    /// The value of a variable that is set and not empty, without the space around it: what is
    /// read from a file often ends in a newline.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name).map(|value| value.trim());
        value.filter(|value| !value.is_empty())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.0.keys()).finish()
    }
}

/// Everything that an object tier needs beside the arena.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// The bucket and the prefix.
    pub location: Location,
    /// Identity fields of the manifest; `model` (a string) is required.
    pub identity: Map<String, Value>,
    /// Payload bytes of a row, by group.
    pub row_bytes: BTreeMap<GroupId, u64>,
    /// `http://host:port` or `https://host:port`; `None`: the provider's own.
    pub endpoint: Option<String>,
    /// The provider's region; `None`: the environment's, or `us-east-1`.
    pub region: Option<String>,
    /// Where the bucket's name stands.
    pub addressing: Addressing,
    /// Whether requests may go over plain HTTP.
    pub allow_http: bool,
    /// A file of PEM certificates to trust beside the system's.
    pub ca_bundle: Option<PathBuf>,
    /// Longest time of one operation, by the wall clock, its body included.
    pub deadline: Duration,
    /// Whether an unusable bucket is an error at open, or a tier that misses and tries again.
    pub required: bool,
    /// The variables that say where credentials are.
    pub environment: Environment,
    /// What reads the files that these and [`ca_bundle`](Self::ca_bundle) name.
    pub files: NamedFiles,
    /// Bounds.
    pub limits: ObjectLimits,
}

impl ObjectOptions {
    /// Checks what can be checked without asking the server; returns the manifest.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] naming the field.
    pub fn validate(&self) -> Result<Manifest> {
        if self.row_bytes.is_empty() {
            return Err(Error::config(
                "row_bytes: names no group; at least one is needed",
            ));
        }
        for (group, bytes) in &self.row_bytes {
            if *bytes == 0 || *bytes > OBJECT_ROW_BYTES_MAX {
                return Err(Error::config(format!(
                    "row_bytes: group {group} has {bytes} bytes; 1 to {OBJECT_ROW_BYTES_MAX} fit \
                     an object of 64 MiB"
                )));
            }
        }
        check_deadline(self.deadline)?;
        if self.limits.requests_max == 0 {
            return Err(Error::config("requests_max: is 0; at least 1 is needed"));
        }
        if self.limits.bytes_in_flight_max == 0 {
            return Err(Error::config("in_flight_max: is 0; at least 1 is needed"));
        }
        self.check_headers()?;
        self.check_endpoint()?;
        Manifest::new(self.identity.clone(), &self.row_bytes)
    }

    /// The region to sign for, where one is given.
    pub(super) fn region(&self) -> Option<&str> {
        let region = self.region.as_deref().map(str::trim);
        region.filter(|region| !region.is_empty())
    }

    /// Refuses what cannot stand in a request's header: the client would panic.
    fn check_headers(&self) -> Result<()> {
        let given = HEADER_VARIABLES
            .iter()
            .filter_map(|name| Some((*name, self.environment.get(name)?)))
            .chain(self.region().map(|region| ("region", region)));
        for (name, value) in given {
            if !value.chars().all(|c| c.is_ascii_graphic()) {
                return Err(Error::config(format!(
                    "{name}: has a space, a control or another character that no header of a \
                     request may have"
                )));
            }
        }
        Ok(())
    }

    fn check_endpoint(&self) -> Result<()> {
        let Some(endpoint) = &self.endpoint else {
            return Ok(());
        };
        if self.location.scheme == Scheme::Memory {
            return Err(Error::config("endpoint: memory:// has none"));
        }
        if endpoint.contains('@') {
            return Err(Error::config(
                "endpoint: contains '@'; credentials come from the environment, a file or the \
                 instance",
            ));
        }
        let host = match endpoint.split_once("://") {
            Some(("http", _)) if !self.allow_http => {
                return Err(Error::config(format!(
                    "endpoint: {:?} is plain HTTP; allow_http=True allows that",
                    shown(endpoint)
                )));
            }
            Some(("http" | "https", host)) => host,
            _ => "",
        };
        if host.is_empty() || host.contains(['?', '#', ' ']) {
            return Err(Error::config(format!(
                "endpoint: {:?} is not http://host:port or https://host:port",
                shown(endpoint)
            )));
        }
        Ok(())
    }

    /// The error of a bucket that cannot be used: what was tried, and what can be done about it. Of
    /// the credentials it tells at most the last four characters of the access key's name.
    #[must_use]
    pub fn unusable(&self, what: &str, failure: &Failure) -> Error {
        let mut text = format!("cannot {what} {}", self.location);
        if let Some(endpoint) = &self.endpoint {
            text = format!("{text} at {endpoint}");
        }
        text = format!("{text}: {}", failure.kind.remedy());
        match (failure.kind, self.environment.get("AWS_ACCESS_KEY_ID")) {
            (FailureKind::NoCredentials, _) => {
                let places =
                    credentials::places(self.location.scheme, &self.environment, &self.files);
                text = format!("{text}; {places}");
            }
            (FailureKind::Denied, Some(key)) if key.len() >= 8 => {
                let tail = key.char_indices().rev().nth(3).map_or(0, |(at, _)| at);
                let tail = key.get(tail..).unwrap_or("");
                text = format!("{text} (access key ...{tail})");
            }
            _ => {}
        }
        Error::config(format!("{text} [{failure}]"))
    }

    /// Whether bytes on their way are safe from others: TLS, or a connection within this machine.
    #[must_use]
    pub fn is_private_path(&self) -> bool {
        let Some(endpoint) = &self.endpoint else {
            return true;
        };
        let Ok(url) = url::Url::parse(endpoint) else {
            return false;
        };
        url.scheme() == "https" || url.host_str().is_some_and(is_this_machine)
    }
}

/// Whether a host, as it stands in a URL, is this machine whoever is asked: names say nothing but
/// for `localhost` and those below it.
fn is_this_machine(host: &str) -> bool {
    let address = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    if let Ok(address) = address.unwrap_or(host).parse::<IpAddr>() {
        return address.to_canonical().is_loopback();
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let last = name.rsplit('.').next().unwrap_or(name);
    last.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(endpoint: Option<&str>, allow_http: bool) -> ObjectOptions {
        let mut identity = Map::new();
        identity.insert("model".into(), "m".into());
        ObjectOptions {
            location: Location::parse("s3://bucket/p").unwrap().unwrap(),
            identity,
            row_bytes: BTreeMap::from([(GroupId(0), 4096)]),
            endpoint: endpoint.map(str::to_owned),
            region: None,
            addressing: Addressing::Auto,
            allow_http,
            ca_bundle: None,
            deadline: Duration::from_secs(30),
            required: true,
            environment: Environment(BTreeMap::from([(
                "AWS_SECRET_ACCESS_KEY".to_owned(),
                "hidden".to_owned(),
            )])),
            files: NamedFiles::default(),
            limits: ObjectLimits::default(),
        }
    }

    #[test]
    fn an_endpoint_is_a_whole_url_and_plain_http_is_asked_for() {
        assert!(options(None, false).validate().is_ok());
        assert!(options(Some("https://h"), false).validate().is_ok());
        assert!(options(Some("http://h:1"), true).validate().is_ok());
        for (endpoint, allow_http) in [
            ("http://h:1", false),
            ("h:1", true),
            ("ftp://h", true),
            ("https://", true),
            ("https://a:secret@h", true),
            ("https://h?secret", true),
            ("http://h?secret", false),
            ("ftp://h#secret", true),
        ] {
            let error = options(Some(endpoint), allow_http).validate().unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
            assert!(error.to_string().starts_with("endpoint"), "{error}");
        }
    }

    #[test]
    fn what_no_header_may_have_is_refused_by_its_name_and_space_around_it_is_not() {
        let with = |name: &str, value: &str| {
            let mut with = options(None, false);
            let Environment(variables) = &mut with.environment;
            variables.insert(name.to_owned(), value.to_owned());
            with
        };
        for name in HEADER_VARIABLES {
            let ended = with(name, " value\r\n");
            assert!(ended.validate().is_ok(), "{name}");
            assert_eq!(ended.environment.get(name), Some("value"));
            for wrong in ["a\nsecret", "a secret", "a\u{7f}secret", "\u{e9}secret"] {
                let error = with(name, wrong).validate().unwrap_err().to_string();
                assert!(error.starts_with(&format!("{name}: ")), "{error}");
                assert!(!error.contains("secret"), "{error}");
            }
        }
        let mut region = options(None, false);
        region.region = Some("eu-1\n".to_owned());
        assert_eq!(
            (region.validate().is_ok(), region.region()),
            (true, Some("eu-1"))
        );
        region.region = Some("eu\n1".to_owned());
        let error = region.validate().unwrap_err().to_string();
        assert!(error.starts_with("region: "), "{error}");
    }

    #[test]
    fn only_tls_and_this_machine_are_private() {
        for private in [
            "https://h",
            "http://127.0.0.1:80",
            "http://localhost",
            "http://[::1]:9",
            "http://[::ffff:127.0.0.1]:9",
            "http://127.9.9.9",
            "http://127.1",
            "http://bucket.LOCALHOST.:80/x",
        ] {
            assert!(options(Some(private), true).is_private_path(), "{private}");
        }
        assert!(options(None, false).is_private_path());
        for other in [
            "http://10.0.0.1:80/x",
            "http://127.example.org",
            "http://127.0.0.1.example.org",
            "http://localhost.example.org",
            "http://notlocalhost",
            "http://[::2]",
            "http://127.0.0.1@example.org",
        ] {
            assert!(!options(Some(other), true).is_private_path(), "{other}");
        }
    }

    #[test]
    fn debug_output_shows_no_values_of_the_environment() {
        let shown = format!("{:?}", options(None, false));
        assert!(shown.contains("AWS_SECRET_ACCESS_KEY"));
        assert!(!shown.contains("hidden"));
    }

    #[test]
    fn a_row_that_no_single_put_takes_is_refused() {
        let mut large = options(None, false);
        large.row_bytes = BTreeMap::from([(GroupId(0), OBJECT_ROW_BYTES_MAX + 1)]);
        assert!(
            large
                .validate()
                .unwrap_err()
                .to_string()
                .contains("row_bytes")
        );
    }
}
