//! Objects, and what is answered about them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::Ordering;

use super::http::Head;
use super::{Shared, locked};

/// Names on one page of a listing.
const PAGE: usize = 1000;

/// Bytes under a name.
#[derive(Clone, Debug)]
pub struct Object {
    /// The body.
    pub bytes: Vec<u8>,
    /// With its quotation marks.
    pub tag: String,
}

impl Object {
    /// The object's `ETag` is made of `version`.
    pub(super) fn new(bytes: Vec<u8>, version: usize) -> Self {
        Self {
            bytes,
            tag: format!("\"v{version}\""),
        }
    }
}

/// An answer without its faults.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn status(status: u16, code: &str) -> Self {
        let body = format!("<Error><Code>{code}</Code></Error>").into_bytes();
        Self {
            status,
            headers: Vec::new(),
            body: if status < 400 { Vec::new() } else { body },
        }
    }
}

/// Answers a request for an object, and does what it asks.
pub(super) fn answer(
    objects: &mut BTreeMap<String, Object>,
    head: &Head,
    name: &str,
    body: Vec<u8>,
    version: usize,
) -> Answer {
    match head.method.as_str() {
        "PUT" => put(objects, head, name, body, version),
        "DELETE" => {
            objects.remove(name);
            Answer::status(204, "")
        }
        _ => match objects.get(name) {
            Some(object) => read(object, head.header("range")),
            None => Answer::status(404, "NoSuchKey"),
        },
    }
}

fn put(
    objects: &mut BTreeMap<String, Object>,
    head: &Head,
    name: &str,
    body: Vec<u8>,
    version: usize,
) -> Answer {
    let there = objects.get(name);
    if head.header("if-none-match") == Some("*") && there.is_some() {
        return Answer::status(412, "PreconditionFailed");
    }
    if let Some(wanted) = head.header("if-match")
        && there.map(|object| object.tag.as_str()) != Some(wanted)
    {
        return Answer::status(412, "PreconditionFailed");
    }
    let object = Object::new(body, version);
    let headers = vec![("ETag", object.tag.clone())];
    objects.insert(name.to_owned(), object);
    Answer {
        status: 200,
        headers,
        body: Vec::new(),
    }
}

fn read(object: &Object, range: Option<&str>) -> Answer {
    let whole = object.bytes.len();
    let mut headers = vec![
        ("ETag", object.tag.clone()),
        ("Last-Modified", "Thu, 01 Jan 2099 00:00:00 GMT".to_owned()),
    ];
    let bounds = range
        .and_then(|range| range.strip_prefix("bytes="))
        .and_then(|range| range.split_once('-'))
        .and_then(|(from, to)| {
            let from: usize = from.parse().ok()?;
            let to = to
                .parse()
                .unwrap_or(usize::MAX - 1)
                .saturating_add(1)
                .min(whole);
            Some((from, to))
        });
    let Some((from, to)) = bounds else {
        return Answer {
            status: 200,
            headers,
            body: object.bytes.clone(),
        };
    };
    let Some(part) = object.bytes.get(from..to).filter(|part| !part.is_empty()) else {
        return Answer::status(416, "InvalidRange");
    };
    headers.push(("Content-Range", format!("bytes {from}-{}/{whole}", to - 1)));
    Answer {
        status: 206,
        headers,
        body: part.to_vec(),
    }
}

/// A page of names. Objects are from a time at which no namespace is idle.
pub(super) fn list(shared: &Shared, head: &Head) -> Answer {
    let objects = locked(&shared.objects);
    let circles = shared.in_circles.load(Ordering::Acquire);
    let unaware = shared.from_the_start.load(Ordering::Acquire);
    let prefix = head.asked("prefix");
    let delimiter = head.asked("delimiter");
    let after = match head.asked("continuation-token") {
        _ if circles => "",
        "" if unaware => "",
        "" => head.asked("start-after"),
        token => token,
    };
    let mut text = String::from("<?xml version=\"1.0\"?><ListBucketResult>");
    let mut common = BTreeSet::new();
    let (mut listed, mut last) = (0_usize, "");
    let mut more = circles;
    let names = objects
        .iter()
        .filter(|(name, _)| name.starts_with(prefix) && name.as_str() > after);
    for (name, object) in names {
        if listed >= PAGE {
            more = true;
            break;
        }
        last = name;
        let rest = name.strip_prefix(prefix).unwrap_or(name);
        if let Some((part, _)) = rest.split_once(delimiter).filter(|_| !delimiter.is_empty()) {
            common.insert(format!("{prefix}{part}{delimiter}"));
            continue;
        }
        listed += 1;
        let _ = write!(
            text,
            "<Contents><Key>{name}</Key><Size>{}</Size><ETag>{}</ETag>\
             <LastModified>2099-01-01T00:00:00.000Z</LastModified></Contents>",
            object.bytes.len(),
            object.tag.replace('"', "&quot;"),
        );
    }
    for prefix in common {
        let _ = write!(
            text,
            "<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>"
        );
    }
    let _ = write!(text, "<IsTruncated>{more}</IsTruncated>");
    if more {
        let _ = write!(
            text,
            "<NextContinuationToken>{last}</NextContinuationToken>"
        );
    }
    text.push_str("</ListBucketResult>");
    Answer {
        status: 200,
        headers: Vec::new(),
        body: text.into_bytes(),
    }
}
