//! A client that does what no client should.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{BoxStream, poll_fn};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing.
    None,
    /// Every request panics.
    Panics,
    /// Listings are never answered, and whoever is woken to look again takes so long about it.
    SlowToLook(Duration),
}

/// Objects in memory behind such a client.
#[derive(Debug)]
pub struct Troubled {
    objects: InMemory,
    trouble: std::sync::Mutex<Trouble>,
    /// Listings so far that were begun in trouble.
    pub listings: AtomicUsize,
}

impl Troubled {
    pub fn new() -> Self {
        Self {
            objects: InMemory::new(),
            trouble: std::sync::Mutex::new(Trouble::None),
            listings: AtomicUsize::new(0),
        }
    }

    pub fn set(&self, trouble: Trouble) {
        *self.trouble.lock().unwrap() = trouble;
    }

    fn meet(&self) -> Trouble {
        let trouble = *self.trouble.lock().unwrap();
        assert_ne!(trouble, Trouble::Panics, "a panic of the test's");
        trouble
    }

    fn listed(&self) -> Option<BoxStream<'static, Result<ObjectMeta>>> {
        let Trouble::SlowToLook(time) = self.meet() else {
            return None;
        };
        self.listings.fetch_add(1, Ordering::SeqCst);
        let mut looks = 0;
        let stream = poll_fn(move |_| {
            looks += 1;
            if looks > 1 {
                std::thread::sleep(time);
            }
            Poll::Pending
        });
        Some(stream.boxed())
    }
}

impl fmt::Display for Troubled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Troubled")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Troubled {
    async fn put_opts(&self, at: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        self.meet();
        self.objects.put_opts(at, body, how).await
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(at, how).await
    }
    async fn get_opts(&self, at: &Path, how: GetOptions) -> Result<GetResult> {
        self.meet();
        self.objects.get_opts(at, how).await
    }
    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.meet();
        self.objects.delete_stream(locations)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = self.listed();
        listed.unwrap_or_else(|| self.objects.list(prefix))
    }
    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = self.listed();
        listed.unwrap_or_else(|| self.objects.list_with_offset(prefix, offset))
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, how).await
    }
}
