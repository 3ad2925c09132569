//! Numbers of a width, and sequences of them and of anything.

#[cfg(feature = "stubs")]
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyString};

use super::keys::RESERVED_MAX;
use super::named::{Argument, Form, number};

/// Declares forms that are what `PyO3` makes a type of: alias, form, type, how it is read, what is
/// expected.
macro_rules! forms {
    ($($alias:ident, $form:ident, $type:ty, $read:path, $expected:literal;)*) => {$(
        #[doc = concat!("See [`", stringify!($alias), "`].")]
        pub(crate) enum $form {}
        #[doc = concat!($expected, ".")]
        pub(crate) type $alias<N> = Argument<N, $form>;

        impl Form for $form {
            type Value = $type;
            const EXPECTED: &'static str = $expected;
            #[cfg(feature = "stubs")]
            const TYPE: PyStaticExpr = <$type as FromPyObject<'_, '_>>::INPUT_TYPE;

            fn read(object: &Bound<'_, PyAny>) -> Option<$type> {
                $read(object)
            }
        }
    )*};
}

forms! {
    Number32, Number32Form, u32, number, "an int from 0 to 2**32 - 1";
    Number64, Number64Form, u64, number, "an int from 0 to 2**64 - 1";
    Size, SizeForm, usize, number, "an int from 0 to 2**64 - 1";
    Moment, MomentForm, f64, finite, "a number of seconds";
    Numbers, NumbersForm, Vec<u64>, sequence, "a sequence of ints from 0 to 2**64 - 1";
    Positions, PositionsForm, Vec<usize>, sequence, "a sequence of ints from 0 to 2**64 - 1";
    Pairs, PairsForm, Vec<(u32, u64)>, sequence, "a sequence of pairs of ints";
    Objects, ObjectsForm, Vec<Py<PyAny>>, sequence, "a sequence";
}

fn finite(object: &Bound<'_, PyAny>) -> Option<f64> {
    number::<f64>(object).filter(|seconds| seconds.is_finite())
}

/// Read one by one: `PyO3`'s own way reserves as much as `len()` promises, whatever that is.
fn sequence<'py, T: FromPyObjectOwned<'py>>(object: &Bound<'py, PyAny>) -> Option<Vec<T>> {
    if object.is_instance_of::<PyString>() {
        return None;
    }
    let items = object.cast::<PySequence>().ok()?.try_iter().ok()?;
    let mut all = Vec::with_capacity(object.len().unwrap_or(0).min(RESERVED_MAX));
    for item in items {
        all.push(item.ok()?.extract().ok()?);
    }
    Some(all)
}
