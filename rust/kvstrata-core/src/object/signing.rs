//! S3 requests whose bodies are not signed: their checksum is known to whoever makes them.
//!
//! The client would read each body once more for the checksum that the server compares, and sign
//! what it made of it. Here the checksum comes with the request, and it is signed on its way out.

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use object_store::aws::{AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService};
use object_store::{HeaderValue, PutMode, PutOptions};

use crate::format::combined::crc;
use crate::object::client::Client;

const CHECKSUM_HEADER: &str = "x-amz-checksum-crc64nvme";

/// The CRC-64/NVME of a request's body.
#[derive(Clone, Copy, Debug)]
struct BodyChecksum(u64);

/// The options of a PUT whose body has this CRC-64/NVME.
pub(super) fn put_with(mode: PutMode, body_crc: u64) -> PutOptions {
    let mut options = PutOptions {
        mode,
        ..PutOptions::default()
    };
    options.extensions.insert(BodyChecksum(body_crc));
    options
}

/// The options of a PUT of a short body.
pub(crate) fn put_of(mode: PutMode, body: &[u8]) -> PutOptions {
    put_with(mode, crc(body))
}

/// Signs requests and sends them.
#[derive(Debug)]
pub(super) struct SigningClient {
    pub(super) client: Client,
    pub(super) credentials: AwsCredentialProvider,
    pub(super) region: String,
}

#[async_trait]
impl HttpService for SigningClient {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let failed = |error| HttpError::new(HttpErrorKind::Unknown, error);
        if let Some(BodyChecksum(sum)) = request.extensions_mut().remove() {
            let value = HeaderValue::from_str(&BASE64_STANDARD.encode(sum.to_be_bytes()));
            let value = value.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
            request.headers_mut().insert(CHECKSUM_HEADER, value);
        }
        let credential = self.credentials.get_credential().await.map_err(failed)?;
        AwsAuthorizer::new(&credential, "s3", &self.region)
            .with_sign_payload(false)
            .try_authorize(&mut request, None)
            .map_err(failed)?;
        self.client.call(request).await
    }
}
