//! Credentials from the file that AWS's own tools share.

use core::error::Error;
use core::fmt;
use core::time::Duration;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::{AwsCredential, AwsCredentialProvider};

use crate::config::shown;
use crate::object::failure::chain_of;
use crate::object::options::{Environment, ObjectOptions};
use crate::object::{NamedFiles, Scheme};
use crate::sys::clock::{Clock, SystemClock};
use crate::sys::sync::{Arc, Mutex, lock};

/// How long what was read is believed: rotated keys are used after it.
const BELIEVED_FOR: Duration = Duration::from_mins(1);
/// When a file is read again that could not be, or that is being read.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads one profile of a credentials file, again every minute.
pub(super) struct FileCredentials {
    path: PathBuf,
    profile: String,
    files: NamedFiles,
    clock: Arc<dyn Clock>,
    /// The last keys, and until when they are not read again.
    last: Mutex<Option<(Instant, Arc<AwsCredential>)>>,
}

impl fmt::Debug for FileCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "FileCredentials({})", self.path.display())
    }
}

impl FileCredentials {
    /// The file that the environment names, or the usual one, when it has the profile; also when it
    /// hangs, which its user is told then.
    pub(super) fn find(options: &ObjectOptions, clock: Arc<dyn Clock>) -> Option<Self> {
        let found = Self::of(&options.environment, &options.files, clock)?;
        let bytes = found.files.read(&found.path, FILE_BYTES_MAX);
        let hangs = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
        (bytes.as_ref().is_err_and(hangs) || found.keys_of(bytes).is_ok()).then_some(found)
    }

    /// The file that the environment names, or the usual one, as yet unread.
    fn of(environment: &Environment, files: &NamedFiles, clock: Arc<dyn Clock>) -> Option<Self> {
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
            files: files.clone(),
            clock,
            last: Mutex::default(),
        })
    }

    /// The keys in what was read.
    fn keys_of(&self, bytes: io::Result<Vec<u8>>) -> Result<AwsCredential, String> {
        let shown = self.path.display();
        let bytes = bytes
            .map_err(|error| format!("the credentials file {shown} cannot be read: {error}"))?;
        let text = String::from_utf8_lossy(&bytes);
        parse(&text, &self.profile).map_err(|why| format!("the credentials file {shown} has {why}"))
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
pub(super) struct CheckedCredentials(pub(super) AwsCredentialProvider);

impl fmt::Debug for CheckedCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CheckedCredentials")
    }
}

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
pub(super) fn places(scheme: Scheme, environment: &Environment, files: &NamedFiles) -> String {
    match scheme {
        Scheme::S3 => places_of_s3(environment, files),
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

fn places_of_s3(environment: &Environment, files: &NamedFiles) -> String {
    let state = |names: [&str; 2]| match names.map(|name| environment.get(name).is_some()) {
        [true, true] => "set".to_owned(),
        [false, false] => "not set".to_owned(),
        [first, _] => {
            let [a, b] = names;
            format!("{} is not set", if first { b } else { a })
        }
    };
    let file = match FileCredentials::of(environment, files, Arc::new(SystemClock)) {
        Some(file) => match file.keys_of(files.read(&file.path, FILE_BYTES_MAX)) {
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

/// The keys of a profile of an INI file; an error says what it has instead.
fn parse(text: &str, profile: &str) -> Result<AwsCredential, String> {
    let (mut within, mut is_there) = (false, false);
    let names = [
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
    ];
    let mut values = names.map(|_| None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            within = name.trim() == profile;
            is_there |= within;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| within) {
            let (name, value) = (name.trim(), value.trim());
            for (known, place) in names.iter().zip(&mut values) {
                if *known == name {
                    *place = Some(value).filter(|value| !value.is_empty());
                }
            }
        }
    }
    if !is_there {
        return Err(format!("no profile {profile:?}"));
    }
    // The client would panic at what cannot stand in a header.
    let sound = |value: &str| value.chars().all(|c| c.is_ascii_graphic());
    for (name, value) in names.iter().zip(values) {
        if value.is_some_and(|value| !sound(value)) {
            return Err(format!(
                "in {name} of the profile {profile:?} a space or another character that no header \
                 of a request may have"
            ));
        }
    }
    let [key_id, secret_key, token] = values;
    let needed = |value: Option<&str>, name| match value {
        Some(value) => Ok(value.to_owned()),
        None => Err(format!("no {name} in the profile {profile:?}")),
    };
    Ok(AwsCredential {
        key_id: needed(key_id, names[0])?,
        secret_key: needed(secret_key, names[1])?,
        token: token.map(str::to_owned),
    })
}

#[async_trait]
impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let now = self.clock.now();
        let later = |time| now.checked_add(time).unwrap_or(now);
        let last = match &mut *lock(&self.last) {
            Some((until, keys)) if now < *until => return Ok(Arc::clone(keys)),
            // Others make do with the last keys meanwhile.
            Some((until, keys)) => {
                *until = later(AGAIN_AFTER);
                Some(Arc::clone(keys))
            }
            None => None,
        };
        match self.keys_of(self.files.read_aside(&self.path, FILE_BYTES_MAX).await) {
            Ok(keys) => {
                let keys = Arc::new(keys);
                *lock(&self.last) = Some((later(BELIEVED_FOR), Arc::clone(&keys)));
                Ok(keys)
            }
            // A file that is being replaced costs nothing: the last keys are good for a while.
            Err(text) => last.ok_or_else(|| object_store::Error::Generic {
                store: "credentials",
                source: text.into(),
            }),
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
            let files = NamedFiles::default();
            places(Scheme::S3, &Environment(owned.collect()), &files)
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
        assert!(parse(&strange.replace('\u{1}', ""), "half").is_ok());
        for (text, profile, told) in [
            (
                strange.as_str(),
                "half",
                "in aws_access_key_id of the profile",
            ),
            (
                &text.replace("= E", "= E E"),
                "other",
                "in aws_session_token of",
            ),
            (
                text,
                "half",
                "no aws_secret_access_key in the profile \"half\"",
            ),
            (
                &text.replace("=B", "="),
                "default",
                "no aws_secret_access_key",
            ),
            (text, "none", "no profile \"none\""),
        ] {
            let why = parse(text, profile).unwrap_err();
            assert!(why.starts_with(told), "{why}");
        }
    }

    /// The time since its making, as it is told.
    #[derive(Debug)]
    struct Told(Instant, Mutex<Duration>);

    impl Clock for Told {
        fn now(&self) -> Instant {
            self.0 + *lock(&self.1)
        }
        fn unix_seconds(&self) -> u32 {
            0
        }
        fn sleep(&self, _: Duration) {}
    }

    #[test]
    fn the_last_keys_are_good_while_the_file_cannot_be_read_and_rotated_ones_follow() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let write = |id: &str| {
            let text = format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = s\n");
            #[expect(clippy::disallowed_methods, reason = "a test")]
            std::fs::write(&path, text).unwrap();
        };
        let clock = Arc::new(Told(SystemClock.now(), Mutex::default()));
        let named = ("AWS_SHARED_CREDENTIALS_FILE", path.display().to_string());
        let environment = Environment([(named.0.to_owned(), named.1)].into());
        let (files, given) = (NamedFiles::default(), Arc::clone(&clock));
        let file = FileCredentials::of(&environment, &files, given).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let get = || runtime.block_on(file.get_credential());
        let pass = |time| *lock(&clock.1) += time;
        assert!(get().is_err());
        write("one");
        assert_eq!(get().unwrap().key_id, "one");
        #[expect(clippy::disallowed_methods, reason = "a test")]
        std::fs::remove_file(&path).unwrap();
        pass(BELIEVED_FOR);
        assert_eq!(get().unwrap().key_id, "one");
        write("two");
        // Not looked at yet: whoever asks meanwhile does not wait for the file.
        assert_eq!(get().unwrap().key_id, "one");
        pass(AGAIN_AFTER);
        assert_eq!(get().unwrap().key_id, "two");
    }
}
