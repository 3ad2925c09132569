//! What a manager of vLLM's offloading knows of its requests, as Python sees it.
//!
//! A scheduler looks up key by key, thousands of times a step, so that no call here gives the
//! interpreter lock away: to get it back would take longer than all of them.

mod book;
mod job;
mod outside;
mod packed;

use kvstrata_core::cpu::Handle;
use kvstrata_core::error::ErrorKind;
use kvstrata_core::eviction::request::Context;
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::manager::{Answer, ManagerOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::arguments::{
    self as named, Deferred, Flag, Groups, Keys, Moment, Number32, Numbers, Objects, Pairs,
    Positions, Text, optional, type_name,
};
use crate::cpu_tier::CpuTier;
use crate::error::{exception, raised};
use crate::json;
use crate::tier::hint_of;
pub(crate) use book::Book;
use job::{Job, Prepared, StepEnd, keys_of, loaded};
use outside::Below;
use packed::{Packed, bytes_of, in_prompt_order, positions_of, with_ends};

/// The requests of an offloading manager: what they look up, wait for, pin and hold.
///
/// * ``cpu``: the CPU tier. Call its own methods that change rows only for what this one has not.
/// * ``tiers``: the tiers below, in the order of asking: objects with a ``native``, which is a
///   :class:`kvstrata.Tier` or has its ``lookup``.
/// * ``tokens_per_chunk``: per group id, in the order of the selected groups.
/// * ``answers``: what ``lookup`` returns for miss, hit, on its way, and not known yet.
/// * ``sources``: what ``get_load_source`` returns for the CPU tier and for each tier below.
/// * ``everywhere``: the ``load_tier_filter`` of a request that may load from every tier.
/// * ``allowed``: called with the context of any other; says whether it may load from the CPU
///   tier, and has a bit for each tier below.
/// * ``wait_s``: seconds that a request may be told to ask again.
/// * ``share``, ``request_share``: thousandths of the arena that rows on their way and held for
///   requests may take in all, and for one request.
///
/// Requests are told apart by their context objects, which are held while they live.
#[pyclass(frozen, module = "kvstrata")]
pub(crate) struct RequestBook {
    cpu: Py<CpuTier>,
    tiers: Vec<Py<PyAny>>,
    tokens: Vec<(GroupId, u64)>,
    answers: [Py<PyAny>; 4],
    sources: Vec<Py<PyAny>>,
    everywhere: Py<PyAny>,
    allowed: Py<PyAny>,
}

#[pymethods]
impl RequestBook {
    #[new]
    #[pyo3(signature = (
        cpu: "CpuTier", tiers, tokens_per_chunk, *, answers, sources, everywhere, allowed, wait_s, share,
        request_share
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "each has a name in Python, where they are keywords"
    )]
    fn new(
        cpu: &Bound<'_, PyAny>,
        tiers: Deferred<Objects<named::Tiers>>,
        tokens_per_chunk: Deferred<Pairs<named::TokensPerChunk>>,
        answers: Deferred<Objects<named::Answers>>,
        sources: Deferred<Objects<named::Sources>>,
        everywhere: Py<PyAny>,
        allowed: Py<PyAny>,
        wait_s: Deferred<Moment<named::WaitFor>>,
        share: Deferred<Number32<named::Share>>,
        request_share: Deferred<Number32<named::RequestShare>>,
        py: Python<'_>,
    ) -> PyResult<Self> {
        let cpu = cpu.cast::<CpuTier>().map_err(|_| {
            let text = format!("cpu is {}; a CpuTier is expected", type_name(cpu));
            exception(py, ErrorKind::Argument, text)
        })?;
        let (tiers, sources) = (tiers.value()?, sources.value()?);
        let answers: [Py<PyAny>; 4] = answers.value()?.try_into().map_err(|given: Vec<_>| {
            let text = format!("answers has {} values; four are expected", given.len());
            exception(py, ErrorKind::Argument, text)
        })?;
        let tokens: Vec<(GroupId, u64)> = tokens_per_chunk
            .value()?
            .into_iter()
            .map(|(group, tokens)| (GroupId(group), tokens))
            .collect();
        let options = ManagerOptions {
            tiers: tiers.len(),
            wait_seconds: wait_s.value()?,
            share: share.value()?,
            request_share: request_share.value()?,
            tokens: tokens.clone(),
        };
        cpu.get().shared(py).book = Some(Book::new(options));
        Ok(Self {
            cpu: cpu.clone().unbind(),
            tiers,
            tokens,
            answers,
            sources,
            everywhere,
            allowed,
        })
    }

    /// A request has come; its context names it until ``end``.
    fn begin(&self, py: Python<'_>, context: &Bound<'_, PyAny>) -> PyResult<()> {
        let allowed = self.allowed_to(py, context)?;
        self.with(py, |book, _| book.begin(context, allowed, true))?;
        Ok(())
    }

    /// A request has arrived: its one access to its keys, whichever of them are there.
    ///
    /// ``groups`` has all its keys, group by group in the order of the prompt; the rest is as for
    /// ``Tier.observe``. ``now`` is as for ``end_step``. A context that was not begun is ignored.
    #[pyo3(signature = (context, groups, now, *, prompt_tokens=None, new_tokens=None, hint=None))]
    #[expect(clippy::too_many_arguments, reason = "most are named")]
    fn observe(
        &self,
        py: Python<'_>,
        context: &Bound<'_, PyAny>,
        groups: Deferred<Groups>,
        now: Deferred<Moment<named::Now>>,
        prompt_tokens: Option<Deferred<Number32<named::PromptTokens>>>,
        new_tokens: Option<Deferred<Number32<named::NewTokens>>>,
        hint: Option<Deferred<Text<named::Hint>>>,
    ) -> PyResult<()> {
        let (Groups(groups), now) = (groups.get()?, now.value()?);
        let known = Context {
            prompt_tokens: optional(prompt_tokens)?,
            new_tokens: optional(new_tokens)?,
            hint: hint_of(py, hint)?,
        };
        let keys = with_ends(groups, &self.tokens);
        self.with(py, |book, cpu| {
            if let Some(id) = book.find(context) {
                book.manager.observe(cpu, id, &keys, known, now);
            }
        })
    }

    /// A request was taken out of the batch, and waits to run again.
    fn preempted(&self, py: Python<'_>, context: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(py, |book, cpu| {
            if let Some(id) = book.find(context) {
                book.manager.preempted(cpu, id);
            }
        })
    }

    /// A request has ended: what it pinned, holds and waits for goes.
    #[pyo3(signature = (context, output_tokens=None))]
    fn end(
        &self,
        py: Python<'_>,
        context: &Bound<'_, PyAny>,
        output_tokens: Option<Deferred<Number32<named::OutputTokens>>>,
    ) -> PyResult<()> {
        let output_tokens = optional(output_tokens)?;
        self.with(py, |book, cpu| {
            if let Some(id) = book.forget(context) {
                book.manager.end(cpu, id, output_tokens);
            }
        })
    }

    /// A request runs: it waits for nothing any more.
    fn scheduled(&self, py: Python<'_>, context: &Bound<'_, PyAny>) -> PyResult<()> {
        self.with(py, |book, cpu| {
            if let Some(id) = book.find(context) {
                book.manager.settle(cpu, id);
            }
        })
    }

    /// What there is of a key for a request: one of ``answers``.
    ///
    /// Never raises for a key of bytes.
    fn lookup(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let Ok(key) = key.cast::<PyBytes>() else {
            return Ok(self.answer(py, Answer::Miss));
        };
        let Ok(key) = Key::new(key.as_bytes()) else {
            return Ok(self.answer(py, Answer::Miss));
        };
        let mut shared = self.cpu.get().shared(py);
        if shared
            .book
            .as_mut()
            .is_some_and(|book| book.find(context).is_none())
        {
            // Python is asked without the lock: it may ask this book in turn.
            drop(shared);
            let allowed = self.allowed_to(py, context)?;
            shared = self.cpu.get().shared(py);
            if let Some(book) = &mut shared.book {
                book.begin(context, allowed, false);
            }
        }
        let shared = &mut *shared;
        let Some(book) = &mut shared.book else {
            return Ok(self.answer(py, Answer::Miss));
        };
        let Some(id) = book.find(context) else {
            return Ok(self.answer(py, Answer::Miss));
        };
        let mut below = Below {
            py,
            tiers: &self.tiers,
            contexts: &book.contexts,
        };
        let answer = book.manager.lookup(&mut shared.tier, id, &key, &mut below);
        Ok(self.answer(py, answer))
    }

    /// One of ``sources``: the tier that gave a row while this request waited for it.
    fn get_load_source(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let key = key.cast::<PyBytes>().ok();
        let key = key.and_then(|key| Key::new(key.as_bytes()).ok());
        let tier = self.with(py, |book, _| {
            let id = book.find(context);
            key.zip(id)
                .and_then(|(key, id)| book.manager.source(id, &key))
        })?;
        let at = tier.map_or(0, |tier| tier + 1);
        Ok(self.sources.get(at).map(|source| source.clone_ref(py)))
    }

    /// Pins rows for a worker, and lets what the request pinned and held go.
    ///
    /// Returns keys, and places of groups (int32), chunks (int64) and offsets (int64) as bytes;
    /// None, and nothing is pinned, unless all rows are ready.
    #[pyo3(signature = (keys, context) -> "tuple[tuple[bytes, ...], bytes, bytes, bytes] | None")]
    fn prepare_load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Packed<'py>>> {
        let given = keys_of(keys)?;
        let named: Keys = keys.extract()?;
        let ends = positions_of(context, &given)?;
        let places = self.with(py, |book, cpu| {
            let id = book.find(context);
            book.manager.prepare_load(cpu, id, &named.0, &ends)
        })?;
        let Some(places) = places else {
            return Ok(None);
        };
        let rows = named.0.iter().zip(given).zip(ends).zip(&places);
        let rows = rows.map(|(((key, object), end), place)| (key, object, end, place));
        packed::pack(py, &self.tokens, rows).map(Some)
    }

    /// Takes slots for the keys that have none.
    ///
    /// Returns the keys to store as a list, what ``prepare_load`` returns of them, and the keys
    /// that made room. None where there is no room for all: then nothing has changed.
    #[pyo3(signature = (keys, context) -> "tuple[list[Any], tuple[tuple[bytes, ...], bytes, bytes, bytes], list[bytes]] | None")]
    fn prepare_store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Prepared<'py>>> {
        let given = keys_of(keys)?;
        let named: Keys = keys.extract()?;
        let ends = positions_of(context, &given)?;
        let prepared = self.with(py, |book, cpu| {
            let id = book.find(context);
            book.manager.prepare_store(cpu, id, &named.0, &ends)
        })?;
        let Some(prepared) = prepared.map_err(|error| raised(py, &error))? else {
            return Ok(None);
        };
        let chosen: Vec<(&Key, Bound<'py, PyAny>, Option<u64>)> = prepared
            .positions
            .iter()
            .filter_map(|at| Some((named.0.get(*at)?, given.get(*at)?.clone(), *ends.get(*at)?)))
            .collect();
        let stored = PyList::new(py, chosen.iter().map(|(_, key, _)| key))?;
        let rows = chosen.into_iter().zip(&prepared.places);
        let rows = rows.map(|((key, object, end), place)| (key, object, end, place));
        let packed = packed::pack(py, &self.tokens, rows)?;
        Ok(Some((stored, packed, bytes_of(py, &prepared.evicted))))
    }

    /// Ends stores of a worker; refused rows go.
    ///
    /// Returns the keys that became ready, group by group in the order of the prompt.
    #[pyo3(
        signature = (keys, context, success=Deferred::of(true)),
        text_signature = "($self, keys, context, success=True)"
    )]
    fn complete_store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        context: &Bound<'py, PyAny>,
        success: Deferred<Flag<named::Success>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let success = success.value()?;
        let named: Keys = keys.extract()?;
        let ends = positions_of(context, &keys_of(keys)?)?;
        let keys = in_prompt_order(&named.0, &ends);
        let ready = self.with(py, |book, cpu| {
            book.manager.complete_store(cpu, &keys, success)
        })?;
        let ready: Vec<Key> = ready
            .iter()
            .filter_map(|at| keys.get(*at).copied())
            .collect();
        Ok(bytes_of(py, &ready))
    }

    /// Lets rows go that the workers have loaded.
    ///
    /// Returns refused keys whose rows are gone now.
    fn complete_load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let named: Keys = keys.extract()?;
        let gone = self.with(py, |book, cpu| book.manager.complete_load(cpu, &named.0))?;
        Ok(bytes_of(py, &gone))
    }

    /// Pins the rows that are ready for a tier below to read them: a job.
    #[pyo3(signature = (keys) -> "tuple[tuple[bytes, ...], tuple[int, ...], tuple[int, ...], int]")]
    fn hold<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Job<'py>> {
        let named: Keys = keys.extract()?;
        let held = self.cpu.get().shared(py).tier.hold_ready(&named.0);
        let (keys, places): (Vec<Key>, Vec<(u64, Handle)>) = named
            .0
            .iter()
            .zip(held)
            .filter_map(|(key, place)| place.map(|place| (*key, (place.offset, place.handle))))
            .unzip();
        self.job(py, &keys, &places)
    }

    /// A load from below has ended.
    ///
    /// ``lost`` are positions of rows that did not come, ``busy`` those of them whose slots the
    /// machine may still write to: they stay taken until ``let_go`` of the CPU tier. Returns the
    /// keys whose rows are there now.
    fn load_ended<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        handles: Deferred<Numbers<named::Handles>>,
        lost: Deferred<Positions<named::Lost>>,
        busy: Deferred<Positions<named::Busy>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (handles, lost, busy) = (handles.value()?, lost.value()?, busy.value()?);
        let named: Keys = keys.extract()?;
        let rows = loaded(named.0, handles, lost, busy);
        let ready = self.with(py, |book, cpu| book.manager.load_ended(cpu, &rows))?;
        Ok(bytes_of(py, &ready))
    }

    /// Some worker did not copy these rows: they are misses from now on.
    fn refuse(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let named: Keys = keys.extract()?;
        self.with(py, |book, cpu| book.manager.refuse(cpu, &named.0))
    }

    /// Ends a step at ``now`` seconds of a clock that never goes back.
    ///
    /// Returns the loads to start, each with its tier's number; keys that made room; and a key that
    /// was waited for too long, if any.
    #[pyo3(signature = (now) -> "tuple[list[tuple[int, tuple[tuple[bytes, ...], tuple[int, ...], tuple[int, ...], int]]], list[bytes], bytes | None]")]
    fn end_step<'py>(
        &self,
        py: Python<'py>,
        now: Deferred<Moment<named::Now>>,
    ) -> PyResult<StepEnd<'py>> {
        let now = now.value()?;
        let done = self.with(py, |book, cpu| {
            let mut below = Below {
                py,
                tiers: &self.tiers,
                contexts: &book.contexts,
            };
            let done = book.manager.end_step(cpu, now, &mut below);
            book.drop_dead();
            done
        })?;
        self.step_end(py, &done)
    }

    /// Whether rows wait to be loaded from below, or are being loaded.
    fn is_pending(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |book, _| book.manager.is_pending())
    }

    /// Answers misses and stores nothing from now on.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |book, _| book.manager.stop())
    }

    /// Forgets every row, and what requests know of rows.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |book, cpu| book.manager.reset(cpu))
    }

    /// Counters and gauges: rows wanted, queued, loading and held, and requests that wait.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |book, _| book.manager.stats())?;
        json::dict(py, &stats)
    }
}
