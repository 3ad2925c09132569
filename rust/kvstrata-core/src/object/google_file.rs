//! The file of credentials that the client of Google's store reads by itself, however long that
//! takes: read before it, with a bound.

use std::io;
use std::path::PathBuf;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use crate::error::{Error, Result};
use crate::object::NamedFiles;
use crate::object::options::Environment;

/// Where `gcloud auth application-default login` leaves credentials, below the user's directory.
const DEFAULT: &str = ".config/gcloud/application_default_credentials.json";
/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The file that a client would read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GoogleFile {
    path: PathBuf,
    /// The variable that names it; the usual one does not have to be there.
    variable: Option<String>,
}

impl GoogleFile {
    /// The one that a client reads which is made by this builder; none where it has its credentials
    /// from elsewhere.
    pub(super) fn of(
        builder: &GoogleCloudStorageBuilder,
        environment: &Environment,
    ) -> Option<Self> {
        let named = |key: GoogleConfigKey| {
            let path = builder.get_config_value(&key)?;
            let mut all = environment.0.iter();
            let variable = all.find(|(name, value)| {
                let own = name.to_ascii_lowercase().parse::<GoogleConfigKey>();
                **value == path && own.is_ok_and(|own| own.as_ref() == key.as_ref())
            });
            Some(Self {
                path: PathBuf::from(path),
                variable: variable.map(|(name, _)| name.clone()),
            })
        };
        let account = named(GoogleConfigKey::ServiceAccount);
        let key = builder.get_config_value(&GoogleConfigKey::ServiceAccountKey);
        match (account, key) {
            // Both are refused before any is read.
            (_, Some(_)) => None,
            (Some(account), None) => Some(account),
            (None, None) => named(GoogleConfigKey::ApplicationCredentials).or_else(|| {
                Some(Self {
                    path: PathBuf::from(environment.get("HOME")?).join(DEFAULT),
                    variable: None,
                })
            }),
        }
    }

    /// Reads it, in bounded time.
    ///
    /// # Errors
    /// `Config` naming the variable and the file where it gives no bytes, or cannot be read.
    pub(super) fn check(&self, files: &NamedFiles) -> Result<()> {
        let Err(error) = files.read(&self.path, FILE_BYTES_MAX) else {
            return Ok(());
        };
        let shown = self.path.display();
        match (&self.variable, error.kind()) {
            (Some(name), _) => Err(Error::config(format!("{name}: {shown}: {error}"))),
            // The client goes on without it.
            (
                None,
                io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::PermissionDenied,
            ) => Ok(()),
            (None, _) => Err(Error::config(format!(
                "the application default credentials {shown} cannot be read: {error}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a client reads that is told these variables.
    fn of(variables: &[(&str, &str)]) -> Option<(String, Option<String>)> {
        let owned = variables.iter().map(|(a, b)| ((*a).into(), (*b).into()));
        let environment = Environment(owned.collect());
        let mut builder = GoogleCloudStorageBuilder::new();
        for (name, value) in variables {
            if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
                builder = builder.with_config(key, *value);
            }
        }
        let file = GoogleFile::of(&builder, &environment)?;
        Some((file.path.display().to_string(), file.variable))
    }

    #[test]
    fn the_file_is_the_one_that_the_client_would_read() {
        let by = |path: &str, name: &str| Some((path.to_owned(), Some(name.to_owned())));
        for name in [
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_service_account_path",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ] {
            assert_eq!(of(&[(name, "/a"), ("HOME", "/h")]), by("/a", name));
        }
        let (account, default) = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS");
        assert_eq!(of(&[(account, "/a"), (default, "/b")]), by("/a", account));
        let usual = "/h/.config/gcloud/application_default_credentials.json";
        assert_eq!(of(&[("HOME", "/h")]), Some((usual.to_owned(), None)));
        assert_eq!(of(&[]), None);
        let key = ("GOOGLE_SERVICE_ACCOUNT_KEY", "{}");
        assert_eq!(of(&[key, (default, "/b"), ("HOME", "/h")]), None);
    }
}
