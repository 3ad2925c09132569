//! Lookups in a namespace of a million rows: the engine thread's time, and the tier's memory.
//!
//! The bucket is in this process: it answers LIST and HEAD from a sorted list of keys.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::default_trait_access,
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::too_many_lines,
    reason = "a benchmark fails where these fail, and prints its figures"
)]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use kvstrata_core::key::{GroupId, Key};
use kvstrata_core::object::names::{fan_out, parse_row};
use kvstrata_core::object::options::Environment;
use kvstrata_core::object::{Addressing, HEADER_BYTES, Location, NamedFiles, ObjectOptions, Store};
use kvstrata_core::tier::{Seams, Tier};
use kvstrata_testkit::memory::leaked_arena;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rustix::time::{ClockId, clock_gettime};

const KEYS: u32 = 1_000_000;
const LOOKED_UP: usize = 6000;
const ROW_BYTES: u64 = 65_536;
const ROUNDS: usize = 500;

/// Keys of rows in the order of their names.
#[derive(Debug)]
struct Generated {
    others: InMemory,
    keys: Arc<Vec<(u32, Key)>>,
}

impl fmt::Display for Generated {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Generated")
    }
}

fn key(number: u32) -> Key {
    let mut bytes = [0; 36];
    for (at, chunk) in bytes.chunks_mut(4).take(8).enumerate() {
        let mixed = (u64::from(number) + at as u64 * 7_919).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        chunk.copy_from_slice(&mixed.to_be_bytes()[..4]);
    }
    Key::new(&bytes).expect("a key")
}

fn meta(prefix: &str, fan_out: u32, key: &Key) -> ObjectMeta {
    use std::fmt::Write;
    let mut name = format!("{prefix}/{fan_out:02x}/");
    for byte in key.as_bytes() {
        let _ = write!(name, "{byte:02x}");
    }
    ObjectMeta {
        location: Path::from(name),
        last_modified: Default::default(),
        size: ROW_BYTES + HEADER_BYTES as u64,
        e_tag: None,
        version: None,
    }
}

impl Generated {
    /// What HEAD says of a row.
    fn answer(&self, at: &Path, fan_out: u32, key: &Key) -> Result<GetResult> {
        let place = |(own, own_key): &(u32, Key)| {
            (*own, own_key.as_bytes()).cmp(&(fan_out, key.as_bytes()))
        };
        if self.keys.binary_search_by(place).is_err() {
            return Err(object_store::Error::NotFound {
                path: at.to_string(),
                source: "no such row".into(),
            });
        }
        let size = ROW_BYTES + HEADER_BYTES as u64;
        let meta = ObjectMeta {
            location: at.clone(),
            last_modified: Default::default(),
            size,
            e_tag: None,
            version: None,
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream::empty().boxed()),
            meta,
            range: 0..size,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn rows(&self, prefix: &Path, from: usize) -> BoxStream<'static, Result<ObjectMeta>> {
        let keys = Arc::clone(&self.keys);
        let prefix = prefix.to_string();
        let range: Range<usize> = from..keys.len();
        stream::iter(range)
            .map(move |at| {
                let (fan_out, key) = &keys[at];
                Ok(meta(&prefix, *fan_out, key))
            })
            .boxed()
    }
}

#[async_trait::async_trait]
impl ObjectStore for Generated {
    async fn put_opts(&self, at: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        self.others.put_opts(at, body, how).await
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.others.put_multipart_opts(at, how).await
    }
    async fn get_opts(&self, at: &Path, how: GetOptions) -> Result<GetResult> {
        if how.head
            && let Some((fan_out, key)) = parse_row(at.as_ref())
        {
            return self.answer(at, fan_out, &key);
        }
        self.others.get_opts(at, how).await
    }
    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.others.delete_stream(locations)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match prefix.filter(|prefix| prefix.as_ref().contains("/rows/")) {
            Some(prefix) => self.rows(prefix, 0),
            None => self.others.list(prefix),
        }
    }
    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let fan = offset
            .filename()
            .and_then(|part| u32::from_str_radix(part, 16).ok());
        let (Some(prefix), Some(fan)) = (prefix, fan) else {
            return self.others.list_with_offset(prefix, offset);
        };
        let from = self.keys.partition_point(|(own, _)| *own < fan);
        self.rows(prefix, from)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.others.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> Result<()> {
        self.others.copy_opts(from, to, how).await
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        used.tv_sec.unsigned_abs(),
        used.tv_nsec.unsigned_abs() as u32,
    )
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

fn main() {
    let mut keys: Vec<(u32, Key)> = (0..KEYS).map(key).map(|key| (fan_out(&key), key)).collect();
    keys.sort_unstable_by(|a, b| (a.0, a.1.as_bytes()).cmp(&(b.0, b.1.as_bytes())));
    let store: Store = Arc::new(Generated {
        others: InMemory::new(),
        keys: Arc::new(keys),
    });
    let mut identity = serde_json::Map::new();
    identity.insert("model".into(), "m".into());
    let options = ObjectOptions {
        location: Location::parse("memory://bucket/p")
            .ok()
            .flatten()
            .expect("a location"),
        identity,
        row_bytes: [(GroupId(0), ROW_BYTES)].into(),
        endpoint: None,
        region: None,
        addressing: Addressing::Auto,
        allow_http: false,
        ca_bundle: None,
        deadline: Duration::from_secs(30),
        required: true,
        environment: Environment::default(),
        files: NamedFiles::default(),
        limits: kvstrata_core::object::limits::ObjectLimits::default(),
    };
    let before = resident_bytes();
    let arena = leaked_arena(1 << 20, 0).expect("memory");
    let begun = Instant::now();
    let tier = Tier::open_object_shared(options, arena, Seams::default(), Some(store))
        .expect("the tier opens");
    let stat = |name: &str| tier.stats().expect("open")[name].as_u64().unwrap_or(0);
    let mut times = Vec::new();
    let mut look = |round: usize| {
        let first = (round * 7919) as u32 % (KEYS - LOOKED_UP as u32);
        // Neighbours in number are anywhere in the order of names; one in ten is not there.
        let asked: Vec<Key> = (0..LOOKED_UP as u32)
            .map(|at| {
                key(if at % 10 == 0 {
                    KEYS + first + at
                } else {
                    first + at
                })
            })
            .collect();
        let begun = (Instant::now(), thread_time());
        let found = tier.lookup(&asked).expect("open");
        times.push((begun.0.elapsed(), thread_time().saturating_sub(begun.1)));
        found.iter().filter(|found| **found == Some(true)).count()
    };
    let mut while_listing = 0;
    while stat("complete_listings") == 0 {
        look(while_listing);
        while_listing += 1;
        std::thread::sleep(Duration::from_millis(10));
    }
    let listed = begun.elapsed();
    let hits: usize = (0..ROUNDS).map(&mut look).sum();
    let listed_times = times.split_off(while_listing);
    let memory = resident_bytes().saturating_sub(before);
    let told = |name: &str, times: Vec<(Duration, Duration)>| {
        let (whole, own): (Vec<_>, Vec<_>) = times.into_iter().unzip();
        for (kind, mut times) in [("by the clock", whole), ("on the processor", own)] {
            times.sort_unstable();
            let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
            println!(
                "{name}, {kind}: {} lookups of {LOOKED_UP} keys, p50 {:.3} ms, p99 {:.3} ms, \
                 longest {:.3} ms",
                times.len(),
                at(50),
                at(99),
                at(100)
            );
        }
    };
    told("while it was listed", times);
    told("afterwards", listed_times);
    println!(
        "{} names listed in {:.1} s; {} of {} keys found; {} MiB beside the store; {} verdicts",
        stat("listed_names"),
        listed.as_secs_f64(),
        hits,
        ROUNDS * LOOKED_UP,
        memory >> 20,
        stat("verdicts"),
    );
}
