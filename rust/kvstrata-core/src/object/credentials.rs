//! Credentials from the file that AWS's own tools share.

use core::error::Error;
use core::fmt;
use core::time::Duration;
use std::path::PathBuf;

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::{AwsCredential, AwsCredentialProvider};

use crate::config::shown;
use crate::object::Scheme;
use crate::object::failure::chain_of;
use crate::object::options::Environment;
use crate::sys::clock::{Clock, SystemClock};
use crate::sys::fs::read_small;
use crate::sys::sync::{Arc, Mutex, lock};

/// How long what was read is believed: rotated keys are used after it.
const BELIEVED_FOR: Duration = Duration::from_mins(1);
/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads one profile of a credentials file, again every minute.
pub(super) struct FileCredentials {
    path: PathBuf,
    profile: String,
    clock: Arc<dyn Clock>,
    last: Mutex<Option<(std::time::Instant, Arc<AwsCredential>)>>,
}

impl fmt::Debug for FileCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "FileCredentials({})", self.path.display())
    }
}

impl FileCredentials {
    /// The file that the environment names, or the usual one, when it has the profile.
    pub(super) fn find(environment: &Environment, clock: Arc<dyn Clock>) -> Option<Self> {
        let found = Self::of(environment, clock)?;
        found.read().ok().map(|_| found)
    }

    /// The file that the environment names, or the usual one, as yet unread.
    fn of(environment: &Environment, clock: Arc<dyn Clock>) -> Option<Self> {
        let path = match environment.get("AWS_SHARED_CREDENTIALS_FILE") {
            Some(path) => PathBuf::from(path),
            None => PathBuf::from(environment.get("HOME")?).join(".aws/credentials"),
        };
        Some(Self {
            path,
            profile: environment
                .get("AWS_PROFILE")
                .unwrap_or("default")
                .to_owned(),
            clock,
            last: Mutex::default(),
        })
    }

    fn read(&self) -> Result<AwsCredential, String> {
        let shown = self.path.display();
        let bytes = read_small(&self.path, FILE_BYTES_MAX)
            .map_err(|error| format!("the credentials file {shown} cannot be read: {error}"))?;
        let text = String::from_utf8_lossy(&bytes);
        parse(&text, &self.profile).ok_or_else(|| {
            let profile = &self.profile;
            format!("the credentials file {shown} has no keys of the profile {profile:?}")
        })
    }
}

/// There are no credentials, whatever the reason.
#[derive(Debug)]
pub(super) struct NoCredentials(String);

impl NoCredentials {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Those that could not be had because of an error.
    pub(super) fn of(error: &dyn Error) -> Self {
        Self(chain_of(error))
    }
}

impl fmt::Display for NoCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for NoCredentials {}

/// Credentials that can stand in a request, or an error that says that there are none.
#[derive(Debug)]
pub(super) struct CheckedCredentials(pub(super) AwsCredentialProvider);

#[async_trait]
impl CredentialProvider for CheckedCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let failed = |none: NoCredentials| object_store::Error::Generic {
            store: "credentials",
            source: Box::new(none),
        };
        let found = self.0.get_credential().await;
        let found = found.map_err(|error| failed(NoCredentials::of(&error)))?;
        // The client would panic at what cannot stand in a header.
        let sound = |value: &str| value.chars().all(|c| c.is_ascii_graphic());
        if sound(&found.key_id) && found.token.as_deref().is_none_or(sound) {
            return Ok(found);
        }
        let text = "the credentials have a character that no header of a request may have";
        Err(failed(NoCredentials::new(text)))
    }
}

/// Where credentials were looked for, and why there are none, for an operator who has to give some.
pub(super) fn places(scheme: Scheme, environment: &Environment) -> String {
    match scheme {
        Scheme::S3 => places_of_s3(environment),
        Scheme::Gcs => "looked for in the environment (GOOGLE_SERVICE_ACCOUNT_PATH, \
            GOOGLE_SERVICE_ACCOUNT_KEY, GOOGLE_APPLICATION_CREDENTIALS), the application default \
            credentials of gcloud, and the instance's metadata service"
            .to_owned(),
        Scheme::Azure => "looked for in the environment (AZURE_STORAGE_ACCOUNT_NAME with \
            AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID or \
            AZURE_FEDERATED_TOKEN_FILE), and the instance's managed identity"
            .to_owned(),
        Scheme::Memory => String::new(),
    }
}

fn places_of_s3(environment: &Environment) -> String {
    let state = |names: [&str; 2]| match names.map(|name| environment.get(name).is_some()) {
        [true, true] => "set".to_owned(),
        [false, false] => "not set".to_owned(),
        [first, _] => {
            let [a, b] = names;
            format!("{} is not set", if first { b } else { a })
        }
    };
    let file = match FileCredentials::of(environment, Arc::new(SystemClock)) {
        Some(file) => match file.read() {
            Ok(_) => format!("the credentials file {} (has keys)", file.path.display()),
            Err(why) => why,
        },
        None => "no credentials file: HOME is not set".to_owned(),
    };
    let service = [
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ]
    .into_iter()
    .find(|name| environment.get(name).is_some());
    let role = match service {
        Some(name) => format!("the container's role by {name} gave none"),
        None => format!(
            "the instance's role by {} gave none",
            shown(
                environment
                    .get("AWS_METADATA_ENDPOINT")
                    .unwrap_or("http://169.254.169.254")
            )
        ),
    };
    format!(
        "looked for in this order: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY ({}); \
         AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN ({}); {file}; {role}",
        state(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        state(["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"]),
    )
}

/// The keys of a profile of an INI file.
fn parse(text: &str, profile: &str) -> Option<AwsCredential> {
    let (mut within, mut key_id, mut secret_key, mut token) = (false, None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            within = name.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| within) {
            // The client would panic at what cannot stand in a header.
            let sound =
                |value: &String| !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic());
            let value = Some(value.trim().to_owned()).filter(sound);
            match name.trim() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(AwsCredential {
        key_id: key_id?,
        secret_key: secret_key?,
        token,
    })
}

#[async_trait]
impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let now = self.clock.now();
        let mut last = lock(&self.last);
        if let Some((at, credential)) = &*last
            && now.saturating_duration_since(*at) < BELIEVED_FOR
        {
            return Ok(Arc::clone(credential));
        }
        match self.read() {
            Ok(credential) => {
                let credential = Arc::new(credential);
                *last = Some((now, Arc::clone(&credential)));
                Ok(credential)
            }
            // A file that is being replaced costs nothing: the last keys are good for a while.
            Err(text) => match &*last {
                Some((_, credential)) => Ok(Arc::clone(credential)),
                None => Err(object_store::Error::Generic {
                    store: "credentials",
                    source: text.into(),
                }),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_say_what_is_missing_in_each() {
        let of = |variables: &[(&str, &str)]| {
            let owned = variables.iter().map(|(a, b)| ((*a).into(), (*b).into()));
            places(Scheme::S3, &Environment(owned.collect()))
        };
        let said = of(&[("HOME", "/no/such/home")]);
        for part in [
            "AWS_SECRET_ACCESS_KEY (not set)",
            "AWS_ROLE_ARN (not set)",
            "the credentials file /no/such/home/.aws/credentials cannot be read: ",
            "the instance's role by http://169.254.169.254 gave none",
        ] {
            assert!(said.contains(part), "{said}");
        }
        let said = of(&[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"),
            ("AWS_ROLE_ARN", ""),
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://a"),
        ]);
        for part in [
            "AWS_ROLE_ARN is not set",
            "HOME is not set",
            "by AWS_CONTAINER_CREDENTIALS_FULL",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn the_keys_of_the_named_profile_are_read_and_no_others() {
        let text = "[default]\naws_access_key_id = A\naws_secret_access_key=B\n# x\n[other]\n\
                    aws_access_key_id=C\naws_secret_access_key = D\naws_session_token = E\n[half]\n\
                    aws_access_key_id=F\n";
        let of = |profile| parse(text, profile);
        let (default, other) = (of("default").unwrap(), of("other").unwrap());
        assert_eq!(
            (default.key_id.as_str(), default.secret_key.as_str()),
            ("A", "B")
        );
        assert_eq!(default.token, None);
        assert_eq!(
            (other.key_id.as_str(), other.token.as_deref()),
            ("C", Some("E"))
        );
        let strange = text.replace("=F", "=F\u{1}\naws_secret_access_key=G");
        assert!(parse(&strange, "half").is_none());
        assert!(parse(&strange.replace('\u{1}', ""), "half").is_some());
        assert!(of("half").is_none() && of("none").is_none());
    }
}
