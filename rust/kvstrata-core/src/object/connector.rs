//! The HTTP client below every request, with each setting that matters given by name.

use core::time::Duration;

use object_store::ClientOptions;
use object_store::aws::AwsCredentialProvider;
use object_store::client::{ClientConfigKey, HttpClient, HttpConnector, HttpService};
use rustls::pki_types::CertificateDer;

use crate::metrics::Counter;
use crate::object::bounded::Bounded;
use crate::object::client::{Client, ClientSettings};
use crate::object::signing::SigningClient;
use crate::object::token_files::TokenFiles;
use crate::sys::sync::Arc;

/// Time to connect to the bucket's server.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time to connect to a service that hands out credentials: it is near or not there.
const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time without progress after which a connection is given up.
const STALL_MIN: Duration = Duration::from_millis(100);

/// Makes HTTP clients.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    certificates: Vec<CertificateDer<'static>>,
    stall: Duration,
    tokens: TokenFiles,
    /// Names of listings that were left out.
    odd_names: Arc<Counter>,
    /// Whose credentials sign requests, for which region; `None`: the client signs them itself.
    signer: Option<(AwsCredentialProvider, String)>,
}

impl Connector {
    /// Clients that trust `certificates` beside the system's, for operations that may take
    /// `deadline`. A connection whose peer takes nothing for a tenth of that is closed by the
    /// kernel: an operation's slot is free soon after its deadline, whatever the peer does. That is
    /// [`FailureKind::Stalled`](crate::object::FailureKind::Stalled), and tried again.
    pub(super) fn new(
        certificates: Vec<CertificateDer<'static>>,
        deadline: Duration,
        tokens: TokenFiles,
        odd_names: &Arc<Counter>,
    ) -> Self {
        Self {
            certificates,
            stall: deadline.checked_div(10).unwrap_or(deadline).max(STALL_MIN),
            tokens,
            odd_names: Arc::clone(odd_names),
            signer: None,
        }
    }

    /// The same, whose clients sign requests.
    pub(super) fn signing(self, credentials: AwsCredentialProvider, region: String) -> Self {
        Self {
            signer: Some((credentials, region)),
            ..self
        }
    }

    fn bounded(&self, service: impl HttpService, for_credentials: bool) -> HttpClient {
        HttpClient::new(Bounded {
            service,
            for_credentials,
            tokens: self.tokens.clone(),
            odd_names: Arc::clone(&self.odd_names),
        })
    }

    /// The options that the clients of `object_store` are given: those that it looks at itself.
    pub(super) fn options(allow_http: bool) -> ClientOptions {
        ClientOptions::new()
            .with_allow_http(allow_http)
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout_disabled()
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // Clients of metadata services differ from the others by this alone.
        let own = Self::options(true).get_config_value(&ClientConfigKey::ConnectTimeout);
        let asked = options.get_config_value(&ClientConfigKey::ConnectTimeout);
        let plain = options.get_config_value(&ClientConfigKey::AllowHttp);
        let connect_timeout = if asked == own {
            CONNECT_TIMEOUT
        } else {
            METADATA_CONNECT_TIMEOUT
        };
        let settings = ClientSettings {
            certificates: self.certificates.clone(),
            allow_http: plain.as_deref() == Some("true"),
            connect_timeout,
            stall: self.stall,
        };
        let client = Client::new(settings).map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(error),
        })?;
        Ok(match &self.signer {
            None => self.bounded(client, asked != own),
            Some((credentials, region)) => {
                let signing = SigningClient {
                    client,
                    credentials: Arc::clone(credentials),
                    region: region.clone(),
                };
                self.bounded(signing, asked != own)
            }
        })
    }
}
