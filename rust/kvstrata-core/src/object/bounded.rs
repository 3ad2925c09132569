//! Answers of bounded length: clients make room for as many bytes as an answer says that it has,
//! and the process ends where there is no such room.

use async_trait::async_trait;
use futures_util::StreamExt;
use object_store::client::{
    HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use reqwest::{Method, StatusCode, header};

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
}

impl<Service> Bounded<Service> {
    /// Most bytes of the whole answer to a request, and of one with the part of an object that was
    /// asked for. `None`: it is read piece by piece, or not at all.
    fn bounds(&self, request: &HttpRequest) -> (Option<usize>, Option<usize>) {
        let query = request.uri().query().unwrap_or("");
        let lists = |pair: &str| pair == "list-type=2" || pair == "comp=list";
        let whole = if self.for_credentials || request.method() == Method::POST {
            Some(SHORT_BYTES_MAX)
        } else if request.method() == Method::GET && query.split('&').any(lists) {
            Some(LIST_BYTES_MAX)
        } else {
            None
        };
        let range = request.headers().get(header::RANGE);
        let part = range.and_then(|range| {
            let (from, to) = range
                .to_str()
                .ok()?
                .strip_prefix("bytes=")?
                .split_once('-')?;
            let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
            to.checked_sub(from)?.checked_add(1)
        });
        (whole, part.filter(|bytes| *bytes <= SHORT_BYTES_MAX))
    }
}

#[async_trait]
impl<Service: HttpService> HttpService for Bounded<Service> {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (whole, part) = self.bounds(&request);
        let (parts, body) = self.service.call(request).await?.into_parts();
        let partial = parts.status == StatusCode::PARTIAL_CONTENT;
        let bound = part.filter(|_| partial).or(whole);
        let body = if parts.status.is_client_error() || parts.status.is_server_error() {
            let (mut bytes, _) = read(body, ERROR_BYTES_MAX).await?;
            bytes.truncate(ERROR_BYTES_MAX);
            String::from_utf8_lossy(&bytes).into_owned().into()
        } else if !parts.status.is_success() {
            String::new().into()
        } else if let Some(bound) = bound {
            let (bytes, longer) = read(body, bound).await?;
            if longer {
                let text = format!("the answer is longer than {bound} bytes");
                return Err(HttpError::new(
                    HttpErrorKind::Decode,
                    std::io::Error::other(text),
                ));
            }
            bytes.into()
        } else {
            body
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
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
    use object_store::HeaderValue;
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

    /// The length of an answer's body; `None` where it is refused.
    fn length(for_credentials: bool, status: u16, bytes: usize, of: &str) -> Option<usize> {
        let service = Answering(StatusCode::from_u16(status).unwrap(), bytes);
        let bounded = Bounded {
            service,
            for_credentials,
        };
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        if of == "range" {
            let range = HeaderValue::from_static("bytes=0-255");
            request.headers_mut().insert(header::RANGE, range);
        } else {
            *request.uri_mut() = format!("http://host/bucket?{of}").parse().unwrap();
        }
        let answer = bounded.call(request).now_or_never().unwrap();
        let body = answer.ok()?.into_body().bytes().now_or_never().unwrap();
        Some(body.unwrap().len())
    }

    #[test]
    fn errors_are_cut() {
        assert_eq!(length(false, 500, 10, ""), Some(10));
        assert_eq!(length(false, 403, 1 << 20, ""), Some(ERROR_BYTES_MAX));
        assert_eq!(length(true, 404, 1 << 20, ""), Some(ERROR_BYTES_MAX));
        assert_eq!(length(false, 301, 1 << 20, ""), Some(0));
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
            assert_eq!(length(bytes_max), Some(bytes_max), "{of}");
            assert_eq!(length(bytes_max + 1), None, "{of}");
        }
    }

    #[test]
    fn objects_are_handed_on_as_they_come() {
        let large = LIST_BYTES_MAX + 1;
        assert_eq!(length(false, 200, large, ""), Some(large));
    }
}
