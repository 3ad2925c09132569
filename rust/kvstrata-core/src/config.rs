//! What a tier is opened with: sizes, places, options.

use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::buffer::Arena;
use crate::error::{Error, Result};
use crate::eviction::admission::AdmissionOptions;
use crate::key::GroupId;

/// Most payload bytes of one row.
pub const ROW_BYTES_MAX: u64 = 1 << 30;

/// Longest accepted deadline of an operation; longer ones are an error, not a habit.
pub const DEADLINE_MAX: Duration = Duration::from_hours(24);

/// An amount of storage, absolute or relative to the file system that holds the root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// A share of the file system's size, 0 to 100.
    Percent(f64),
}

impl Size {
    /// The amount in bytes on a file system of `total_bytes`.
    #[must_use]
    pub fn resolve(self, total_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => {
                // Hundredths of a percent keep the arithmetic in integers.
                let parts = u128::from(percent_parts(percent));
                u64::try_from(u128::from(total_bytes) * parts / 1_000_000).unwrap_or(u64::MAX)
            }
        }
    }
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is checked to lie in 0..=100 when it is parsed"
)]
fn percent_parts(percent: f64) -> u64 {
    (percent.clamp(0.0, 100.0) * 10_000.0).round() as u64
}

const UNITS: [(&str, u64); 17] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kb", 1000),
    ("kib", 1 << 10),
    ("m", 1 << 20),
    ("mb", 1_000_000),
    ("mib", 1 << 20),
    ("g", 1 << 30),
    ("gb", 1_000_000_000),
    ("gib", 1 << 30),
    ("t", 1 << 40),
    ("tb", 1_000_000_000_000),
    ("tib", 1 << 40),
    ("p", 1 << 50),
    ("pb", 1_000_000_000_000_000),
    ("pib", 1 << 50),
];

/// Reads "10GiB", "1.5TiB", "10G", "80%" or "1000000000"; a bare letter means the binary unit.
///
/// `field` is the option's name for the message.
///
/// # Errors
/// [`crate::error::ErrorKind::Config`] naming the field, the text and what is accepted.
pub fn parse_size(field: &str, text: &str) -> Result<Size> {
    let trimmed = text.trim();
    let too_much = |most| Error::config(format!("{field}: {text:?} is more than {most}"));
    let wrong = || {
        Error::config(format!(
            "{field}: {text:?} is not a size; expected bytes, a number with KiB, MiB, GiB, TiB \
             (or KB, MB, GB, TB), or a percentage such as \"5%\""
        ))
    };
    let split = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at_checked(split).ok_or_else(wrong)?;
    let unit = unit.trim().to_ascii_lowercase();
    if unit == "%" {
        let percent: f64 = number.parse().map_err(|_| wrong())?;
        // A sign is no digit: what is not more is 0 at least.
        return if percent > 100.0 {
            Err(too_much("100%"))
        } else {
            Ok(Size::Percent(percent))
        };
    }
    let scale = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(wrong)?
        .1;
    let bytes = scaled(number, scale).ok_or_else(wrong)?;
    u64::try_from(bytes)
        .map(Size::Bytes)
        .map_err(|_| too_much("2**64 - 1 bytes"))
}

/// `number` (digits with at most one point) times `scale`, rounded down; no floating point. What is
/// more than fits is the most that does.
fn scaled(number: &str, scale: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 18 || (number.contains('.') && fraction.is_empty()) {
        return None;
    }
    // Digits are a number, if one that may not fit.
    let whole = whole.parse().unwrap_or(u128::MAX);
    let mut total = whole.saturating_mul(u128::from(scale));
    if !fraction.is_empty() {
        let digits: u128 = fraction.parse().ok()?;
        let power = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        total = total.saturating_add(digits.checked_mul(u128::from(scale))? / power);
    }
    Some(total)
}

/// A URL as it may be told: without its query and fragment, and where it may hold credentials
/// without anything but its scheme.
pub(crate) fn shown(url: &str) -> String {
    if url.contains('@') {
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        return match scheme.filter(|scheme| !scheme.contains(['@', '?', '#'])) {
            Some(scheme) => format!("{scheme}://..."),
            None => "...".to_owned(),
        };
    }
    let kept = url.split(['?', '#']).next();
    kept.unwrap_or("").to_owned()
}

/// The directory that `url` names: a path or a `file://` URL without a host. A path that is hardly
/// meant as one (`~/kv`, `file:/kv`) is refused; `./~/kv` and `./file:/kv` say that it is.
///
/// # Errors
/// [`crate::error::ErrorKind::Config`] for an empty location, a `file://` URL with a host or a
/// relative path, other schemes, and a path that is hardly meant.
pub fn parse_url(url: &str) -> Result<PathBuf> {
    let refused = |why| Error::config(format!("url: {:?}: {why}", shown(url)));
    let path = match url.split_once("://") {
        Some(("file", rest)) if rest.starts_with('/') => match doubt(rest) {
            Some(doubt) => return Err(refused(doubt)),
            None => rest.to_owned(),
        },
        Some(("file", _)) => {
            return Err(Error::config(format!(
                "url: {:?} names a host or a relative path; write file:///absolute/path",
                shown(url)
            )));
        }
        Some(_) => {
            return Err(Error::config(format!(
                "url: the scheme of {:?} is not supported; a path, file://, s3://, gs://, az:// and \
                 memory:// are",
                shown(url)
            )));
        }
        None => match doubt(url) {
            Some(doubt) => return Err(refused(doubt)),
            None => url.to_owned(),
        },
    };
    if path.is_empty() {
        return Err(Error::config(
            "url: is empty; a path or file:///absolute/path is expected",
        ));
    }
    if path.contains('\0') {
        return Err(Error::config(format!(
            "url: {:?} contains a NUL byte",
            shown(url)
        )));
    }
    Ok(PathBuf::from(path))
}

/// Why a path is hardly what was meant.
fn doubt(path: &str) -> Option<&'static str> {
    const SCHEMES: [&str; 5] = ["file", "s3", "gs", "az", "memory"];
    let scheme = path.split_once(':').map(|(scheme, _)| scheme);
    let is_known = |scheme: &str| {
        SCHEMES
            .iter()
            .any(|known| known.eq_ignore_ascii_case(scheme))
    };
    if path.trim() != path {
        Some("it begins or ends with a space")
    } else if path.starts_with('~') {
        Some("~ is expanded by the shell alone; write the whole path")
    } else if scheme.is_some_and(is_known) {
        Some("a URL has two slashes after its scheme, as in file:///var/kv")
    } else {
        None
    }
}

/// Everything that [`crate::tier::Tier::open`] needs beside the arena.
#[derive(Clone, Debug)]
pub struct TierOptions {
    /// Directory of the root; created when missing.
    pub root: PathBuf,
    /// Identity fields of the manifest; `model` (a string) is required.
    pub identity: Map<String, Value>,
    /// Payload bytes of a row, by group.
    pub row_bytes: BTreeMap<GroupId, u64>,
    /// Hard limit for all our files in the root.
    pub capacity: Size,
    /// Space of the file system that is left to others.
    pub min_free: Size,
    /// Name of the eviction policy.
    pub policy: String,
    /// Keys that the policy's directory has at most, if it has one; `None`: its default.
    pub directory: Option<usize>,
    /// Which rows are stored.
    pub admission: AdmissionOptions,
    /// `auto`, `threads` or `uring`.
    pub io_backend: String,
    /// Longest time of one operation.
    pub deadline: Duration,
    /// `private`.
    pub share_mode: String,
    /// Whether an unusable root is an error at open, or a tier that misses and retries.
    pub required: bool,
    /// Whether the caller leaves alone the slots that [`crate::tier::Tier::busy_offsets`] names.
    pub honours_busy: bool,
}

impl TierOptions {
    /// Checks what can be checked without looking at the root.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`] naming the field.
    pub fn validate(&self) -> Result<()> {
        if self.row_bytes.is_empty() {
            return Err(Error::config(
                "row_bytes: names no group; at least one is needed",
            ));
        }
        for (group, bytes) in &self.row_bytes {
            if *bytes == 0 || *bytes > ROW_BYTES_MAX {
                return Err(Error::config(format!(
                    "row_bytes: group {group} has {bytes} bytes; 1 to {ROW_BYTES_MAX} are supported"
                )));
            }
        }
        if !matches!(self.io_backend.as_str(), "auto" | "threads" | "uring") {
            return Err(Error::config(format!(
                "io_backend: {:?} is not available; \"auto\", \"threads\" and \"uring\" are",
                self.io_backend
            )));
        }
        if self.share_mode != "private" {
            return Err(Error::config(format!(
                "share_mode: {:?} is not available; \"private\" is",
                self.share_mode
            )));
        }
        check_deadline(self.deadline)
    }
}

/// Refuses a deadline that nothing could keep, or that nobody would wait for.
pub(crate) fn check_deadline(deadline: Duration) -> Result<()> {
    if !deadline.is_zero() && deadline <= DEADLINE_MAX {
        return Ok(());
    }
    Err(Error::config(format!(
        "deadline_s: {} is not more than 0 and at most {} seconds",
        deadline.as_secs_f64(),
        DEADLINE_MAX.as_secs()
    )))
}

/// Refuses an arena in which no slot holds a row of each group.
pub(crate) fn check_arena(row_bytes: &BTreeMap<GroupId, u64>, arena: &Arena) -> Result<()> {
    let arena_bytes = arena.length();
    let largest = row_bytes.iter().max_by_key(|(_, bytes)| **bytes);
    match largest {
        Some((group, bytes)) if usize::try_from(*bytes).is_ok_and(|one| one > arena_bytes) => {
            Err(Error::config(format!(
                "arena: {arena_bytes} bytes hold no row of group {group}, which has {bytes} bytes"
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, size) in [
            ("1000000000", Size::Bytes(1_000_000_000)),
            ("10G", Size::Bytes(10 << 30)),
            ("10GiB", Size::Bytes(10 << 30)),
            ("10 GB", Size::Bytes(10_000_000_000)),
            ("1.5TiB", Size::Bytes(3 << 39)),
            ("0.5k", Size::Bytes(512)),
            ("80%", Size::Percent(80.0)),
            ("0", Size::Bytes(0)),
        ] {
            assert_eq!(parse_size("capacity", text).unwrap(), size, "{text}");
        }
    }

    #[test]
    fn a_wrong_size_names_its_field() {
        for text in [
            "",
            "-1",
            "1.2.3",
            "G",
            "10X",
            "101%",
            "-5%",
            "nan%",
            "1.",
            ".5",
            "99999999999P",
            "1e3",
        ] {
            let error = parse_size("capacity", text).unwrap_err();
            assert!(
                error.to_string().starts_with("capacity: "),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn what_is_too_large_a_size_is_told_from_what_is_none() {
        for (text, told) in [
            ("180%", "capacity: \"180%\" is more than 100%"),
            ("100.5 %", "capacity: \"100.5 %\" is more than 100%"),
            (
                "99999999999P",
                "capacity: \"99999999999P\" is more than 2**64 - 1 bytes",
            ),
            (
                "18446744073709551616",
                "capacity: \"18446744073709551616\" is more than 2**64 - 1 bytes",
            ),
        ] {
            assert_eq!(parse_size("capacity", text).unwrap_err().to_string(), told);
        }
        for text in ["10X", "1.", "1..0", "-5%", "nan%", "%"] {
            let told = parse_size("capacity", text).unwrap_err().to_string();
            assert!(
                told.starts_with(&format!("capacity: {text:?} is not a size; ")),
                "{told}"
            );
        }
    }

    #[test]
    fn a_share_of_the_file_system_is_exact() {
        assert_eq!(Size::Percent(5.0).resolve(1000), 50);
        assert_eq!(Size::Percent(100.0).resolve(u64::MAX), u64::MAX);
        assert_eq!(Size::Bytes(7).resolve(1), 7);
    }

    #[test]
    fn urls_are_told_without_what_may_be_secret() {
        for (url, told) in [
            ("http://h:1/x", "http://h:1/x"),
            ("http://h/x?sig=secret", "http://h/x"),
            ("http://h#secret", "http://h"),
            ("http://me:secret@h/x", "http://..."),
            ("http://me:se?secret@h", "http://..."),
            ("http://h?sig=a@secret", "http://..."),
            ("me:secret@h", "..."),
            ("me:secret@h://x", "..."),
        ] {
            assert_eq!(shown(url), told);
        }
        for url in ["file://me:secret@h/x", "s4://b?secret", "\0?secret"] {
            let error = parse_url(url).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn locations_are_paths_or_file_urls() {
        assert_eq!(
            parse_url("file:///var/kv").unwrap(),
            PathBuf::from("/var/kv")
        );
        assert_eq!(parse_url("/var/kv").unwrap(), PathBuf::from("/var/kv"));
        for path in ["./~/kv", "./file:/kv", "a b", "s4:x", "kv"] {
            assert_eq!(parse_url(path).unwrap(), PathBuf::from(path));
        }
        for wrong in [
            "",
            "file://host/x",
            "s3://bucket",
            "file://x",
            "/a\0b",
            "~/kv",
            "~",
            "file:/kv",
            "S3:/bucket",
            "memory:",
            " /kv",
            "/kv\n",
            "file:///kv ",
        ] {
            assert!(
                parse_url(wrong)
                    .unwrap_err()
                    .to_string()
                    .starts_with("url: ")
            );
        }
    }
}
