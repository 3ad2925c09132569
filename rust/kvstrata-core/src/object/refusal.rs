//! What a server answered instead of what was asked: its status, and the code in its text. URLs and
//! names are not looked at: they may hold any word.

use core::fmt;

use hyper::{Method, StatusCode, header};
use object_store::client::HttpRequest;

use crate::object::FailureKind;
use crate::object::failure::one_line;

/// Most characters of a server's own words that are kept.
const MESSAGE_MAX: usize = 200;
/// Longest code.
const CODE_MAX: usize = 64;

/// Codes of S3, of what speaks like it, and of Azure, that say more than their status.
const CODES: [(FailureKind, &[&str]); 9] = [
    (
        FailureKind::ClockSkew,
        &["RequestTimeTooSkewed", "RequestExpired"],
    ),
    (
        FailureKind::NoBucket,
        &["NoSuchBucket", "ContainerNotFound"],
    ),
    (
        FailureKind::Full,
        &[
            "QuotaExceeded",
            "QuotaExceededException",
            "BucketQuotaExceeded",
            "XMinioStorageFull",
            "XMinioAdminBucketQuotaExceeded",
            "NotEnoughSpace",
            "InsufficientStorage",
        ],
    ),
    (
        FailureKind::Denied,
        &[
            "AccessDenied",
            "AllAccessDisabled",
            "AuthenticationFailed",
            "AuthorizationFailure",
            "AuthorizationHeaderMalformed",
            "AuthorizationPermissionMismatch",
            "ExpiredToken",
            "InvalidAccessKeyId",
            "InvalidSecurity",
            "InvalidToken",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
        ],
    ),
    (
        FailureKind::Throttled,
        &[
            "SlowDown",
            "ServiceUnavailable",
            "ServerBusy",
            "RequestLimitExceeded",
            "Throttling",
            "ThrottlingException",
            "TooManyRequests",
            "BandwidthLimitExceeded",
        ],
    ),
    (FailureKind::Server, &["InternalError", "OperationTimedOut"]),
    (
        FailureKind::Broken,
        &[
            "RequestTimeout",
            "IncompleteBody",
            "BadDigest",
            "Md5Mismatch",
            "XAmzContentChecksumMismatch",
            "XAmzContentSHA256Mismatch",
        ],
    ),
    (FailureKind::Unsupported, &["NotImplemented"]),
    (
        FailureKind::Addressing,
        &[
            "IncorrectEndpoint",
            "InvalidBucketName",
            "InvalidHostHeader",
            "InvalidURI",
            "PermanentRedirect",
            "TemporaryRedirect",
        ],
    ),
];

/// What a request made its success depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Nothing,
    /// That there is no such object.
    Absent,
    /// That there is one of this `ETag`.
    Same,
}

/// An answer that is no success.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    code: Option<String>,
    message: String,
    request: Asked,
}

/// What of a request has to be known when it is refused.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    method: Method,
    /// Scheme, host and path: queries may hold secrets.
    url: String,
    condition: Condition,
}

impl Asked {
    pub(super) fn of(request: &HttpRequest) -> Self {
        let uri = request.uri();
        let scheme = uri.scheme_str().unwrap_or("");
        // Without a user's name and password.
        let host = uri.authority().map_or("", |host| host.as_str());
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        let headers = request.headers();
        let has = |name: &str, value: &str| {
            headers.get(name).map(header::HeaderValue::as_bytes) == Some(value.as_bytes())
        };
        let condition = if has("if-none-match", "*") || has("x-goog-if-generation-match", "0") {
            Condition::Absent
        } else if headers.contains_key(header::IF_MATCH) {
            Condition::Same
        } else {
            Condition::Nothing
        };
        Self {
            method: request.method().clone(),
            url: format!("{scheme}://{host}{}", uri.path()),
            condition,
        }
    }
}

impl Refusal {
    /// The answer of this status with this text to a request.
    pub(super) fn new(status: StatusCode, body: &str, request: Asked) -> Self {
        let word = |code: &String| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            code.len() <= CODE_MAX && code.chars().all(plain)
        };
        let code = element(body, "Code").filter(word);
        let message = match element(body, "Message") {
            Some(message) => message,
            // A page of a proxy, or whatever has no code; what echoes a request is not told.
            None if code.is_none() && !body.contains('<') => body.to_owned(),
            None => String::new(),
        };
        let message = Some(message).filter(|message| !echoes(message));
        Self {
            status,
            code,
            message: one_line(&message.unwrap_or_default())
                .chars()
                .take(MESSAGE_MAX)
                .collect(),
            request,
        }
    }

    /// What it means.
    pub(super) fn kind(&self) -> FailureKind {
        let of_code = self.code.as_deref().and_then(|code| {
            let mut all = CODES.iter();
            let found = all.find(|(_, codes)| codes.contains(&code));
            found.map(|(kind, _)| *kind)
        });
        of_code.unwrap_or_else(|| match self.status.as_u16() {
            301..=303 | 305..=308 | 405 => FailureKind::Addressing,
            // What is no object store, or one that takes the path for a bucket's name, has no code.
            // Answers to HEAD never have one.
            400 if self.code.is_none() && self.request.method != Method::HEAD => {
                FailureKind::Addressing
            }
            401 | 403 => FailureKind::Denied,
            404 if self.request.condition == Condition::Same => FailureKind::Changed,
            404 => FailureKind::Missing,
            409 => FailureKind::Exists,
            304 | 412 if self.request.condition == Condition::Absent => FailureKind::Exists,
            304 | 412 => FailureKind::Changed,
            408 | 429 | 503 => FailureKind::Throttled,
            416 => FailureKind::OutOfRange,
            501 => FailureKind::Unsupported,
            507 => FailureKind::Full,
            500..=599 => FailureKind::Server,
            _ => FailureKind::Rejected,
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.status)?;
        if let Some(code) = &self.code {
            write!(formatter, " {code}")?;
        }
        if !self.message.is_empty() {
            write!(formatter, ": {}", self.message)?;
        }
        let Asked { method, url, .. } = &self.request;
        write!(formatter, " ({method} {url})")
    }
}

impl core::error::Error for Refusal {}

/// Whether a server's words repeat headers of the request, of which some are secret.
fn echoes(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    let headers = ["authorization", "x-amz-", "x-ms-", "x-goog-", "bearer "];
    headers.iter().any(|header| message.contains(header))
}

/// The text of the first element of this name.
fn element(body: &str, name: &str) -> Option<String> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use object_store::HeaderValue;
    use object_store::client::HttpRequestBody;

    use super::*;

    fn asked(condition: Option<(&'static str, &'static str)>) -> Asked {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = "http://denied.timeout/SlowDown/NoSuchBucket?secret"
            .parse()
            .unwrap();
        if let Some((name, value)) = condition {
            let value = HeaderValue::from_static(value);
            request.headers_mut().insert(name, value);
        }
        Asked::of(&request)
    }

    fn kind(
        status: u16,
        code: &str,
        condition: Option<(&'static str, &'static str)>,
    ) -> FailureKind {
        let body = if code.is_empty() {
            String::new()
        } else {
            format!("<Error><Code>{code}</Code><Message>of AccessDenied</Message></Error>")
        };
        let status = StatusCode::from_u16(status).unwrap();
        Refusal::new(status, &body, asked(condition)).kind()
    }

    #[test]
    fn the_status_and_the_code_decide_and_no_other_word() {
        for (status, code, expected) in [
            (503, "", FailureKind::Throttled),
            (503, "Faulty", FailureKind::Throttled),
            (429, "", FailureKind::Throttled),
            (500, "InternalError", FailureKind::Server),
            (500, "SlowDown", FailureKind::Throttled),
            (507, "", FailureKind::Full),
            (403, "QuotaExceeded", FailureKind::Full),
            (400, "", FailureKind::Addressing),
            (400, "InvalidBucketName", FailureKind::Addressing),
            (400, "InvalidRequest", FailureKind::Rejected),
            (400, "ExpiredToken", FailureKind::Denied),
            (400, "AuthorizationHeaderMalformed", FailureKind::Denied),
            (400, "RequestTimeout", FailureKind::Broken),
            (400, "BadDigest", FailureKind::Broken),
            (301, "", FailureKind::Addressing),
            (405, "MethodNotAllowed", FailureKind::Addressing),
            (403, "RequestTimeTooSkewed", FailureKind::ClockSkew),
            (403, "", FailureKind::Denied),
            (404, "NoSuchKey", FailureKind::Missing),
            (404, "NoSuchBucket", FailureKind::NoBucket),
            (416, "InvalidRange", FailureKind::OutOfRange),
            (501, "", FailureKind::Unsupported),
            (418, "", FailureKind::Rejected),
        ] {
            assert_eq!(kind(status, code, None), expected, "{status} {code}");
        }
    }

    #[test]
    fn what_a_condition_was_for_decides_what_its_failure_means() {
        let create = Some(("if-none-match", "*"));
        let generation = Some(("x-goog-if-generation-match", "0"));
        let same = Some(("if-match", "\"tag\""));
        for (status, condition, expected) in [
            (412, create, FailureKind::Exists),
            (412, generation, FailureKind::Exists),
            (409, create, FailureKind::Exists),
            (412, same, FailureKind::Changed),
            (404, same, FailureKind::Changed),
            (404, create, FailureKind::Missing),
            (412, None, FailureKind::Changed),
        ] {
            assert_eq!(kind(status, "", condition), expected, "{status}");
        }
    }

    #[test]
    fn it_is_told_in_a_line_without_what_is_secret() {
        let body = "<Error><Code>SignatureDoesNotMatch</Code><Message>It\n differs</Message>\
                    <StringToSign>AWS4 hidden</StringToSign></Error>";
        let told = Refusal::new(StatusCode::FORBIDDEN, body, asked(None)).to_string();
        assert_eq!(
            told,
            "403 Forbidden SignatureDoesNotMatch: It differs (GET http://denied.timeout/SlowDown/\
             NoSuchBucket)"
        );
        let page = Refusal::new(
            StatusCode::BAD_GATEWAY,
            &"<p>hidden".repeat(99),
            asked(None),
        );
        assert!(!page.to_string().contains("hidden"), "{page}");
        let plain = Refusal::new(StatusCode::BAD_GATEWAY, &"no ".repeat(999), asked(None));
        assert!(plain.to_string().len() < 300, "{plain}");
        for echo in [
            "{\"X-Amz-Security-Token\": \"hidden\"}",
            "<Message>Authorization: hidden</Message>",
        ] {
            let echo = Refusal::new(StatusCode::BAD_REQUEST, echo, asked(None));
            assert!(!echo.to_string().contains("hidden"), "{echo}");
        }
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = "http://user:hidden@host:1/path".parse().unwrap();
        let asked = Asked::of(&request);
        assert_eq!(asked.url, "http://host:1/path");
    }

    #[test]
    fn a_servers_words_neither_end_the_line_nor_reach_a_terminal() {
        let body = "<Code>A\nERROR b</Code><Message>a\u{1b}[2J\r\nb\u{9b}</Message>";
        let told = Refusal::new(StatusCode::CONFLICT, body, asked(None)).to_string();
        assert!(!told.chars().any(char::is_control), "{told}");
        assert!(told.starts_with("409 Conflict: a [2J b ("), "{told}");
    }

    #[test]
    fn a_400_without_a_code_says_where_the_bucket_is_not_unless_no_answer_has_one() {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = Method::HEAD;
        let head = Refusal::new(StatusCode::BAD_REQUEST, "", Asked::of(&request));
        assert_eq!(head.kind(), FailureKind::Rejected);
        assert_eq!(kind(400, "", None), FailureKind::Addressing);
    }
}
