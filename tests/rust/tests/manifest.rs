//! Manifests: what they take, how they are written, what makes two of them differ.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::collections::BTreeMap;
use std::path::Path;

use kvstrata_core::error::{Error, ErrorKind};
use kvstrata_core::key::GroupId;
use kvstrata_core::namespace::{Manifest, Namespace, layout};
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
    let row_bytes = [(GroupId(0), row_bytes), (GroupId(2), 16384)];
    Manifest::new(identity, &BTreeMap::from(row_bytes))
}

fn root(place: &Path) -> Directory {
    Directory::open_root(&place.join("root"), true, ShareMode::Private).unwrap()
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
