//! What a failed request means: for the row, for the server's health, and in words.

use core::error::Error as StdError;
use core::fmt;

use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};

/// What went wrong with a request, as far as anybody has to act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// There is no such object.
    Missing,
    /// There is one already, or the server says so.
    Exists,
    /// The object is not the one that was meant.
    Changed,
    /// The object has none of the bytes that were asked for (416).
    OutOfRange,
    /// The credentials do not suffice (401, 403).
    Denied,
    /// There are no credentials.
    NoCredentials,
    /// There is no such bucket.
    NoBucket,
    /// The request named the bucket where the server does not look for it (redirects, 400, 405).
    Addressing,
    /// This machine's clock is not the server's.
    ClockSkew,
    /// The bucket is full, or over its quota.
    Full,
    /// The server wants fewer requests (429, 503).
    Throttled,
    /// The server failed (5xx).
    Server,
    /// The server does not do what was asked (501).
    Unsupported,
    /// The host's name cannot be resolved.
    Dns,
    /// No connection: refused, unreachable.
    Connect,
    /// The server's certificate is not trusted, or it speaks no TLS.
    Tls,
    /// The connection broke, or the body was cut.
    Broken,
    /// It was not over by its deadline.
    Late,
    /// Anything else.
    Other,
}

impl FailureKind {
    /// The word in statistics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Missing => "not_found",
            Self::Exists => "already_exists",
            Self::Changed => "changed",
            Self::OutOfRange => "out_of_range",
            Self::Denied => "denied",
            Self::NoCredentials => "no_credentials",
            Self::NoBucket => "no_bucket",
            Self::Addressing => "addressing",
            Self::ClockSkew => "clock_skew",
            Self::Full => "full",
            Self::Throttled => "throttled",
            Self::Server => "server_error",
            Self::Unsupported => "unsupported",
            Self::Dns => "dns",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Broken => "broken",
            Self::Late => "timeout",
            Self::Other => "other",
        }
    }

    /// Whether another attempt may go better at once.
    #[must_use]
    pub const fn is_worth_a_retry(self) -> bool {
        matches!(
            self,
            Self::Throttled | Self::Server | Self::Connect | Self::Broken
        )
    }

    /// Whether it says that the server, or the way to it, is in trouble.
    #[must_use]
    pub const fn is_of_server(self) -> bool {
        !matches!(
            self,
            Self::Missing
                | Self::Exists
                | Self::Changed
                | Self::OutOfRange
                | Self::Full
                | Self::Unsupported
        )
    }

    /// What an operator can do about it when a bucket is opened.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Dns => "the host's name cannot be resolved; check endpoint and addressing",
            Self::Connect => "no connection; check endpoint, port and firewall",
            Self::Tls => "TLS failed; check the scheme of the endpoint, or give ca_bundle",
            Self::Denied => {
                "the server refuses these credentials (401 or 403); check them, the region and the \
                 bucket's policy: put, get, list and delete are needed"
            }
            Self::NoCredentials => {
                "no credentials; give them by environment, credentials file or role"
            }
            Self::NoBucket => "there is no such bucket (404); create it or correct the URL",
            Self::Addressing => {
                "the server does not find the bucket there; try the other addressing"
            }
            Self::ClockSkew => "this machine's clock differs too much from the server's",
            Self::Full => "the bucket is full or over its quota",
            Self::Late => "no answer by the deadline",
            Self::Throttled | Self::Server => "the server fails or is overloaded",
            _ => "the server cannot be used",
        }
    }
}

/// A failed request.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What it means.
    pub kind: FailureKind,
    /// One line, without secrets.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.kind.name(), self.text)
    }
}

/// Most characters of a failure's text.
const TEXT_MAX: usize = 300;

impl Failure {
    /// A failure in our own words.
    #[must_use]
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// It did not end in time.
    #[must_use]
    pub fn late() -> Self {
        Self::new(FailureKind::Late, "no answer by the deadline")
    }

    /// What an error of the client means.
    #[must_use]
    pub fn of(error: &StoreError) -> Self {
        let chain = chain_of(error);
        Self {
            kind: kind_of(error, &chain),
            text: shortened(&chain),
        }
    }
}

/// An error and all that caused it, without what the former says already.
fn chain_of(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = cause.source();
    }
    text
}

/// One line of bounded length. What servers echo of a request's signature is left out.
fn shortened(chain: &str) -> String {
    const SECRETS: [&str; 5] = [
        "<StringToSign",
        "<SignatureProvided",
        "<CanonicalRequest",
        "<AWSAccessKeyId",
        "X-Amz-Security-Token",
    ];
    let end = SECRETS.iter().filter_map(|mark| chain.find(mark)).min();
    let kept = chain.get(..end.unwrap_or(chain.len())).unwrap_or(chain);
    let line: Vec<&str> = kept.split_whitespace().collect();
    let line = line.join(" ");
    match line.char_indices().nth(TEXT_MAX) {
        Some((at, _)) => format!("{}...", line.get(..at).unwrap_or("")),
        None => line,
    }
}

fn kind_of(error: &StoreError, chain: &str) -> FailureKind {
    let has = |text: &str| chain.contains(text);
    if has("RequestTimeTooSkewed") || has("RequestExpired") {
        return FailureKind::ClockSkew;
    }
    if has("NoSuchBucket") || has("ContainerNotFound") {
        return FailureKind::NoBucket;
    }
    if has("QuotaExceeded") || has("XMinioStorageFull") || has("NotEnoughSpace") {
        return FailureKind::Full;
    }
    match error {
        StoreError::NotFound { .. } => FailureKind::Missing,
        StoreError::AlreadyExists { .. } => FailureKind::Exists,
        StoreError::Precondition { .. } | StoreError::NotModified { .. } => FailureKind::Changed,
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            FailureKind::Denied
        }
        StoreError::NotImplemented { .. } | StoreError::NotSupported { .. } => {
            FailureKind::Unsupported
        }
        _ if is_of_metadata_service(chain) => FailureKind::NoCredentials,
        _ => kind_of_status(chain).unwrap_or_else(|| kind_of_transport(error, chain)),
    }
}

/// Whether a request to the service that hands out credentials failed; its status is not the
/// bucket's.
fn is_of_metadata_service(chain: &str) -> bool {
    let marks = ["169.254.", "security-credentials", "/latest/api/token"];
    marks.iter().any(|mark| chain.contains(mark))
}

/// What the status of a response means; the client tells it in its text alone.
fn kind_of_status(chain: &str) -> Option<FailureKind> {
    if chain.contains("Received redirect without LOCATION") {
        return Some(FailureKind::Addressing);
    }
    let (_, rest) = chain.split_once("status code: ")?;
    let status: u16 = rest.get(..3)?.parse().ok()?;
    Some(match status {
        301..=308 | 400 | 405 => FailureKind::Addressing,
        401 | 403 => FailureKind::Denied,
        404 => FailureKind::Missing,
        416 => FailureKind::OutOfRange,
        408 | 429 | 503 => FailureKind::Throttled,
        501 => FailureKind::Unsupported,
        507 => FailureKind::Full,
        500..=599 => FailureKind::Server,
        _ => FailureKind::Other,
    })
}

fn kind_of_transport(error: &StoreError, chain: &str) -> FailureKind {
    let lower = chain.to_ascii_lowercase();
    let has = |text: &str| lower.contains(text);
    if has("credential") || has("metadata") {
        return FailureKind::NoCredentials;
    }
    if has("dns error") || has("failed to lookup") || has("name or service not known") {
        return FailureKind::Dns;
    }
    if has("certificate") || has("tls") || has("corrupt message") || has("handshake") {
        return FailureKind::Tls;
    }
    let mut next = StdError::source(error);
    while let Some(cause) = next {
        if let Some(http) = cause.downcast_ref::<HttpError>() {
            return match http.kind() {
                HttpErrorKind::Connect => FailureKind::Connect,
                HttpErrorKind::Timeout => FailureKind::Late,
                _ => FailureKind::Broken,
            };
        }
        next = cause.source();
    }
    FailureKind::Other
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_read_from_the_clients_text() {
        for (text, kind) in [
            ("status code: 503 Slow", FailureKind::Throttled),
            ("status code: 429 ", FailureKind::Throttled),
            ("status code: 500 x", FailureKind::Server),
            ("status code: 507 x", FailureKind::Full),
            ("status code: 400 x", FailureKind::Addressing),
            ("status code: 301 x", FailureKind::Addressing),
            ("status code: 416 x", FailureKind::OutOfRange),
        ] {
            assert_eq!(kind_of_status(text), Some(kind), "{text}");
        }
        assert_eq!(kind_of_status("nothing"), None);
    }

    #[test]
    fn what_the_metadata_service_answers_is_not_what_the_bucket_answers() {
        let of = |text: &str| {
            Failure::of(&StoreError::Generic {
                store: "S3",
                source: text.to_owned().into(),
            })
        };
        let metadata = of("GET http://169.254.169.254/latest/meta-data status code: 404 x");
        assert_eq!(metadata.kind, FailureKind::NoCredentials);
        let bucket = of("GET http://host/bucket status code: 404 x");
        assert_eq!(bucket.kind, FailureKind::Missing);
    }

    #[test]
    fn what_a_server_echoes_of_a_signature_is_not_told() {
        let text = shortened("403 <Code>SignatureDoesNotMatch</Code><StringToSign>AWS4 secret");
        assert_eq!(text, "403 <Code>SignatureDoesNotMatch</Code>");
        assert!(shortened(&"x".repeat(1000)).len() < 310);
    }
}
