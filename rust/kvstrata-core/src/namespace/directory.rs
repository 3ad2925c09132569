//! Opening a namespace's directory: nothing in it is used before its manifest is compared.

use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use super::layout::{self, MANIFEST_NAME, ROWS_NAME};
use super::manifest::{MANIFEST_BYTES_MAX, Manifest, VERSION_FIELD, shown};
use crate::error::{Error, Result};
use crate::format::{FORMAT_VERSION, NamespaceDigest};
use crate::key::GroupId;
use crate::sys::fs::{Directory, EntryKind, TEMPORARY_SUFFIX, is_symbolic_link};
use crate::sys::sync::Arc;

/// Most bytes of a `namespace.json`.
pub(crate) const FILE_BYTES_MAX: usize = 2 * MANIFEST_BYTES_MAX;
/// Most differing fields in a message.
const DIFFERENCES_SHOWN_MAX: usize = 5;
/// The field of `namespace.json` with the manifest.
const MANIFEST_FIELD: &str = "manifest";
/// The field of `namespace.json` with the digest.
const DIGEST_FIELD: &str = "digest";
/// What to do about a manifest that cannot be trusted.
const REMEDY: &str = "nothing was changed; use another root, or remove that directory to start \
                      with an empty one";

/// An open namespace.
#[derive(Debug)]
pub struct Namespace {
    directory: Arc<Directory>,
    digest: NamespaceDigest,
}

impl Namespace {
    /// Opens the namespace of `manifest` below `root`, making it when it is not there.
    ///
    /// The manifest on disk is read back at every open, also when it was written just now, and
    /// compared field by field.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::Config`], naming the path and the field at fault, when the
    /// directory or its manifest cannot be made or read, is a link or no plain file, was edited or
    /// cut, is of a newer format, or describes another namespace.
    pub fn open(root: &Directory, manifest: &Manifest) -> Result<Self> {
        let name = layout::directory_name(manifest);
        let path = root.path_of(&name);
        let directory = root
            .create_directory(&name)
            .map_err(|error| unusable(&path, "directory", error))?;
        root.sync()
            .map_err(|error| unusable(&path, "directory", error))?;
        remove_leftovers(&directory)
            .map_err(|error| unusable(directory.path(), "directory", error))?;
        let path = directory.path_of(MANIFEST_NAME);
        let bytes = match directory.read_file(MANIFEST_NAME, FILE_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                directory
                    .publish(MANIFEST_NAME, file_text(manifest).as_bytes())
                    .map_err(|error| unusable(&path, "manifest", error))?;
                directory.read_file(MANIFEST_NAME, FILE_BYTES_MAX)
            }
            result => result,
        }
        .map_err(|error| unusable(&path, "manifest", error))?;
        let stored = parse(&path, &bytes)?;
        compare(&path, manifest, &stored)?;
        Ok(Self {
            directory: Arc::new(directory),
            digest: manifest.digest(),
        })
    }

    /// The namespace's directory.
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// The digest every row file of the namespace carries.
    pub const fn digest(&self) -> NamespaceDigest {
        self.digest
    }

    /// Opens the directory of a group's row files, making it when it is not there.
    ///
    /// # Errors
    /// The kernel's, as [`Directory::create_directory`].
    pub fn group_directory(&self, group: GroupId) -> io::Result<Directory> {
        let rows = self.directory.create_directory(ROWS_NAME)?;
        let directory = rows.create_directory(&layout::group_name(group))?;
        self.directory.sync()?;
        rows.sync()?;
        Ok(directory)
    }
}

/// The text of the `namespace.json` of `manifest`.
pub(crate) fn file_text(manifest: &Manifest) -> String {
    format!(
        "{{\"{DIGEST_FIELD}\":\"{}\",\"{MANIFEST_FIELD}\":{}}}\n",
        manifest.digest(),
        manifest.canonical()
    )
}

/// Removes the temporary files of writers that died.
fn remove_leftovers(directory: &Directory) -> io::Result<()> {
    for entry in directory.entries()? {
        match entry.name.to_str() {
            Some(name) if entry.kind == EntryKind::File && name.ends_with(TEMPORARY_SUFFIX) => {
                directory.unlink(name)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reads a `namespace.json` and checks that it is whole and of this version.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Manifest> {
    let value = serde_json::from_slice(bytes).map_err(|error| {
        Error::config(format!(
            "{} is not what was written there ({error}): it was cut or edited; {REMEDY}",
            path.display()
        ))
    })?;
    let Value::Object(mut file) = value else {
        return Err(edited(path, MANIFEST_FIELD, "is missing"));
    };
    let Some(Value::Object(fields)) = file.remove(MANIFEST_FIELD) else {
        return Err(edited(path, MANIFEST_FIELD, "is missing or not an object"));
    };
    check_version(path, &fields)?;
    let manifest = Manifest::from_fields(fields)
        .map_err(|error| Error::config(format!("{}: {error}; {REMEDY}", path.display())))?;
    let Some(Value::String(stored)) = file.get(DIGEST_FIELD) else {
        return Err(edited(path, DIGEST_FIELD, "is missing or not a string"));
    };
    let computed = manifest.digest().to_string();
    if *stored != computed {
        let stored = shown(stored);
        let what = format!("is {stored:?}, and the manifest beside it has the digest {computed:?}");
        return Err(edited(path, DIGEST_FIELD, &what));
    }
    Ok(manifest)
}

/// Refuses any version but this build's.
fn check_version(path: &Path, fields: &Map<String, Value>) -> Result<()> {
    match fields.get(VERSION_FIELD).and_then(Value::as_u64) {
        Some(version) if version == u64::from(FORMAT_VERSION) => Ok(()),
        Some(version) if version > u64::from(FORMAT_VERSION) => Err(Error::config(format!(
            "{}: field {VERSION_FIELD:?} is {version}, a newer format than {FORMAT_VERSION}, the \
             newest this build reads; upgrade kvstrata or use another root",
            path.display()
        ))),
        Some(version) => Err(edited(
            path,
            VERSION_FIELD,
            &format!("is {version}, a format that never was"),
        )),
        None => Err(edited(
            path,
            VERSION_FIELD,
            "is missing or not a whole number",
        )),
    }
}

/// The error of a `namespace.json` whose `field` no build of ours has written.
fn edited(path: &Path, field: &str, what: &str) -> Error {
    Error::config(format!(
        "{}: field {field:?} {what}: the file was edited or put there by hand; {REMEDY}",
        path.display()
    ))
}

/// Refuses a namespace that is not `ours` in every field.
pub(crate) fn compare(path: &Path, ours: &Manifest, stored: &Manifest) -> Result<()> {
    let differences = ours.differences(stored);
    if differences.is_empty() {
        return Ok(());
    }
    let listed: Vec<String> = differences
        .iter()
        .take(DIFFERENCES_SHOWN_MAX)
        .map(ToString::to_string)
        .collect();
    let more = match differences.len().saturating_sub(DIFFERENCES_SHOWN_MAX) {
        0 => String::new(),
        count => format!(" (and {count} more)"),
    };
    Err(Error::config(format!(
        "{} describes other bytes than this engine's: {}{more}; {REMEDY}",
        path.display(),
        listed.join(", ")
    )))
}

/// The error of a directory or file that cannot be used.
fn unusable(path: &Path, what: &str, error: io::Error) -> Error {
    let because = match error.kind() {
        io::ErrorKind::NotADirectory => "is a link or not a directory",
        _ if is_symbolic_link(&error) => "is a symbolic link, which is not followed",
        io::ErrorKind::FileTooLarge => "is larger than any manifest",
        _ => "cannot be used",
    };
    Error::config(format!("namespace {what} {} {because}", path.display())).with_source(error)
}
