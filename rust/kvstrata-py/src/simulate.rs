//! Traces and their replay.

use kvstrata_core::error::{Error, ErrorKind};
use kvstrata_core::eviction::admission::AdmissionOptions;
use kvstrata_core::simulate::optimum::optimum;
use kvstrata_core::simulate::replay::{Outcome, Setting, TierSetting, replay};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{
    self as named, Deferred, Flag, Number32, Probability, Size, Text, bytes, optional, shown,
};
use crate::error::{exception, raised};

/// A request trace in memory.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Trace(kvstrata_core::simulate::trace::Trace);

#[pymethods]
impl Trace {
    /// Reads a trace from the bytes of its lines.
    ///
    /// Raises ``ArgumentError``, with the number of the line, for anything that is not a trace.
    #[new]
    #[pyo3(signature = (text: "bytes"))]
    fn new(py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = bytes("text", text)?.as_bytes();
        let parsed = py.detach(|| kvstrata_core::simulate::trace::Trace::parse(text));
        parsed.map(Self).map_err(|error| raised(py, &error))
    }

    /// The name in its header, if any.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Number of requests.
    #[getter]
    fn requests(&self) -> usize {
        self.0.requests.len()
    }

    /// Number of different blocks.
    #[getter]
    fn unique_blocks(&self) -> u32 {
        self.0.unique_blocks
    }

    /// Number of blocks that all requests ask for.
    #[getter]
    fn requested(&self) -> u64 {
        self.0.requested()
    }

    /// Tokens of a block.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.0.block_tokens
    }

    /// The blocks of each request, numbered from 0 in the order of first use.
    fn paths(&self) -> Vec<Vec<u32>> {
        let requests = self.0.requests.iter();
        requests.map(|request| request.blocks().collect()).collect()
    }

    /// Blocks that the best cache of so many blocks would have found.
    fn optimum(&self, py: Python<'_>, capacity: Deferred<Size<named::Blocks>>) -> PyResult<u64> {
        let capacity = capacity.value()?;
        Ok(py.detach(|| optimum(&self.0, capacity)))
    }

    /// Replays the trace; returns counts by name.
    ///
    /// ``each``, if a list, is given the number of blocks that each request found in the tier.
    ///
    /// Raises ``ConfigError`` for a policy that is not known, ``ArgumentError`` for a tier of no
    /// blocks, and for what is out of range.
    #[pyo3(
        signature = (
            policy, capacity, *, theta=Deferred::of(0.0), gpu_blocks=Deferred::of(0),
            below_policy=None, below_capacity=Deferred::of(0), below_theta=Deferred::of(0.0),
            store_threshold=Deferred::of(1), directory=None, head_untold=Deferred::of(false),
            told_late=Deferred::of(false), each=None
        ),
        text_signature = "($self, policy, capacity, *, theta=0.0, gpu_blocks=0, below_policy=None, \
            below_capacity=0, below_theta=0.0, store_threshold=1, directory=None, \
            head_untold=False, told_late=False, each=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "all are named")]
    fn replay<'py>(
        &self,
        py: Python<'py>,
        policy: Deferred<Text<named::Policy>>,
        capacity: Deferred<Size<named::Blocks>>,
        theta: Deferred<Probability<named::UseLikelihood>>,
        gpu_blocks: Deferred<Size<named::GpuBlocks>>,
        below_policy: Option<Deferred<Text<named::BelowPolicy>>>,
        below_capacity: Deferred<Size<named::BelowBlocks>>,
        below_theta: Deferred<Probability<named::BelowLikelihood>>,
        store_threshold: Deferred<Number32<named::Requests>>,
        directory: Option<Deferred<Size<named::Known>>>,
        head_untold: Deferred<Flag<named::HeadUntold>>,
        told_late: Deferred<Flag<named::ToldLate>>,
        each: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let append = intern!(py, "append");
        if let Some(each) = &each
            && !each.hasattr(append)?
        {
            let text = format!("each is {}; a list is expected", shown(each));
            return Err(exception(py, ErrorKind::Argument, text));
        }
        let (store_threshold, directory) = (store_threshold.value()?, optional(directory)?);
        let (below_capacity, below_theta) = (below_capacity.value()?, below_theta.value()?);
        let admission = |theta: f32| AdmissionOptions {
            theta,
            store_threshold,
            directory,
            ..AdmissionOptions::default()
        };
        let setting = Setting {
            tier: TierSetting {
                policy: policy.value()?,
                capacity: capacity.value()?,
                directory,
                admission: admission(theta.value()?),
            },
            gpu_blocks: gpu_blocks.value()?,
            below: optional(below_policy)?.map(|policy| TierSetting {
                policy,
                capacity: below_capacity,
                directory,
                admission: admission(below_theta),
            }),
            head_untold: head_untold.value()?,
            told_late: told_late.value()?,
        };
        let mut hits = Vec::new();
        let keep = each.is_some();
        let outcome = py.detach(|| -> Result<Outcome, Error> {
            replay(&self.0, &setting, |found| {
                if keep {
                    hits.push(found);
                }
            })
        });
        let outcome = outcome.map_err(|error| raised(py, &error))?;
        if let Some(each) = each {
            for found in hits {
                each.call_method1(append, (found,))?;
            }
        }
        Ok(counts(py, &outcome)?.into_any())
    }
}

fn counts<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let counts = PyDict::new(py);
    let named = [
        ("requests", outcome.requests),
        ("requested", outcome.requested),
        ("gpu_hits", outcome.gpu_hits),
        ("hits", outcome.hits),
        ("below_hits", outcome.below_hits),
        ("written", outcome.traffic.written),
        ("evicted", outcome.traffic.evicted),
        ("refused", outcome.traffic.refused),
        ("below_written", outcome.below_traffic.written),
        ("policy_bytes", outcome.policy_bytes),
    ];
    for (name, count) in named {
        counts.set_item(name, count)?;
    }
    Ok(counts)
}
