//! JSON values between Python and the core.

use kvstrata_core::error::ErrorKind;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
#[cfg(feature = "stubs")]
use pyo3::{inspect::PyStaticExpr, type_hint_identifier, type_hint_subscript};
use serde_json::{Map, Number, Value};

use crate::arguments::{shown, type_name};
use crate::error::exception;

/// Deepest nesting of a manifest.
const DEPTH_MAX: usize = 64;
/// Most values in a manifest; a manifest names facts, it does not hold data.
const VALUES_MAX: usize = 65_536;

/// The identity fields of a namespace.
pub(crate) struct Manifest(pub(crate) Map<String, Value>);

impl FromPyObject<'_, '_> for Manifest {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("builtins", "dict"),
        type_hint_identifier!("builtins", "str"),
        type_hint_identifier!("typing", "Any")
    );

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let mut reader = Reader {
            values: 0,
            depth: 0,
        };
        match object.cast::<PyDict>() {
            Ok(fields) => reader.object(&fields, "manifest").map(Self),
            Err(_) => Err(refuse(
                &object,
                "manifest",
                "a dict of JSON values is expected",
            )),
        }
    }
}

fn refuse(object: &Bound<'_, PyAny>, path: &str, expected: &str) -> PyErr {
    let text = format!(
        "{path} is {} ({}); {expected}",
        shown(object),
        type_name(object)
    );
    exception(object.py(), ErrorKind::Config, text)
}

/// Reads Python values with limits on depth and number, so that a value that contains itself ends.
struct Reader {
    values: usize,
    depth: usize,
}

impl Reader {
    fn object(&mut self, fields: &Bound<'_, PyDict>, path: &str) -> PyResult<Map<String, Value>> {
        let mut object = Map::new();
        for (name, value) in fields.iter() {
            let Some(name) = name
                .cast::<PyString>()
                .ok()
                .and_then(|text| text.to_str().ok())
            else {
                return Err(refuse(
                    &name,
                    &format!("a key of {path}"),
                    "a str of valid Unicode is expected",
                ));
            };
            let value = self.value(&value, &format!("{path}.{name}"))?;
            object.insert(name.to_owned(), value);
        }
        Ok(object)
    }

    fn value(&mut self, value: &Bound<'_, PyAny>, path: &str) -> PyResult<Value> {
        self.values += 1;
        if self.depth >= DEPTH_MAX || self.values > VALUES_MAX {
            let text =
                format!("manifest holds more than {DEPTH_MAX} levels or {VALUES_MAX} values");
            return Err(exception(value.py(), ErrorKind::Config, text));
        }
        self.depth += 1;
        let read = self.any(value, path);
        self.depth -= 1;
        read
    }

    fn any(&mut self, value: &Bound<'_, PyAny>, path: &str) -> PyResult<Value> {
        if value.is_none() {
            Ok(Value::Null)
        } else if let Ok(flag) = value.cast::<PyBool>() {
            Ok(Value::Bool(flag.is_true()))
        } else if value.is_instance_of::<PyInt>() {
            integer(value, path)
        } else if let Ok(number) = value.cast::<PyFloat>() {
            let finite = Number::from_f64(number.value()).map(Value::Number);
            finite.ok_or_else(|| refuse(value, path, "a finite number is expected"))
        } else if let Ok(text) = value.cast::<PyString>() {
            let text = text
                .to_str()
                .map_err(|_| refuse(value, path, "valid Unicode is expected"))?;
            Ok(Value::String(text.to_owned()))
        } else if let Ok(fields) = value.cast::<PyDict>() {
            self.object(fields, path).map(Value::Object)
        } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            let mut array = Vec::new();
            for (position, item) in value.try_iter()?.enumerate() {
                array.push(self.value(&item?, &format!("{path}[{position}]"))?);
            }
            Ok(Value::Array(array))
        } else {
            Err(refuse(value, path, "a JSON value is expected"))
        }
    }
}

fn integer(value: &Bound<'_, PyAny>, path: &str) -> PyResult<Value> {
    if let Ok(number) = value.extract::<i64>() {
        return Ok(Value::Number(number.into()));
    }
    value
        .extract::<u64>()
        .map(|number| Value::Number(number.into()))
        .map_err(|_| {
            let text = format!("{path} is an int of more than 64 bits; give it as a str");
            exception(value.py(), ErrorKind::Config, text)
        })
}

/// A JSON object as a dict.
pub(crate) fn dict<'py>(
    py: Python<'py>,
    object: &Map<String, Value>,
) -> PyResult<Bound<'py, PyDict>> {
    let made = PyDict::new(py);
    for (name, value) in object {
        made.set_item(name, python(py, value)?)?;
    }
    Ok(made)
}

fn python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Number(number) => {
            if let Some(number) = number.as_i64() {
                number.into_pyobject(py)?.into_any()
            } else if let Some(number) = number.as_u64() {
                number.into_pyobject(py)?.into_any()
            } else {
                PyFloat::new(py, number.as_f64().unwrap_or(f64::NAN)).into_any()
            }
        }
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(python(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(object) => dict(py, object)?.into_any(),
    })
}
