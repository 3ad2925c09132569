//! Where a bucket is: the URL of an object tier.

use core::fmt;

use crate::config::shown;
use crate::error::{Error, Result};

/// What kind of server a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3 and whatever speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
    /// Objects in this process's memory, for tests.
    Memory,
}

impl Scheme {
    /// All of them, by the name before `://`.
    const ALL: [(&'static str, Self); 4] = [
        ("s3", Self::S3),
        ("gs", Self::Gcs),
        ("az", Self::Azure),
        ("memory", Self::Memory),
    ];

    /// The name before `://`.
    pub fn as_str(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, scheme)| *scheme == self);
        found.map_or("", |(name, _)| name)
    }
}

/// A bucket and the prefix in it below which everything of ours lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// What kind of server.
    pub scheme: Scheme,
    /// Name of the bucket, or container.
    pub bucket: String,
    /// Parts of the names of all objects, joined by `/`; may be empty.
    pub prefix: String,
}

impl Location {
    /// Reads `s3://bucket/prefix`; `None` for a URL of another scheme.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] for a URL without a bucket, with credentials, with a
    /// query, or with a part of the prefix that is empty, `.` or `..`.
    pub fn parse(url: &str) -> Result<Option<Self>> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Ok(None);
        };
        let found = Scheme::ALL.iter().find(|(name, _)| *name == scheme);
        let Some((_, scheme)) = found else {
            return Ok(None);
        };
        if rest.contains('@') {
            return Err(Error::config(format!(
                "url: {}://... contains '@'; credentials come from the environment, a file or the \
                 instance, never from the URL",
                scheme.as_str()
            )));
        }
        let wrong = |why: &str| Error::config(format!("url: {:?} {why}", shown(url)));
        if rest.contains(['?', '#', '\\', '\0']) {
            return Err(wrong(
                "or what follows it contains '?', '#', '\\' or NUL; write s3://bucket/prefix",
            ));
        }
        if url.trim() != url {
            return Err(wrong("begins or ends with a space"));
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(wrong("names no bucket; write s3://bucket/prefix"));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !bucket.chars().all(plain) {
            return Err(wrong(
                "names a bucket with a character that no bucket's name has",
            ));
        }
        let prefix = prefix.trim_end_matches('/');
        let strange = |part: &str| part.is_empty() || part == "." || part == "..";
        if !prefix.is_empty() && prefix.split('/').any(strange) {
            return Err(wrong("has an empty part, \".\" or \"..\" in its prefix"));
        }
        Ok(Some(Self {
            scheme: *scheme,
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        }))
    }

    /// The name of an object below the prefix.
    #[must_use]
    pub fn below(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}/{name}", self.prefix)
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}://{}", self.scheme.as_str(), self.bucket)?;
        if !self.prefix.is_empty() {
            write!(formatter, "/{}", self.prefix)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_and_prefixes_are_read_from_urls() {
        let of = |url: &str| Location::parse(url).unwrap().unwrap();
        let plain = of("s3://bucket");
        assert_eq!(
            (plain.bucket.as_str(), plain.prefix.as_str()),
            ("bucket", "")
        );
        assert_eq!(plain.below("x"), "x");
        let deep = of("gs://b/a/c/");
        assert_eq!(deep.scheme, Scheme::Gcs);
        assert_eq!(deep.below("x"), "a/c/x");
        assert_eq!(deep.to_string(), "gs://b/a/c");
        for other in ["file:///x", "/x", "http://x"] {
            assert_eq!(Location::parse(other).unwrap(), None, "{other}");
        }
    }

    #[test]
    fn urls_without_a_bucket_or_with_odd_parts_are_refused() {
        for url in [
            "s3://",
            "s3:///x",
            "s3://b//x",
            "s3://b/../x",
            "az://b/x?y",
            "s3://a b",
            "s3://b/x ",
            "s3://b/x\n",
        ] {
            assert!(Location::parse(url).is_err(), "{url}");
        }
        for url in [
            "s3://me:secret@host/x",
            "s3://b/x?secret",
            "s3://b/x#secret",
        ] {
            let error = Location::parse(url).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
