//! Everything that could change the meaning of a stored byte, as named fields.

use core::fmt;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::canonical::{is_shallow, object_text, value_text};
use crate::error::{Error, Result};
use crate::format::geometry::ROW_BYTES_MAX;
use crate::format::{ChecksumKind, FORMAT_VERSION, NamespaceDigest};
use crate::key::GroupId;

/// The field that names the model; the directory's name starts with it.
pub const MODEL_FIELD: &str = "model";
/// The field with the format version.
pub const VERSION_FIELD: &str = "format_version";
/// The field with the payload bytes of each group.
pub const ROW_BYTES_FIELD: &str = "row_bytes";
/// The field with the kind of the rows' checksum.
pub const CHECKSUM_FIELD: &str = "checksum";
/// The field with the byte order of the machine whose memory the payloads are copies of.
pub const ENDIANNESS_FIELD: &str = "endianness";

/// Most bytes of a canonical manifest.
pub const MANIFEST_BYTES_MAX: usize = 512 << 10;
/// Most bytes of a value in a message.
const SHOWN_BYTES_MAX: usize = 120;

/// A validated manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    fields: Map<String, Value>,
    model: String,
    canonical: String,
}

/// A field in which two manifests differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Path of the field, its parts joined by dots.
    pub field: String,
    /// Our value's canonical text; `None` where we do not have the field.
    pub ours: Option<String>,
    /// The other's.
    pub theirs: Option<String>,
}

impl Manifest {
    /// The manifest of the caller's `identity` fields, any JSON values, among them `model`, with
    /// rows of `row_bytes` payload bytes per group.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`], naming the field: `model` is missing or no non-empty
    /// string; a field that is added here is given; no group, or a row size out of range; nested
    /// deeper than 64; more than 512 KiB of canonical text.
    pub fn new(identity: Map<String, Value>, row_bytes: &BTreeMap<GroupId, u64>) -> Result<Self> {
        let added = [
            VERSION_FIELD,
            ROW_BYTES_FIELD,
            CHECKSUM_FIELD,
            ENDIANNESS_FIELD,
        ];
        if let Some(field) = added.iter().find(|field| identity.contains_key(**field)) {
            return Err(Error::config(format!(
                "manifest field {field:?} is added by kvstrata; leave it out"
            )));
        }
        if row_bytes.is_empty() {
            return Err(Error::config(
                "row_bytes names no group; give the row size of at least one",
            ));
        }
        let mut sizes = Map::new();
        for (group, bytes) in row_bytes {
            if !(1..=ROW_BYTES_MAX).contains(bytes) {
                return Err(Error::config(format!(
                    "row_bytes of group {group} is {bytes}; 1 to {ROW_BYTES_MAX} bytes are possible"
                )));
            }
            sizes.insert(group.to_string(), Value::from(*bytes));
        }
        let endianness = if cfg!(target_endian = "little") {
            "little"
        } else {
            "big"
        };
        let mut fields = identity;
        fields.insert(VERSION_FIELD.to_owned(), Value::from(FORMAT_VERSION));
        fields.insert(ROW_BYTES_FIELD.to_owned(), Value::Object(sizes));
        fields.insert(
            CHECKSUM_FIELD.to_owned(),
            Value::from(ChecksumKind::Crc64Nvme.name()),
        );
        fields.insert(ENDIANNESS_FIELD.to_owned(), Value::from(endianness));
        Self::from_fields(fields)
    }

    /// Takes the fields of a manifest that was stored. Only what every manifest has is checked.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`], naming the field.
    pub fn from_fields(fields: Map<String, Value>) -> Result<Self> {
        if !is_shallow(&fields) {
            return Err(Error::config(
                "the manifest's fields are nested more than 64 deep",
            ));
        }
        let model = match fields.get(MODEL_FIELD) {
            Some(Value::String(model)) if !model.is_empty() => model.clone(),
            Some(other) => {
                return Err(Error::config(format!(
                    "manifest field \"model\" is {}; a string that is not empty is expected",
                    shown(&value_text(other))
                )));
            }
            None => {
                return Err(Error::config(
                    "manifest field \"model\" is missing; give the model's name",
                ));
            }
        };
        let canonical = object_text(&fields);
        if canonical.len() > MANIFEST_BYTES_MAX {
            return Err(Error::config(format!(
                "the manifest has {} bytes; {MANIFEST_BYTES_MAX} are possible",
                canonical.len()
            )));
        }
        Ok(Self {
            fields,
            model,
            canonical,
        })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The canonical text: two manifests are equal when theirs are.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// The blake3 digest of the canonical text.
    pub fn digest(&self) -> NamespaceDigest {
        NamespaceDigest(*blake3::hash(self.canonical.as_bytes()).as_bytes())
    }

    /// The fields in which `theirs` differs, in the order of their names; none exactly when the
    /// canonical texts are equal.
    pub fn differences(&self, theirs: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        compare_objects("", &self.fields, &theirs.fields, &mut differences);
        differences
    }
}

/// Collects the differing fields of two objects at `path`.
fn compare_objects(
    path: &str,
    ours: &Map<String, Value>,
    theirs: &Map<String, Value>,
    differences: &mut Vec<Difference>,
) {
    let names: std::collections::BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    for name in names {
        let field = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        compare_values(field, ours.get(name), theirs.get(name), differences);
    }
}

/// Collects the differing fields of two values at `field`.
fn compare_values(
    field: String,
    ours: Option<&Value>,
    theirs: Option<&Value>,
    differences: &mut Vec<Difference>,
) {
    match (ours, theirs) {
        (Some(Value::Object(ours)), Some(Value::Object(theirs))) => {
            compare_objects(&field, ours, theirs, differences);
        }
        (Some(Value::Array(ours)), Some(Value::Array(theirs))) if ours.len() == theirs.len() => {
            for (position, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let field = format!("{field}.{position}");
                compare_values(field, Some(ours), Some(theirs), differences);
            }
        }
        _ => {
            let (ours, theirs) = (ours.map(value_text), theirs.map(value_text));
            if ours != theirs {
                differences.push(Difference {
                    field,
                    ours,
                    theirs,
                });
            }
        }
    }
}

/// `text`, cut where it is too long for a message.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().find(|(at, _)| *at >= SHOWN_BYTES_MAX) {
        Some((at, _)) => format!("{}...", text.get(..at).unwrap_or("")),
        None => text.to_owned(),
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: &Option<String>| value.as_deref().map_or("absent".to_owned(), shown);
        write!(
            formatter,
            "field {:?} is {} there and {} here",
            self.field,
            text(&self.theirs),
            text(&self.ours)
        )
    }
}
