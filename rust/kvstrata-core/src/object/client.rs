//! The HTTP client: hyper's, over connections that can be cut.

use core::error::Error;
use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use std::io;

use async_trait::async_trait;
use http_body_util::BodyExt;
use hyper::{HeaderMap, Uri, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::HeaderValue;
use object_store::client::{
    HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls_platform_verifier::Verifier;
use tower_service::Service;

use crate::object::cut::{Cut, Cuttable};
use crate::object::failure::{find_in, held_kind};
use crate::object::resolver::Resolver;
use crate::sys::sync::Arc;

const USER_AGENT: &str = concat!("kvstrata/", env!("CARGO_PKG_VERSION"));
/// Idle connections are given up before common servers close them (20 s and more).
const IDLE_MAX: Duration = Duration::from_secs(15);
/// Idle connections kept: as many as requests may run.
const IDLE_CONNECTIONS_MAX: usize = 64;
const KEEPALIVE: Duration = Duration::from_secs(15);

/// What a client of HTTP is told.
#[derive(Clone, Debug)]
pub(super) struct ClientSettings {
    /// Certificates to trust beside the system's.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    /// Whether connections may do without TLS.
    pub(super) allow_http: bool,
    /// Time for a connection to come about: the host's name and TLS included.
    pub(super) connect_timeout: Duration,
    /// Time without progress after which the kernel gives a connection up.
    pub(super) stall: Duration,
}

type BoxError = Box<dyn Error + Send + Sync>;
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// Connects to a server, without TLS.
#[derive(Clone, Debug)]
struct Dialer(HttpConnector<Resolver>);

impl Service<Uri> for Dialer {
    type Response = Cuttable;
    type Error = BoxError;
    type Future = Connecting<Cuttable>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move { Ok(Cuttable::new(connecting.await?)) })
    }
}

/// Connects to a server, by TLS where the URL says so, or fails in time.
#[derive(Clone)]
struct InTime {
    connector: HttpsConnector<Dialer>,
    limit: Duration,
}

impl Service<Uri> for InTime {
    type Response = MaybeHttpsStream<Cuttable>;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connector.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(self.limit, self.connector.call(uri));
        Box::pin(async move {
            let late = |_| io::Error::from(io::ErrorKind::TimedOut);
            connecting.await.map_err(late)?
        })
    }
}

/// The client.
pub(super) struct Client {
    inner: legacy::Client<InTime, HttpRequestBody>,
}

impl fmt::Debug for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// A client with these settings.
    ///
    /// # Errors
    /// Those of TLS: a certificate that is none.
    pub(super) fn new(settings: ClientSettings) -> Result<Self, rustls::Error> {
        let mut tcp = HttpConnector::new_with_resolver(Resolver);
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE));
        tcp.set_keepalive_interval(Some(KEEPALIVE));
        tcp.set_connect_timeout(Some(settings.connect_timeout));
        tcp.set_tcp_user_timeout(Some(settings.stall));
        let schemes = HttpsConnectorBuilder::new().with_tls_config(tls(settings.certificates)?);
        let protocols = if settings.allow_http {
            schemes.https_or_http()
        } else {
            schemes.https_only()
        };
        let connector = InTime {
            connector: protocols.enable_http1().wrap_connector(Dialer(tcp)),
            limit: settings.connect_timeout,
        };
        let inner = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .build(connector);
        Ok(Self { inner })
    }
}

fn tls(certificates: Vec<CertificateDer<'static>>) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier::new_with_extra_roots(certificates, Arc::clone(&provider))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Ok(config)
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        name_client(request.headers_mut());
        Cut::follow(&mut request);
        let answer = self.inner.request(request).await;
        let answer = answer.map_err(|error| {
            let kind = if error.is_connect() {
                HttpErrorKind::Connect
            } else {
                kind_of(&error)
            };
            HttpError::new(kind, error)
        })?;
        let (parts, body) = answer.into_parts();
        let body = body.map_err(|error| HttpError::new(kind_of(&error), error));
        let body = HttpResponseBody::new(body);
        Ok(HttpResponse::from_parts(parts, body))
    }
}

fn name_client(headers: &mut HeaderMap) {
    headers
        .entry(header::USER_AGENT)
        .or_insert(HeaderValue::from_static(USER_AGENT));
}

/// What went wrong on a connection.
fn kind_of(error: &(dyn Error + 'static)) -> HttpErrorKind {
    if held_kind(error) == Some(io::ErrorKind::TimedOut) {
        return HttpErrorKind::Timeout;
    }
    match find_in::<hyper::Error>(error) {
        Some(error) if error.is_timeout() => HttpErrorKind::Timeout,
        Some(error) if error.is_closed() || error.is_incomplete_message() => HttpErrorKind::Request,
        Some(_) => HttpErrorKind::Interrupted,
        None => HttpErrorKind::Unknown,
    }
}
