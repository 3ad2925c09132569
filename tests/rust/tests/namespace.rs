//! Opening a namespace: what agrees opens, what does not says which field and where.

#![expect(
    clippy::disallowed_methods,
    reason = "namespaces are damaged from the outside"
)]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use kvstrata_core::error::ErrorKind;
use kvstrata_core::format::row_table::EPOCH_LAST;
use kvstrata_core::key::GroupId;
use kvstrata_core::namespace::{Epochs, Manifest, Namespace, layout};
use kvstrata_core::sys::fs::{Directory, ShareMode};
use serde_json::{Map, Value, json};

fn manifest_of(identity: Value) -> Manifest {
    let Value::Object(identity) = identity else {
        panic!("an object is expected")
    };
    let row_bytes = [(GroupId(0), 131_072), (GroupId(2), 16384)];
    Manifest::new(identity, &BTreeMap::from(row_bytes)).unwrap()
}

fn manifest() -> Manifest {
    manifest_of(json!({"model": "m", "dtype": "bfloat16", "rope": {"factor": 8.1, "kind": "yarn"}}))
}

fn root(place: &Path) -> Directory {
    Directory::open_root(&place.join("root"), true, ShareMode::Private).unwrap()
}

/// Opens the namespace of [`manifest`] below `place` and leaves it.
fn prepared(place: &Path) -> PathBuf {
    let namespace = Namespace::open(&root(place), &manifest()).unwrap();
    namespace.directory().path_of("namespace.json")
}

/// The message with which opening is refused; it names `path`.
fn refusal(place: &Path, path: &Path) -> String {
    let error = Namespace::open(&root(place), &manifest()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let message = error.to_string();
    assert!(
        message.contains(path.to_str().unwrap()),
        "no path: {message}"
    );
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut file);
    std::fs::write(path, serde_json::to_vec(&file).unwrap()).unwrap();
}

/// The `namespace.json` of other fields, as kvstrata would write it.
fn file_of(fields: &Map<String, Value>) -> String {
    let text = serde_json::to_string(fields).unwrap();
    format!(
        "{{\"digest\":\"{}\",\"manifest\":{text}}}",
        blake3::hash(text.as_bytes())
    )
}

#[test]
fn a_namespace_opens_again_and_is_the_same() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(path.with_file_name("namespace.json.0123.tmp"), "left").unwrap();
    std::fs::write(path.with_file_name("note.txt"), "a stranger's").unwrap();
    let namespace = Namespace::open(&root(place.path()), &manifest()).unwrap();
    assert_eq!(namespace.digest(), manifest().digest());
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    assert!(!path.with_file_name("namespace.json.0123.tmp").exists());
    assert!(path.with_file_name("note.txt").exists());
    let name = layout::directory_name(&manifest());
    assert!(layout::is_directory_name(&name), "{name}");
    let rows = namespace.group_directory(GroupId(2)).unwrap();
    assert!(rows.path().ends_with(format!("{name}/rows/g2")));
}

#[test]
fn an_edited_field_is_refused_with_both_digests() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    edit(&path, |file| file["manifest"]["dtype"] = json!("float16"));
    let message = refusal(place.path(), &path);
    assert!(message.contains("\"digest\""), "{message}");
    assert!(
        message.contains(&manifest().digest().to_string()),
        "{message}"
    );
}

#[test]
fn a_manifest_of_other_bytes_is_refused_with_the_field_and_both_values() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    // Edited together with its digest, or copied from another namespace: consistent in itself.
    let mut fields: Map<String, Value> = serde_json::from_str(manifest().canonical()).unwrap();
    fields.insert("dtype".into(), json!("float16"));
    std::fs::write(&path, file_of(&fields)).unwrap();
    let message = refusal(place.path(), &path);
    assert!(
        message.contains("field \"dtype\" is \"float16\" there and \"bfloat16\" here"),
        "{message}"
    );

    fields.insert("dtype".into(), json!("bfloat16"));
    fields.insert("rope".into(), json!({"factor": 8.0, "kind": "yarn"}));
    fields.insert("row_bytes".into(), json!({"0": 131_072}));
    std::fs::write(&path, file_of(&fields)).unwrap();
    let message = refusal(place.path(), &path);
    assert!(
        message.contains("field \"rope.factor\" is 8.0 there and 8.1 here"),
        "{message}"
    );
    assert!(
        message.contains("field \"row_bytes.2\" is absent there and 16384 here"),
        "{message}"
    );
    assert!(!message.contains("dtype"), "{message}");
}

#[test]
fn a_manifest_cut_anywhere_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    let bytes = std::fs::read(&path).unwrap();
    for length in (0..bytes.len() - 1).step_by(7) {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let message = refusal(place.path(), &path);
        assert!(message.contains("cut or edited"), "{message}");
    }
    std::fs::write(&path, &bytes).unwrap();
    assert!(Namespace::open(&root(place.path()), &manifest()).is_ok());
}

#[test]
fn a_newer_format_is_refused_as_such() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    edit(&path, |file| file["manifest"]["format_version"] = json!(2));
    let message = refusal(place.path(), &path);
    assert!(
        message.contains("\"format_version\" is 2, a newer format than 1"),
        "{message}"
    );
    for (version, expected) in [
        (json!(0), "never was"),
        (json!("1"), "not a whole number"),
        (json!(-1), "whole number"),
    ] {
        edit(&path, |file| file["manifest"]["format_version"] = version);
        let message = refusal(place.path(), &path);
        assert!(
            message.contains("\"format_version\"") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn what_was_put_there_by_hand_is_refused_with_the_field() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    let canonical: Value = serde_json::from_str(manifest().canonical()).unwrap();
    let mut nameless = canonical.clone();
    nameless.as_object_mut().unwrap().remove("model");
    for (text, field) in [
        ("[]".to_owned(), "manifest"),
        ("{}".to_owned(), "manifest"),
        (
            json!({"manifest": 3, "digest": "x"}).to_string(),
            "manifest",
        ),
        (
            json!({"manifest": {}, "digest": "x"}).to_string(),
            "format_version",
        ),
        (
            json!({"manifest": nameless, "digest": "x"}).to_string(),
            "model",
        ),
        (json!({"manifest": canonical}).to_string(), "digest"),
        (
            json!({"manifest": canonical, "digest": 5}).to_string(),
            "digest",
        ),
        (
            json!({"manifest": canonical, "digest": "é".repeat(500)}).to_string(),
            "digest",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let message = refusal(place.path(), &path);
        assert!(
            message.contains(&format!("\"{field}\"")),
            "{field}: {message}"
        );
        assert!(message.len() < 1000, "{message}");
    }
    std::fs::write(&path, "[".repeat(100_000)).unwrap();
    assert!(refusal(place.path(), &path).contains("cut or edited"));
    std::fs::write(&path, vec![b' '; 2 << 20]).unwrap();
    assert!(refusal(place.path(), &path).contains("larger than any manifest"));
}

#[test]
fn links_and_other_things_in_place_of_a_manifest_or_directory_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let path = prepared(place.path());
    let aside = place.path().join("aside.json");
    std::fs::rename(&path, &aside).unwrap();
    symlink(&aside, &path).unwrap();
    assert!(refusal(place.path(), &path).contains("symbolic link"));
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
    assert!(refusal(place.path(), &path).contains("not a regular file"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(refusal(place.path(), &path).contains("not a regular file"));
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&aside, &path).unwrap();

    let directory = path.parent().unwrap();
    let aside = place.path().join("aside");
    std::fs::rename(directory, &aside).unwrap();
    symlink(&aside, directory).unwrap();
    assert!(refusal(place.path(), directory).contains("is a link or not a directory"));
    std::fs::remove_file(directory).unwrap();
    std::fs::write(directory, "").unwrap();
    assert!(refusal(place.path(), directory).contains("is a link or not a directory"));
}

#[test]
fn epochs_only_grow_and_the_newest_is_found_again() {
    let place = tempfile::tempdir().unwrap();
    let namespace = Namespace::open(&root(place.path()), &manifest()).unwrap();
    let mut epochs = Epochs::open(namespace.directory()).unwrap();
    assert_eq!(epochs.current(), 1);
    assert_eq!(epochs.advance(0).unwrap(), 2);
    assert_eq!(epochs.advance(10).unwrap(), 10);
    assert_eq!(epochs.advance(3).unwrap(), 11);
    let mut peer = Epochs::open(namespace.directory()).unwrap();
    assert_eq!(peer.advance(0).unwrap(), 12);
    assert_eq!(epochs.current(), 11, "a peer's reset is not followed");
    assert_eq!(epochs.advance(0).unwrap(), 13);
    let directory = namespace.directory().path_of("epochs");
    let names: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names, ["0000000013"]);
    std::fs::write(directory.join("junk"), "").unwrap();
    assert_eq!(Epochs::open(namespace.directory()).unwrap().current(), 13);
}

#[test]
fn a_lost_record_of_epochs_starts_where_recovery_says() {
    let place = tempfile::tempdir().unwrap();
    let namespace = Namespace::open(&root(place.path()), &manifest()).unwrap();
    Epochs::open(namespace.directory())
        .unwrap()
        .advance(7)
        .unwrap();
    std::fs::remove_dir_all(namespace.directory().path_of("epochs")).unwrap();
    let mut epochs = Epochs::open(namespace.directory()).unwrap();
    assert_eq!(epochs.current(), 1);
    assert_eq!(epochs.advance(8).unwrap(), 8);
    assert!(epochs.advance(u32::MAX).is_err());
    assert_eq!(epochs.advance(EPOCH_LAST).unwrap(), EPOCH_LAST);
    assert!(epochs.advance(0).is_err());
    assert_eq!(epochs.current(), EPOCH_LAST);
}

#[test]
fn a_directory_of_epochs_that_vanishes_is_made_again_and_numbers_go_on() {
    let place = tempfile::tempdir().unwrap();
    let namespace = Namespace::open(&root(place.path()), &manifest()).unwrap();
    let mut epochs = Epochs::open(namespace.directory()).unwrap();
    assert_eq!(epochs.advance(7).unwrap(), 7);
    let directory = namespace.directory().path_of("epochs");
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(epochs.advance(0).unwrap(), 8);
    assert!(directory.join("0000000008").exists());
    // One that was put in its place counts, as it will at the next open.
    std::fs::rename(&directory, place.path().join("aside")).unwrap();
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    std::fs::write(directory.join("0000000005"), "").unwrap();
    assert_eq!(epochs.advance(0).unwrap(), 9);
    let again = Epochs::open(namespace.directory()).unwrap();
    assert_eq!((again.current(), again.begun()), (9, false));
    // A link is not followed: there is no record, and that is said.
    std::fs::remove_dir_all(&directory).unwrap();
    symlink(place.path().join("aside"), &directory).unwrap();
    assert!(epochs.advance(0).is_err());
    assert_eq!(epochs.current(), 9);
}

#[test]
fn names_beyond_the_last_epoch_are_ignored_and_a_namespace_near_it_begins_anew() {
    let place = tempfile::tempdir().unwrap();
    let namespace = Namespace::open(&root(place.path()), &manifest()).unwrap();
    let open = || Epochs::open(namespace.directory()).unwrap();
    let directory = namespace.directory().path_of("epochs");
    assert_eq!(open().advance(3).unwrap(), 3);
    for strange in ["4294967295", "4000000001"] {
        std::fs::write(directory.join(strange), "").unwrap();
    }
    std::fs::create_dir(directory.join("0000000900")).unwrap();
    let mut epochs = open();
    assert_eq!((epochs.current(), epochs.strange()), (3, 3));
    assert!(!epochs.used_up());
    assert_eq!(epochs.advance(0).unwrap(), 4);
    assert!(directory.join("4294967295").exists());
    std::fs::write(directory.join("3999999999"), "").unwrap();
    let mut epochs = open();
    assert_eq!(epochs.current(), 3_999_999_999);
    assert!(epochs.used_up());
    epochs.begin_anew().unwrap();
    let again = open();
    assert_eq!((again.current(), again.used_up()), (1, false));
}
