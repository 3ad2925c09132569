//! `gc` in a bucket of many rows: alone in its process, for it counts what is allocated.
#![expect(clippy::unwrap_used, reason = "a test fails where it fails")]

mod object_support;
mod tier_support;

use std::fmt;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use kvstrata_core::object::Store;
use kvstrata_core::object::gc::{GcOptions, run};
use kvstrata_core::object::names::{Epoch, Names};
use kvstrata_core::sys::clock::Clock;
use kvstrata_testkit::ManualClock;
use kvstrata_testkit::allocation::Counting;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tier_support::key;

#[global_allocator]
static MEMORY: Counting = Counting::new();

/// Rows that are listed, of one second each.
const ROWS: u64 = 200_000;
/// The names of so many rows alone take more than 20 MB.
const BYTES_MAX: usize = 8 << 20;

/// Answers LIST from a generator.
#[derive(Debug)]
struct Generated(InMemory);

impl fmt::Display for Generated {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Generated")
    }
}

fn row(number: u64) -> ObjectMeta {
    let namespace = format!("some/prefix/m-{:032x}", number % 2);
    let epoch = Epoch {
        number: 1,
        suffix: 1,
    };
    // The clock stands at a thousand million; every other row is of years before.
    let stored_at = (1 + 999 * (number % 2)) * 1_000_000 - ROWS + number;
    ObjectMeta {
        location: Names::new(namespace).row(epoch, &key(number, 0)),
        last_modified: std::time::SystemTime::UNIX_EPOCH
            .checked_add(std::time::Duration::from_secs(stored_at))
            .unwrap()
            .into(),
        size: 1000,
        e_tag: None,
        version: None,
    }
}

#[async_trait::async_trait]
impl ObjectStore for Generated {
    async fn put_opts(&self, at: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        self.0.put_opts(at, body, how).await
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(at, how).await
    }
    async fn get_opts(&self, at: &Path, how: GetOptions) -> Result<GetResult> {
        self.0.get_opts(at, how).await
    }
    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        locations
    }
    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        stream::iter(0..ROWS).map(|number| Ok(row(number))).boxed()
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, how).await
    }
}

#[test]
fn memory_does_not_grow_with_the_rows_of_a_bucket() {
    let store: Store = Arc::new(Generated(InMemory::new()));
    let options = object_support::given_options();
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::default());
    let what = GcOptions {
        capacity_bytes: Some(ROWS * 250),
        ..GcOptions::default()
    };
    MEMORY.take_peak_bytes();
    let before = MEMORY.live_bytes();
    let report = run(&options, Some(&store), &clock, what, &|| false).unwrap();
    let peak = MEMORY.take_peak_bytes().saturating_sub(before);
    // The idle namespace goes as a whole, and the older half of the other.
    assert_eq!(report.removed_rows, ROWS / 4 * 3);
    assert_eq!((report.kept_rows, report.emptied.len()), (ROWS / 4, 1));
    assert!(peak < BYTES_MAX, "{peak}");
}
