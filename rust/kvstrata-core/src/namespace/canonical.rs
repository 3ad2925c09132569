//! The one text of a JSON value that digests are computed over; `docs/FORMAT.md` states it.

use core::fmt::Write;

use serde_json::{Map, Number, Value};

/// Deepest nesting of a manifest: the JSON reader's own limit is 128.
const DEPTH_MAX: usize = 64;

/// Whether no path in `object` is longer than [`DEPTH_MAX`].
pub(super) fn is_shallow(object: &Map<String, Value>) -> bool {
    object.values().all(|value| depth_fits(value, DEPTH_MAX))
}

/// Whether `value` nests at most `left` deep. Never recurses deeper than that.
fn depth_fits(value: &Value, left: usize) -> bool {
    let Some(left) = left.checked_sub(1) else {
        return false;
    };
    match value {
        Value::Array(items) => items.iter().all(|item| depth_fits(item, left)),
        Value::Object(fields) => fields.values().all(|field| depth_fits(field, left)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

/// The canonical text of an object.
pub(super) fn object_text(object: &Map<String, Value>) -> String {
    let mut text = String::new();
    write_object(&mut text, object);
    text
}

/// The canonical text of any value.
pub(super) fn value_text(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value);
    text
}

/// Fields sorted by the bytes of their names, whatever order the map keeps.
fn write_object(text: &mut String, object: &Map<String, Value>) {
    let mut fields: Vec<(&String, &Value)> = object.iter().collect();
    fields.sort_by_key(|(name, _)| name.as_bytes());
    text.push('{');
    for (position, (name, value)) in fields.into_iter().enumerate() {
        if position > 0 {
            text.push(',');
        }
        write_string(text, name);
        text.push(':');
        write_value(text, value);
    }
    text.push('}');
}

fn write_value(text: &mut String, value: &Value) {
    match value {
        Value::Null => text.push_str("null"),
        Value::Bool(true) => text.push_str("true"),
        Value::Bool(false) => text.push_str("false"),
        Value::Number(number) => write_number(text, number),
        Value::String(string) => write_string(text, string),
        Value::Array(items) => {
            text.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    text.push(',');
                }
                write_value(text, item);
            }
            text.push(']');
        }
        Value::Object(fields) => write_object(text, fields),
    }
}

/// Integers in decimal; other numbers as the shortest decimal that reads back to the same double,
/// always with a point or an exponent.
fn write_number(text: &mut String, number: &Number) {
    // Writing to a string cannot fail.
    let _ = match number.as_f64() {
        Some(float) if number.is_f64() => write!(text, "{float:?}"),
        _ => write!(text, "{number}"),
    };
}

/// Escapes what JSON must and nothing else.
fn write_string(text: &mut String, string: &str) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\u{0}'..='\u{1f}' => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\u{:04x}", u32::from(character));
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}
