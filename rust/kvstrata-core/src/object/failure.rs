//! What a failed request means: for the row, for the server's health, and in words.

use core::error::Error as StdError;
use core::fmt;
use std::io;

use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};

use crate::object::credentials::NoCredentials;
use crate::object::refusal::Refusal;
use crate::object::resolver::Unresolved;

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
    /// The request named the bucket where the server does not look for it (redirects, 405, 400
    /// without a code).
    Addressing,
    /// The server does not take the request as it is (other 4xx).
    Rejected,
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
    /// The peer took nothing for so long that the connection was given up.
    Stalled,
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
            Self::Rejected => "rejected",
            Self::ClockSkew => "clock_skew",
            Self::Full => "full",
            Self::Throttled => "throttled",
            Self::Server => "server_error",
            Self::Unsupported => "unsupported",
            Self::Dns => "dns",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Broken => "broken",
            Self::Stalled => "stalled",
            Self::Late => "timeout",
            Self::Other => "other",
        }
    }

    /// Whether another attempt may go better at once.
    #[must_use]
    pub const fn is_worth_a_retry(self) -> bool {
        matches!(
            self,
            Self::Throttled | Self::Server | Self::Connect | Self::Broken | Self::Stalled
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
            Self::Dns => {
                "the host's name cannot be resolved; check endpoint and addressing (proxies are \
                 not used)"
            }
            Self::Connect => {
                "no connection; check endpoint, port and firewall (proxies are not used)"
            }
            Self::Tls => "TLS failed; check the scheme of the endpoint, or give ca_bundle",
            Self::Denied => {
                "the server refuses these credentials; check them, the region and the bucket's \
                 policy: put, get, list and delete are needed"
            }
            Self::NoCredentials => {
                "no credentials; give them by environment, credentials file or role"
            }
            Self::NoBucket => "there is no such bucket (404); create it or correct the URL",
            Self::Addressing => {
                "the server does not find the bucket there; check its name, or try the other \
                 addressing"
            }
            Self::Rejected => "the server does not take the request as it is",
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

    /// What an error of the client means, by the types of what caused it and never by their words.
    #[must_use]
    pub fn of(error: &StoreError) -> Self {
        if let Some(refusal) = find::<Refusal>(error)
            && find::<NoCredentials>(error).is_none()
        {
            return Self::new(refusal.kind(), refusal.to_string());
        }
        let kind = kind_of(error);
        let mut text = chain_of(error);
        if kind == FailureKind::Connect && held_kind(error) == Some(io::ErrorKind::TimedOut) {
            text = format!("no connection in time: {text}");
        }
        Self::new(kind, shortened(&text))
    }
}

/// An error and all that caused it, without what the former says already.
pub(super) fn chain_of(error: &dyn StdError) -> String {
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

/// A text as one line without what a terminal would obey: servers' words are in it.
pub(super) fn one_line(text: &str) -> String {
    let parts = text.split(|c: char| c.is_whitespace() || c.is_control());
    let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// One line of bounded length.
fn shortened(chain: &str) -> String {
    let line = one_line(chain);
    match line.char_indices().nth(TEXT_MAX) {
        Some((at, _)) => format!("{}...", line.get(..at).unwrap_or("")),
        None => line,
    }
}

/// The first error of a type among an error and all that caused it.
fn find<T: StdError + 'static>(error: &StoreError) -> Option<&T> {
    find_in(error)
}

/// The kind of the first error of the system among an error and all that caused it.
pub(super) fn held_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    find_in::<io::Error>(error).map(io::Error::kind)
}

/// The first error of a type among an error and all that caused it.
pub(super) fn find_in<'a, T>(error: &'a (dyn StdError + 'static)) -> Option<&'a T>
where
    T: StdError + 'static,
{
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(found) = cause.downcast_ref() {
            return Some(found);
        }
        // What an error of the system holds is not among its causes; it may hold another.
        let held = cause.downcast_ref::<io::Error>();
        next = match held.and_then(io::Error::get_ref) {
            Some(held) => Some(held),
            None => cause.source(),
        };
    }
    None
}

fn kind_of(error: &StoreError) -> FailureKind {
    match error {
        StoreError::NotFound { .. } => return FailureKind::Missing,
        StoreError::AlreadyExists { .. } => return FailureKind::Exists,
        StoreError::Precondition { .. } | StoreError::NotModified { .. } => {
            return FailureKind::Changed;
        }
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            return FailureKind::Denied;
        }
        StoreError::NotImplemented { .. } | StoreError::NotSupported { .. } => {
            return FailureKind::Unsupported;
        }
        _ => {}
    }
    if find::<NoCredentials>(error).is_some() {
        return FailureKind::NoCredentials;
    }
    if find::<Unresolved>(error).is_some() {
        return FailureKind::Dns;
    }
    if find::<rustls::Error>(error).is_some() {
        return FailureKind::Tls;
    }
    match find::<HttpError>(error).map(HttpError::kind) {
        Some(HttpErrorKind::Connect) => FailureKind::Connect,
        // No request has a time of its own: it is the kernel's for a peer that takes nothing.
        Some(HttpErrorKind::Timeout) => FailureKind::Stalled,
        Some(_) => FailureKind::Broken,
        None => FailureKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(source: impl StdError + Send + Sync + 'static) -> FailureKind {
        let source = Box::new(source);
        Failure::of(&StoreError::Generic {
            store: "status code: 503 dns error",
            source,
        })
        .kind
    }

    #[test]
    fn types_decide_and_no_words() {
        let words =
            "denied timeout NoSuchBucket 169.254.1.1 certificate credential status code: 404";
        let http = |kind| HttpError::new(kind, io::Error::other(words));
        assert_eq!(generic(io::Error::other(words)), FailureKind::Other);
        assert_eq!(generic(http(HttpErrorKind::Unknown)), FailureKind::Broken);
        assert_eq!(generic(http(HttpErrorKind::Connect)), FailureKind::Connect);
        assert_eq!(generic(http(HttpErrorKind::Timeout)), FailureKind::Stalled);
        let none = NoCredentials::new(words);
        let none = HttpError::new(HttpErrorKind::Connect, none);
        assert_eq!(generic(none), FailureKind::NoCredentials);
        let tls = rustls::Error::HandshakeNotComplete;
        let tls = io::Error::other(io::Error::other(tls));
        let tls = HttpError::new(HttpErrorKind::Connect, tls);
        assert_eq!(generic(tls), FailureKind::Tls);
    }

    #[test]
    fn texts_are_bounded() {
        assert!(shortened(&"x".repeat(1000)).len() < 310);
        assert_eq!(shortened("a \n b"), "a b");
        assert_eq!(shortened("a\u{1b}[2J\u{9b}b\0"), "a [2J b");
    }
}
