//! Answers as clients can take them: of bounded length, for clients make room for as many bytes as
//! an answer says that it has, and the process ends where there is no such room; without odd names;
//! and a refusal as an error of ours, which says what it means.

use async_trait::async_trait;
use futures_util::StreamExt;
use hyper::{HeaderMap, Method, StatusCode, header};
use object_store::HeaderValue;
use object_store::client::{
    HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};

use crate::metrics::Counter;
use crate::object::credentials::NoCredentials;
use crate::object::page::without_odd_names;
use crate::object::refusal::{Asked, Refusal};
use crate::object::token_files::TokenFiles;
use crate::sys::sync::Arc;

/// Most bytes of an error's text that are read; the others are left out.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// Longest page of a listing: a thousand names are a tenth of it.
const LIST_BYTES_MAX: usize = 16 << 20;
/// Longest answer that holds credentials, or says what was done.
const SHORT_BYTES_MAX: usize = 1 << 20;

/// A client whose answers are bounded.
#[derive(Debug)]
pub(super) struct Bounded<Service> {
    pub(super) service: Service,
    /// Whether it asks for credentials alone.
    pub(super) for_credentials: bool,
    pub(super) tokens: TokenFiles,
    /// Names of listings that were left out.
    pub(super) odd_names: Arc<Counter>,
}

impl<Service> Bounded<Service> {
    /// Whether a request is for a page of a listing.
    fn lists(request: &HttpRequest) -> bool {
        let query = request.uri().query().unwrap_or("");
        let lists = |pair: &str| pair == "list-type=2" || pair == "comp=list";
        request.method() == Method::GET && query.split('&').any(lists)
    }

    /// Most bytes of the whole answer to a request, and of one with the first part of an object,
    /// where that alone was asked for. `None`: it is read piece by piece, or not at all.
    fn bounds(&self, request: &HttpRequest) -> (Option<usize>, Option<usize>) {
        let whole = if self.for_credentials || request.method() == Method::POST {
            Some(SHORT_BYTES_MAX)
        } else if Self::lists(request) {
            Some(LIST_BYTES_MAX)
        } else {
            None
        };
        let range = request.headers().get(header::RANGE);
        let part = range.and_then(|range| {
            let last = range.to_str().ok()?.strip_prefix("bytes=0-")?;
            last.parse::<usize>().ok()?.checked_add(1)
        });
        (whole, part.filter(|bytes| *bytes <= SHORT_BYTES_MAX))
    }
}

#[async_trait]
impl<Service: HttpService> HttpService for Bounded<Service> {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answered = self.answer(request).await;
        if !self.for_credentials {
            return answered;
        }
        answered.map_err(|error| HttpError::new(error.kind(), NoCredentials::of(&error)))
    }
}

impl<Service: HttpService> Bounded<Service> {
    async fn answer(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.tokens.put_into(&mut request).await?;
        let (whole, part) = self.bounds(&request);
        let (lists, asked) = (Self::lists(&request), Asked::of(&request));
        let (mut parts, body) = self.service.call(request).await?.into_parts();
        if !parts.status.is_success() {
            let (mut bytes, _) = read(body, ERROR_BYTES_MAX).await.unwrap_or_default();
            bytes.truncate(ERROR_BYTES_MAX);
            let text = String::from_utf8_lossy(&bytes);
            let refusal = Refusal::new(parts.status, &text, asked);
            return Err(HttpError::new(HttpErrorKind::Unknown, refusal));
        }
        let partial = parts.status == StatusCode::PARTIAL_CONTENT;
        let body = if let Some(bytes_max) = part
            && !partial
            && let Some(length) = length_of(&parts.headers)
        {
            // The server knows no ranges, and sends all of it.
            let Some(last) = bytes_max.min(length).checked_sub(1) else {
                let refusal = Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, "", asked);
                return Err(HttpError::new(HttpErrorKind::Unknown, refusal));
            };
            parts.status = StatusCode::PARTIAL_CONTENT;
            set_range(&mut parts.headers, last, length)?;
            let (mut bytes, _) = read(body, last).await?;
            bytes.truncate(last.saturating_add(1));
            bytes.into()
        } else if let Some(bound) = part.filter(|_| partial).or(whole) {
            let (mut bytes, longer) = read(body, bound).await?;
            if longer {
                let text = format!("the answer is longer than {bound} bytes");
                return Err(HttpError::new(
                    HttpErrorKind::Decode,
                    std::io::Error::other(text),
                ));
            }
            if lists && let Some((kept, odd)) = without_odd_names(&bytes) {
                self.odd_names.add(odd);
                bytes = kept;
            }
            bytes.into()
        } else {
            body
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
}

/// The length that an answer says that its body has.
fn length_of(headers: &HeaderMap) -> Option<usize> {
    let length = headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Has an answer say that it is the part up to the byte of this number, of so many.
fn set_range(headers: &mut HeaderMap, last: usize, of: usize) -> Result<(), HttpError> {
    let value = HeaderValue::from_str(&format!("bytes 0-{last}/{of}"));
    let value = value.map_err(|error| HttpError::new(HttpErrorKind::Decode, error))?;
    headers.insert(header::CONTENT_RANGE, value);
    headers.insert(header::CONTENT_LENGTH, last.saturating_add(1).into());
    Ok(())
}

/// The bytes of a body, up to a piece after so many of them; whether there are more than so many.
async fn read(body: HttpResponseBody, bytes_max: usize) -> Result<(Vec<u8>, bool), HttpError> {
    let mut pieces = body.bytes_stream();
    let mut bytes = Vec::new();
    while bytes.len() <= bytes_max
        && let Some(piece) = pieces.next().await
    {
        bytes.extend_from_slice(&piece?);
    }
    let longer = bytes.len() > bytes_max;
    Ok((bytes, longer))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use object_store::client::HttpRequestBody;

    use super::*;

    /// Answers everything alike.
    #[derive(Debug)]
    struct Answering(StatusCode, usize);

    #[async_trait]
    impl HttpService for Answering {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut answer = HttpResponse::new(vec![b'x'; self.1].into());
            *answer.status_mut() = self.0;
            Ok(answer)
        }
    }

    /// The length of an answer's body, or of its text as an error.
    fn length(for_credentials: bool, status: u16, bytes: usize, of: &str) -> Result<usize, usize> {
        let service = Answering(StatusCode::from_u16(status).unwrap(), bytes);
        let bounded = Bounded {
            service,
            for_credentials,
            tokens: TokenFiles::default(),
            odd_names: Arc::default(),
        };
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        if of == "range" {
            let range = HeaderValue::from_static("bytes=0-255");
            request.headers_mut().insert(header::RANGE, range);
        } else {
            *request.uri_mut() = format!("http://host/bucket?{of}").parse().unwrap();
        }
        let answer = bounded.call(request).now_or_never().unwrap();
        let body = answer.map_err(|error| error.to_string().len())?.into_body();
        Ok(body.bytes().now_or_never().unwrap().unwrap().len())
    }

    #[test]
    fn errors_are_cut() {
        for (for_credentials, status) in [(false, 500), (false, 403), (true, 404), (false, 301)] {
            let told = length(for_credentials, status, 1 << 20, "").unwrap_err();
            assert!(told < 400, "{told}");
        }
    }

    #[test]
    fn what_is_read_at_once_is_refused_beyond_its_bound() {
        let page = "prefix=x&list-type=2";
        for (for_credentials, status, of, bytes_max) in [
            (false, 200, page, LIST_BYTES_MAX),
            (false, 200, "comp=list", LIST_BYTES_MAX),
            (false, 206, "range", 256),
            (true, 200, "", SHORT_BYTES_MAX),
        ] {
            let length = |bytes| length(for_credentials, status, bytes, of);
            assert_eq!(length(bytes_max), Ok(bytes_max), "{of}");
            assert!(length(bytes_max + 1).is_err(), "{of}");
        }
    }

    #[test]
    fn objects_are_handed_on_as_they_come() {
        let large = LIST_BYTES_MAX + 1;
        assert_eq!(length(false, 200, large, ""), Ok(large));
    }
}
