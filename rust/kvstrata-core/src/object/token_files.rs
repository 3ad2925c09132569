//! Tokens in files that stand for credentials: read for each request that needs one, without the
//! newline that files end in. The client would send that, too, or panic at it.

use std::path::{Path, PathBuf};

use hyper::{Method, header};
use object_store::HeaderValue;
use object_store::client::{HttpError, HttpErrorKind, HttpRequest};

use crate::object::NamedFiles;
use crate::object::credentials::NoCredentials;
use crate::object::options::Environment;

/// Variables that name such files.
const WEB_IDENTITY: &str = "AWS_WEB_IDENTITY_TOKEN_FILE";
const CONTAINER: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
const AZURE: &str = "AZURE_FEDERATED_TOKEN_FILE";
/// What the client is given instead of them: it has nothing to send then.
const EMPTY: &str = "/dev/null";
/// Where the client puts what it has read: into a query, or a form.
const PARAMETER: &str = "WebIdentityToken=";
const FIELD: &str = "client_assertion=";
/// Longest token that is read.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// The files that the environment names.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenFiles {
    web_identity: Option<PathBuf>,
    container: Option<PathBuf>,
    azure: Option<PathBuf>,
    files: NamedFiles,
}

impl TokenFiles {
    pub(super) fn of(environment: &Environment, files: &NamedFiles) -> Self {
        let path = |name| environment.get(name).map(PathBuf::from);
        Self {
            web_identity: path(WEB_IDENTITY),
            container: path(CONTAINER),
            azure: path(AZURE),
            files: files.clone(),
        }
    }

    /// The value of a variable as the client is given it.
    pub(super) fn given<'a>(name: &str, value: &'a str) -> &'a str {
        if matches!(name, WEB_IDENTITY | CONTAINER | AZURE) {
            EMPTY
        } else {
            value
        }
    }

    /// Puts the token into a request that asks for credentials.
    ///
    /// # Errors
    /// What is wrong with the file; nothing of what it holds.
    pub(super) async fn put_into(&self, request: &mut HttpRequest) -> Result<(), HttpError> {
        let failed = |text| HttpError::new(HttpErrorKind::Unknown, NoCredentials::new(text));
        let asks = request.uri().query().is_some_and(|query| {
            let mut pairs = query.split('&');
            pairs.any(|pair| pair == PARAMETER)
        });
        if let Some(path) = self.web_identity.as_deref().filter(|_| asks)
            && request.method() == Method::POST
        {
            let token = self.read(path).await.map_err(failed)?;
            let filled = format!("{PARAMETER}{}", encoded(&token));
            let uri = request.uri().to_string().replacen(PARAMETER, &filled, 1);
            *request.uri_mut() = uri
                .parse()
                .map_err(|_| failed(format!("the token in {} fits no URL", path.display())))?;
        }
        let authorization = request.headers().get(header::AUTHORIZATION);
        if let Some(path) = &self.container
            && authorization.is_some_and(HeaderValue::is_empty)
        {
            let token = self.read(path).await.map_err(failed)?;
            let value = HeaderValue::from_str(&token)
                .map_err(|_| failed(format!("the token in {} fits no header", path.display())))?;
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        if let Some(path) = &self.azure
            && request.method() == Method::POST
            && let Some(form) = request.body().as_bytes()
            && let Ok(form) = core::str::from_utf8(form)
            && form.split('&').any(|pair| pair == FIELD)
        {
            let token = self.read(path).await.map_err(failed)?;
            let filled = format!("{FIELD}{}", encoded(&token));
            *request.body_mut() = form.replacen(FIELD, &filled, 1).into();
        }
        Ok(())
    }

    async fn read(&self, path: &Path) -> Result<String, String> {
        let bytes = self.files.read_aside(path, TOKEN_BYTES_MAX).await;
        let shown = path.display();
        let bytes =
            bytes.map_err(|error| format!("the token file {shown} cannot be read: {error}"))?;
        token_of(&bytes, path)
    }
}

/// The token that a file holds.
fn token_of(bytes: &[u8], path: &Path) -> Result<String, String> {
    let shown = path.display();
    let text = core::str::from_utf8(bytes).unwrap_or("\0").trim();
    if text.is_empty() {
        return Err(format!("the token file {shown} is empty"));
    }
    let graphic = |c: char| c.is_ascii_graphic() || c == ' ';
    if !text.chars().all(graphic) {
        return Err(format!(
            "the token file {shown} has a line break, a control or another character within the \
             token that no request may have"
        ));
    }
    Ok(text.to_owned())
}

/// A value as it stands in a query.
fn encoded(value: &str) -> String {
    use core::fmt::Write;
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            text.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;

    fn files(directory: &Path, token: &[u8]) -> TokenFiles {
        let path = directory.join("token");
        #[expect(clippy::disallowed_methods, reason = "a test")]
        std::fs::write(&path, token).unwrap();
        let of = |name: &str| (name.to_owned(), path.display().to_string());
        TokenFiles::of(
            &Environment([of(WEB_IDENTITY), of(CONTAINER), of(AZURE)].into()),
            &NamedFiles::default(),
        )
    }

    /// Tokens are put in on a thread beside.
    fn put_into(files: &TokenFiles, request: &mut HttpRequest) -> Result<(), HttpError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(files.put_into(request))
    }

    fn requests() -> [HttpRequest; 3] {
        let mut identity = HttpRequest::new(HttpRequestBody::empty());
        *identity.method_mut() = Method::POST;
        *identity.uri_mut() = "https://sts/?Action=A&WebIdentityToken=&x=1"
            .parse()
            .unwrap();
        let mut container = HttpRequest::new(HttpRequestBody::empty());
        let headers = container.headers_mut();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static(""));
        let form = "client_assertion_type=a&client_assertion=&x=1".to_owned();
        let mut azure = HttpRequest::new(form.into());
        *azure.method_mut() = Method::POST;
        [identity, container, azure]
    }

    #[test]
    fn a_newline_at_the_end_is_no_part_of_a_token() {
        let directory = tempfile::tempdir().unwrap();
        for token in ["a.b+c", "a.b+c\n", " a.b+c\r\n"] {
            let files = files(directory.path(), token.as_bytes());
            let [mut identity, mut container, mut azure] = requests();
            for request in [&mut identity, &mut container, &mut azure] {
                put_into(&files, request).unwrap();
            }
            let query = identity.uri().query();
            assert_eq!(query, Some("Action=A&WebIdentityToken=a.b%2Bc&x=1"));
            let sent = container.headers().get(header::AUTHORIZATION);
            assert_eq!(sent, Some(&HeaderValue::from_static("a.b+c")));
            let form = azure.body().as_bytes().map(AsRef::as_ref);
            let expected = &b"client_assertion_type=a&client_assertion=a.b%2Bc&x=1"[..];
            assert_eq!(form, Some(expected));
        }
    }

    #[test]
    fn a_file_that_holds_no_token_is_named_and_its_text_is_not() {
        let directory = tempfile::tempdir().unwrap();
        for token in [
            &b"hidden\nhidden"[..],
            b"hidden\x01",
            b"\n",
            b"\xFFhidden",
            b"a\thidden",
        ] {
            let files = files(directory.path(), token);
            for mut request in requests() {
                let error = put_into(&files, &mut request).unwrap_err().to_string();
                assert!(error.contains("the token file "), "{error}");
                assert!(!error.contains("hidden"), "{error}");
            }
        }
    }

    #[test]
    fn other_requests_are_left_alone() {
        let none = TokenFiles::default();
        for mut request in requests() {
            let (uri, headers) = (request.uri().clone(), request.headers().clone());
            put_into(&none, &mut request).unwrap();
            assert_eq!((request.uri(), request.headers()), (&uri, &headers));
        }
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), b"token");
        let mut other = HttpRequest::new(HttpRequestBody::empty());
        put_into(&files, &mut other).unwrap();
        assert!(other.headers().is_empty() && other.uri().query().is_none());
        assert_eq!(TokenFiles::given("AWS_REGION", "x"), "x");
        assert_eq!(TokenFiles::given(CONTAINER, "x"), EMPTY);
    }
}
