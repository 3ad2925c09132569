//! Names of everything below a root. Pure: makes and reads names, touches no file.

use super::manifest::Manifest;
use crate::format::{FileId, WriterId};
use crate::key::GroupId;

/// Name of the file with a namespace's manifest.
pub const MANIFEST_NAME: &str = "namespace.json";
/// Name of the directory of row files, in a namespace.
pub const ROWS_NAME: &str = "rows";
/// Name of the directory of epochs, in a namespace.
pub const EPOCHS_NAME: &str = "epochs";
/// Name of the directory of writers, in a namespace.
pub const WRITERS_NAME: &str = "writers";
/// Name of the file a writer locks, in its directory, and of the one a root is locked by.
pub const LOCK_NAME: &str = "lock";

/// Most bytes of the model's name in a directory's name.
const MODEL_BYTES_MAX: usize = 64;
/// Hexadecimal digits of the digest in a directory's name: 128 bits. The whole digest is in the
/// manifest and in every row file.
const DIGEST_DIGITS: usize = 32;
/// End of a row file's name.
const ROW_FILE_SUFFIX: &str = ".rows";

/// Name of the directory of the namespace of `manifest`.
pub fn directory_name(manifest: &Manifest) -> String {
    let digest = manifest.digest().to_string();
    let digits = digest.get(..DIGEST_DIGITS).unwrap_or(&digest);
    format!("{}-{digits}", sanitised(manifest.model()))
}

/// The model's name with `_` for what does not belong into a file name, and not hidden.
fn sanitised(model: &str) -> String {
    let plain = |character: char| match character {
        'A'..='Z' | 'a'..='z' | '0'..='9' | '.' | '_' | '-' => character,
        _ => '_',
    };
    let mut name: String = model.chars().map(plain).take(MODEL_BYTES_MAX).collect();
    if name.starts_with(['.', '-']) {
        name.replace_range(..1, "_");
    }
    name
}

/// Whether `name` has the form of a namespace's directory.
pub fn is_directory_name(name: &str) -> bool {
    name.rsplit_once('-').is_some_and(|(model, digits)| {
        !model.is_empty() && sanitised(model) == model && is_hexadecimal(digits, DIGEST_DIGITS)
    })
}

/// Whether `text` is `length` lower-case hexadecimal digits.
fn is_hexadecimal(text: &str, length: usize) -> bool {
    text.len() == length
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Name of the directory of a group's row files: `g0`.
pub fn group_name(group: GroupId) -> String {
    format!("g{group}")
}

/// The group whose directory is named `name`.
pub fn parse_group_name(name: &str) -> Option<GroupId> {
    let group = GroupId(name.strip_prefix('g')?.parse().ok()?);
    (group_name(group) == name).then_some(group)
}

/// Name of a row file: `00000000000000ff.rows`.
pub fn row_file_name(file_id: FileId) -> String {
    format!("{file_id}{ROW_FILE_SUFFIX}")
}

/// The number of the row file named `name`.
pub fn parse_row_file_name(name: &str) -> Option<FileId> {
    let digits = name.strip_suffix(ROW_FILE_SUFFIX)?;
    is_hexadecimal(digits, 16).then(|| u64::from_str_radix(digits, 16).ok().map(FileId))?
}

/// Name of the record of an epoch: `0000000001`.
pub fn epoch_name(epoch: u32) -> String {
    format!("{epoch:010}")
}

/// The epoch whose record is named `name`.
pub fn parse_epoch_name(name: &str) -> Option<u32> {
    let epoch = name.parse().ok()?;
    (epoch_name(epoch) == name).then_some(epoch)
}

/// Name of a writer's directory: its 32 hexadecimal digits.
pub fn writer_name(writer: WriterId) -> String {
    writer.to_string()
}

/// The writer whose directory is named `name`.
pub fn parse_writer_name(name: &str) -> Option<WriterId> {
    is_hexadecimal(name, 32)
        .then(|| u128::from_str_radix(name, 16).ok())?
        .map(|number| WriterId(number.to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_anything_else_is_not_ours() {
        for group in [0, 7, u32::MAX] {
            assert_eq!(
                parse_group_name(&group_name(GroupId(group))),
                Some(GroupId(group))
            );
            assert_eq!(parse_epoch_name(&epoch_name(group)), Some(group));
        }
        for id in [0, 255, u64::MAX] {
            assert_eq!(
                parse_row_file_name(&row_file_name(FileId(id))),
                Some(FileId(id))
            );
        }
        let writer = WriterId([0x0f; 16]);
        assert_eq!(parse_writer_name(&writer_name(writer)), Some(writer));
        for name in ["g", "g00", "g+1", "g-1", "G1", "g4294967296", "1", ""] {
            assert_eq!(parse_group_name(name), None, "{name}");
        }
        for name in [
            "ff.rows",
            "00000000000000FF.rows",
            "00000000000000ff",
            "+0000000000000ff.rows",
        ] {
            assert_eq!(parse_row_file_name(name), None, "{name}");
        }
        for name in ["1", "+000000001", "4294967296", "00000000001", ""] {
            assert_eq!(parse_epoch_name(name), None, "{name}");
        }
        assert_eq!(parse_writer_name("0f"), None);
    }

    #[test]
    fn a_model_name_becomes_one_visible_component() {
        assert_eq!(sanitised("org/Model-7B.v1"), "org_Model-7B.v1");
        assert_eq!(sanitised("../../etc"), "_._.._etc");
        assert_eq!(sanitised("-rf"), "_rf");
        assert_eq!(sanitised("模型"), "__");
        assert_eq!(sanitised(&"x".repeat(300)).len(), 64);
    }
}
