//! A small server of S3's protocol that misbehaves on request, on a port of its own.
//!
//! It keeps objects in memory, asks for no signature, and speaks HTTP/1.1 over plain sockets, so
//! that a fault is what a client really meets: a reset, half a body, a connection nobody reads.

mod fault;
mod http;
mod objects;
mod serve;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

pub use fault::{BucketFault, Method, Rule};
pub use objects::Object;

/// Where a request names the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// In the path.
    Path,
    /// Before the host's name.
    Virtual,
}

/// What connections share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) objects: Mutex<BTreeMap<String, Object>>,
    pub(crate) rules: Mutex<Vec<Rule>>,
    pub(crate) seen: Mutex<Vec<(Method, String)>>,
    pub(crate) hanging: Mutex<Vec<TcpStream>>,
    pub(crate) versions: AtomicUsize,
    pub(crate) connections: AtomicUsize,
    pub(crate) stop: AtomicBool,
    pub(crate) unconditional: AtomicBool,
    pub(crate) trusting: AtomicBool,
    pub(crate) whole: AtomicBool,
    pub(crate) from_the_start: AtomicBool,
    pub(crate) in_circles: AtomicBool,
    pub(crate) checked: AtomicUsize,
    pub(crate) newest: Mutex<Option<Newest>>,
    pub(crate) only_style: Mutex<Option<Style>>,
}

/// Which objects are kept where only the newest are: their names and sizes, the oldest first.
#[derive(Debug)]
pub(crate) struct Newest {
    bytes_max: usize,
    bytes: usize,
    names: VecDeque<(String, usize)>,
}

impl Newest {
    /// Notes an object; the names of those that are to go.
    pub(crate) fn note(&mut self, name: &str, bytes: usize) -> Vec<String> {
        self.bytes += bytes;
        self.names.push_back((name.to_owned(), bytes));
        let mut gone = Vec::new();
        while self.bytes > self.bytes_max
            && let Some((name, bytes)) = self.names.pop_front()
        {
            self.bytes -= bytes;
            gone.push(name);
        }
        gone
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The server; it ends when this is dropped.
#[derive(Debug)]
pub struct Bucket {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Bucket {
    /// Starts it on a free port. Its bucket is named `bucket`.
    ///
    /// # Errors
    /// The operating system's.
    pub fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = Builder::new()
            .name("bucket".to_owned())
            .spawn(move || accept(&listener, &own))?;
        Ok(Self {
            address,
            shared,
            thread: Some(thread),
        })
    }

    /// `http://host:port`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Has requests meet a fault from now on.
    pub fn rule(&self, rule: Rule) {
        locked(&self.shared.rules).push(rule);
    }

    /// Has the server overwrite whatever is there, as older ones do: it ignores conditions.
    pub fn ignore_conditions(&self) {
        self.shared.unconditional.store(true, Ordering::Release);
    }

    /// Has the server send whole objects, whatever part of them is asked for.
    pub fn ignore_ranges(&self) {
        self.shared.whole.store(true, Ordering::Release);
    }

    /// Has listings begin with the first name, wherever they are asked to.
    pub fn list_from_the_start(&self) {
        self.shared.from_the_start.store(true, Ordering::Release);
    }

    /// Has listings never end: each page is the first, and says that it is followed by another.
    pub fn list_in_circles(&self) {
        self.shared.in_circles.store(true, Ordering::Release);
    }

    /// Has the server believe that bodies are what was sent, which costs less.
    pub fn trust(&self) {
        self.shared.trusting.store(true, Ordering::Release);
    }

    /// Has the server forget the oldest objects beyond so many bytes, but for small ones: what it
    /// keeps then costs no new memory.
    pub fn keep_newest(&self, bytes_max: usize) {
        *locked(&self.shared.newest) = Some(Newest {
            bytes_max,
            bytes: 0,
            names: VecDeque::new(),
        });
    }

    /// Number of bodies so far that came with a checksum, and the right one. A wrong one is refused.
    pub fn checked(&self) -> usize {
        self.shared.checked.load(Ordering::Relaxed)
    }

    /// Has the server look for its bucket there only.
    pub fn only(&self, style: Style) {
        *locked(&self.shared.only_style) = Some(style);
    }

    /// `http://localhost:port`, which buckets' names can stand before.
    pub fn named_endpoint(&self) -> String {
        format!("http://localhost:{}", self.address.port())
    }

    /// Ends all faults; connections that hang are closed.
    pub fn heal(&self) {
        locked(&self.shared.rules).clear();
        for stream in locked(&self.shared.hanging).drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Names of all objects, in order.
    pub fn names(&self) -> Vec<String> {
        locked(&self.shared.objects).keys().cloned().collect()
    }

    /// The bytes of an object.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let objects = locked(&self.shared.objects);
        objects.get(name).map(|object| object.bytes.clone())
    }

    /// Puts an object, as somebody else would.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let version = self.shared.versions.fetch_add(1, Ordering::Relaxed);
        locked(&self.shared.objects).insert(name.to_owned(), Object::new(bytes, version));
    }

    /// Removes an object, as somebody else would.
    pub fn remove(&self, name: &str) -> bool {
        locked(&self.shared.objects).remove(name).is_some()
    }

    /// Number of connections so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Number of requests by this method so far for names that contain `part`.
    pub fn seen(&self, method: Method, part: &str) -> usize {
        let seen = locked(&self.shared.seen);
        seen.iter()
            .filter(|(of, name)| *of == method && name.contains(part))
            .count()
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.heal();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else { continue };
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let own = Arc::clone(shared);
        // A thread for each connection; it ends with the connection.
        let _ = Builder::new()
            .name("bucket-connection".to_owned())
            .spawn(move || serve::serve(&stream, &own));
    }
}
