//! Makes the client of a bucket from options: explicit where `object_store` has defaults.

use core::str::FromStr;
use core::time::Duration;

use object_store::aws::{
    AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider, Checksum, S3ConditionalPut,
};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, RetryConfig};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::config::shown;
use crate::error::{Error, Result};
use crate::metrics::Counter;
use crate::object::connector::Connector;
use crate::object::credentials::{CheckedCredentials, FileCredentials};
use crate::object::google_file::GoogleFile;
use crate::object::options::ObjectOptions;
use crate::object::token_files::TokenFiles;
use crate::object::{Scheme, Store, memory_store};
use crate::sys::clock::Clock;
use crate::sys::sync::Arc;

/// Longest file of certificates that is read.
const BUNDLE_BYTES_MAX: u64 = 4 << 20;

/// The region of servers that know none.
const REGION: &str = "us-east-1";

/// Variables that say where AWS credentials are. All others, endpoints among them, are options.
const AWS_VARIABLES: [&str; 13] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_METADATA_ENDPOINT",
];

/// Where the bucket's name is put, decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// In the path.
    Path,
    /// In the host's name.
    Virtual,
}

impl Style {
    /// The word of the option.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Virtual => "virtual",
        }
    }
}

/// A client of the bucket, which adds the names that its listings leave out to `odd_names`. No
/// request is made yet; files are read, which may take a moment.
///
/// # Errors
/// [`crate::error::ErrorKind::Config`] naming the option.
pub fn connect(
    options: &ObjectOptions,
    style: Style,
    clock: &Arc<dyn Clock>,
    odd_names: &Arc<Counter>,
) -> Result<Store> {
    if options.location.scheme == Scheme::Memory {
        return Ok(memory_store());
    }
    let connector = connector(options, odd_names)?;
    match options.location.scheme {
        Scheme::S3 => s3(options, style, clock, &connector),
        Scheme::Gcs => gcs(options, connector),
        Scheme::Azure | Scheme::Memory => azure(options, connector),
    }
}

/// Requests are tried again by us, who know budgets and deadlines.
fn no_retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 0,
        retry_timeout: Duration::ZERO,
    }
}

fn connector(options: &ObjectOptions, odd_names: &Arc<Counter>) -> Result<Connector> {
    let mut certificates = Vec::new();
    if let Some(path) = &options.ca_bundle {
        let wrong = |why: String| Error::config(format!("ca_bundle: {}: {why}", path.display()));
        let pem = options.files.read(path, BUNDLE_BYTES_MAX);
        let pem = pem.map_err(|error| wrong(error.to_string()))?;
        certificates = CertificateDer::pem_slice_iter(&pem)
            .collect::<core::result::Result<Vec<_>, _>>()
            .map_err(|error| wrong(error.to_string()))?;
        if certificates.is_empty() {
            return Err(wrong("holds no certificate".to_owned()));
        }
    }
    let tokens = TokenFiles::of(&options.environment, &options.files);
    let deadline = options.deadline;
    Ok(Connector::new(certificates, deadline, tokens, odd_names))
}

fn s3(
    options: &ObjectOptions,
    style: Style,
    clock: &Arc<dyn Clock>,
    connector: &Connector,
) -> Result<Store> {
    let mut builder = AmazonS3Builder::new();
    for name in AWS_VARIABLES {
        let key = AmazonS3ConfigKey::from_str(&name.to_ascii_lowercase());
        if let (Some(value), Ok(key)) = (options.environment.get(name), key) {
            builder = builder.with_config(key, TokenFiles::given(name, value));
        }
    }
    let given = |name: &str| options.environment.get(name).is_some();
    let (key, secret) = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY");
    for (one, other) in [(key, secret), (secret, key)] {
        if given(one) && !given(other) {
            return Err(Error::config(format!(
                "credentials: {one} is set in the environment and {other} is not"
            )));
        }
    }
    if !given(key)
        && !given("AWS_WEB_IDENTITY_TOKEN_FILE")
        && let Some(file) = FileCredentials::find(options, Arc::clone(clock))
    {
        builder = builder.with_credentials(Arc::new(file));
    }
    if let Some(region) = options.region() {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &options.endpoint {
        let url = match style {
            Style::Path => endpoint.clone(),
            Style::Virtual => with_bucket_in_host(endpoint, &options.location.bucket),
        };
        check_url(&url)?;
        builder = builder.with_endpoint(url);
    }
    builder = builder
        .with_bucket_name(&options.location.bucket)
        .with_virtual_hosted_style_request(style == Style::Virtual)
        .with_allow_http(options.allow_http)
        .with_client_options(Connector::options(options.allow_http))
        .with_http_connector(connector.clone())
        .with_retry(no_retries())
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_disable_tagging(true)
        // One request for each object: servers that do not know the other are common.
        .with_disable_bulk_delete(true);
    let build = |builder: AmazonS3Builder| builder.build().map_err(|error| wrong(options, &error));
    let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
    let credentials = Arc::clone(build(builder.clone())?.credentials());
    let credentials: AwsCredentialProvider = Arc::new(CheckedCredentials(credentials));
    builder = builder.with_credentials(Arc::clone(&credentials));
    if !options.is_private_path() {
        // Bodies are hashed and signed, which costs more than all the rest.
        let checked = builder.with_checksum_algorithm(Checksum::CRC64NVME);
        return Ok(Arc::new(build(checked)?));
    }
    let region = region.unwrap_or_else(|| REGION.to_owned());
    let signing = connector.clone().signing(credentials, region);
    let store = build(
        builder
            .with_http_connector(signing)
            .with_skip_signature(true),
    )?;
    Ok(Arc::new(store))
}

fn gcs(options: &ObjectOptions, connector: Connector) -> Result<Store> {
    if options.endpoint.is_some() {
        return Err(Error::config("endpoint: not for gs://"));
    }
    let mut builder = GoogleCloudStorageBuilder::new();
    for name in options.environment.0.keys() {
        if let Ok(key) = GoogleConfigKey::from_str(&name.to_ascii_lowercase())
            && name.starts_with("GOOGLE_")
            && let Some(value) = options.environment.get(name)
        {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(file) = GoogleFile::of(&builder, &options.environment) {
        file.check(&options.files)?;
    }
    let store = builder
        .with_bucket_name(&options.location.bucket)
        .with_client_options(Connector::options(false))
        .with_http_connector(connector)
        .with_retry(no_retries())
        .build()
        .map_err(|error| wrong(options, &error))?;
    Ok(Arc::new(store))
}

fn azure(options: &ObjectOptions, connector: Connector) -> Result<Store> {
    let mut builder = MicrosoftAzureBuilder::new();
    for name in options.environment.0.keys() {
        if let Ok(key) = AzureConfigKey::from_str(&name.to_ascii_lowercase())
            && name.starts_with("AZURE_")
            && let Some(value) = options.environment.get(name)
        {
            builder = builder.with_config(key, TokenFiles::given(name, value));
        }
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    let has_account = builder
        .get_config_value(&AzureConfigKey::AccountName)
        .is_some();
    let store = builder
        .with_container_name(&options.location.bucket)
        .with_allow_http(options.allow_http)
        .with_client_options(Connector::options(options.allow_http))
        .with_http_connector(connector)
        .with_retry(no_retries())
        .build()
        .map_err(|error| {
            if has_account {
                wrong(options, &error)
            } else {
                Error::config(format!(
                    "url: {}: AZURE_STORAGE_ACCOUNT_NAME is not set; it names the storage account",
                    options.location
                ))
            }
        })?;
    Ok(Arc::new(store))
}

fn wrong(options: &ObjectOptions, error: &object_store::Error) -> Error {
    Error::config(format!("url: {}: {error}", options.location))
}

/// Refuses what is no URL, a bucket before an address in numbers among it: the client would panic.
fn check_url(url: &str) -> Result<()> {
    match url::Url::parse(url) {
        Ok(parsed) if parsed.has_host() => Ok(()),
        _ => Err(Error::config(format!(
            "endpoint: {:?} is no URL of a host (addressing=\"virtual\" needs a name, not an \
             address)",
            shown(url)
        ))),
    }
}

/// `https://host:port` as `https://bucket.host:port`.
fn with_bucket_in_host(endpoint: &str, bucket: &str) -> String {
    match endpoint.split_once("://") {
        Some((scheme, rest)) => format!("{scheme}://{bucket}.{rest}"),
        None => endpoint.to_owned(),
    }
}
