//! Opening a namespace: what agrees opens, what does not says which field and where.

#![expect(
    clippy::disallowed_methods,
    reason = "namespaces are damaged from the outside"
)]
#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use kvstrata_core::error::{Error, ErrorKind};
use kvstrata_core::key::GroupId;
use kvstrata_core::namespace::{Epochs, Manifest, Namespace, layout};
use kvstrata_core::sys::fs::{Directory, ShareMode};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn manifest_of(identity: Value) -> Manifest {
    try_manifest(identity, 131_072).unwrap()
}

fn try_manifest(identity: Value, row_bytes: u64) -> Result<Manifest, Error> {
    let Value::Object(identity) = identity else {
        panic!("an object is expected")
    };
    Manifest::new(
        identity,
        &BTreeMap::from([(GroupId(0), row_bytes), (GroupId(2), 16384)]),
    )
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
fn a_manifest_that_says_too_little_or_too_much_is_refused_with_the_field() {
    let mut deep = json!(1);
    for _ in 0..10_000 {
        deep = Value::Array(vec![deep]);
    }
    let large = "x".repeat(600 << 10);
    for (identity, row_bytes, expected) in [
        (json!({}), 1, "\"model\" is missing"),
        (json!({"model": ""}), 1, "\"model\" is \"\""),
        (json!({"model": 7}), 1, "\"model\" is 7"),
        (
            json!({"model": "m", "row_bytes": 1}),
            1,
            "\"row_bytes\" is added",
        ),
        (
            json!({"model": "m", "format_version": 1}),
            1,
            "\"format_version\" is added",
        ),
        (
            json!({"model": "m", "checksum": "none"}),
            1,
            "\"checksum\" is added",
        ),
        (
            json!({"model": "m", "endianness": "big"}),
            1,
            "\"endianness\" is added",
        ),
        (json!({"model": "m"}), 0, "row_bytes of group 0 is 0"),
        (
            json!({"model": "m"}),
            (1 << 30) + 1,
            "row_bytes of group 0 is 1073741825",
        ),
        (
            json!({"model": "m", "note": large}),
            1,
            "bytes; 524288 are possible",
        ),
        (
            Value::Object(Map::from_iter([("deep".to_owned(), deep)])),
            1,
            "64 deep",
        ),
    ] {
        let error = try_manifest(identity, row_bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(expected), "{error}");
    }
    let error = Manifest::new(Map::new(), &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("row_bytes"), "{error}");
}

#[test]
fn the_canonical_text_is_sorted_and_has_one_form_for_every_value() {
    let manifest = manifest_of(json!({
        "model": "m", "é": "\u{1}\t\u{7f}/", "B": null, "a": true,
        "z": [1, 1.0, 1e15, 1e16, 1e-4, 1.5e-5, -0.0],
    }));
    assert_eq!(
        manifest.canonical(),
        "{\"B\":null,\"a\":true,\"checksum\":\"crc64nvme\",\"endianness\":\"little\",\
         \"format_version\":1,\"model\":\"m\",\"row_bytes\":{\"0\":131072,\"2\":16384},\
         \"z\":[1,1.0,1000000000000000.0,1e16,0.0001,1.5e-5,-0.0],\"é\":\"\\u0001\\u0009\u{7f}/\"}"
    );
}

#[test]
fn every_changed_field_changes_the_digest_and_is_the_one_difference() {
    let base = json!({
        "model": "m", "dtype": "bf16", "tp": 1, "pp": {"size": 1, "rank": 0}, "rope": [1.0, null],
        "layout": "NHD", "revision": null,
    });
    let ours = manifest_of(base.clone());
    for (pointer, value, field) in [
        ("/model", json!("n"), "model"),
        ("/dtype", json!("fp16"), "dtype"),
        ("/tp", json!(1.0), "tp"),
        ("/pp/size", json!(2), "pp.size"),
        ("/rope/1", json!(0), "rope.1"),
        ("/rope", json!([1.0]), "rope"),
        ("/layout", json!({}), "layout"),
        ("/revision", json!("abc"), "revision"),
    ] {
        let mut changed = base.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        let theirs = manifest_of(changed);
        assert_ne!(ours.digest(), theirs.digest());
        let fields: Vec<String> = ours
            .differences(&theirs)
            .into_iter()
            .map(|difference| difference.field)
            .collect();
        assert_eq!(fields, [field]);
    }
    let sizes = try_manifest(base, 65536).unwrap();
    assert_eq!(ours.differences(&sizes)[0].field, "row_bytes.0");
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".*".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(".{0,4}", inner, 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn a_manifest_of_any_values_opens_again(value in values()) {
        let place = tempfile::tempdir().unwrap();
        let manifest = manifest_of(json!({"model": "m", "value": value}));
        prop_assert!(Namespace::open(&root(place.path()), &manifest).is_ok());
        prop_assert!(Namespace::open(&root(place.path()), &manifest).is_ok());
    }

    #[test]
    fn two_manifests_differ_in_no_field_exactly_when_their_texts_are_equal(
        one in values(), two in values(),
    ) {
        let one = manifest_of(json!({"model": "m", "value": one}));
        let two = manifest_of(json!({"model": "m", "value": two}));
        prop_assert_eq!(one.differences(&two).is_empty(), one.canonical() == two.canonical());
        prop_assert!(one.differences(&one.clone()).is_empty());
    }

    #[test]
    fn any_model_name_names_one_plain_directory(model in ".{1,200}") {
        let name = layout::directory_name(&manifest_of(json!({"model": model})));
        prop_assert!(layout::is_directory_name(&name), "{}", name);
        prop_assert!(name.len() <= 97 && !name.starts_with('.'));
    }
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
    assert!(epochs.advance(u32::MAX).is_ok());
    assert!(epochs.advance(0).is_err());
    assert_eq!(epochs.current(), u32::MAX);
}
