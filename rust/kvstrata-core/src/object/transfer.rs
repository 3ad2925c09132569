//! One row between its slot and its object.

use core::panic::AssertUnwindSafe;
use core::pin::pin;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, GetResult, ObjectStoreExt, PutMode, PutPayload, UpdateVersion,
};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::watch;
use tokio::time::timeout_at;

use crate::buffer::Arena;
use crate::format::combined::{PayloadChecksum, Shift};
use crate::format::{NamespaceDigest, RowChecksum, RowHasher};
use crate::key::Key;
use crate::object::cut::Cut;
use crate::object::header::{HEADER_BYTES, HeaderError, RowHeader};
use crate::object::names::Epoch;
use crate::object::signing::put_with;
use crate::object::slot::lend;
use crate::object::{Failure, FailureKind, Store};
use crate::sys::sync::Arc;

/// A row and its slot.
#[derive(Clone, Debug)]
pub struct Row {
    /// Name of its object.
    pub path: Path,
    /// The namespace it belongs to.
    pub namespace: NamespaceDigest,
    /// The epoch it belongs to.
    pub epoch: Epoch,
    /// Its key.
    pub key: Key,
    /// First byte of the slot.
    pub offset: usize,
    /// Payload bytes.
    pub row_bytes: usize,
    /// Their number, for checksums.
    pub shift: Shift,
}

/// How a read of an object ended without the row.
#[derive(Clone, Debug)]
pub enum ReadFault {
    /// The object is not the row: what it was is told, and its `ETag` where there is one.
    Foreign(Option<String>, &'static str),
    /// The object is of a newer form than we know: somebody's row, and left alone.
    Newer,
    /// The request failed.
    Failed(Failure),
}

/// How a store goes about objects that are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It fails.
    Create,
    /// It replaces any.
    Overwrite,
    /// It replaces the one with this `ETag`.
    Replace(String),
}

impl From<object_store::Error> for ReadFault {
    fn from(error: object_store::Error) -> Self {
        Self::Failed(Failure::of(&error))
    }
}

impl Row {
    fn object_bytes(&self) -> u64 {
        wide(HEADER_BYTES).saturating_add(wide(self.row_bytes))
    }

    /// Whether the header of an object is this row's.
    fn is_of(&self, header: &RowHeader) -> bool {
        header.namespace == self.namespace
            && header.key == self.key
            && header.epoch == self.epoch
            && header.payload_bytes == wide(self.row_bytes)
    }
}

/// A length as a number of bytes.
fn wide(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// Reads the object of a row into its slot and verifies it there. Whatever the outcome, nothing
/// writes to the slot after this has returned or its future was dropped.
///
/// # Errors
/// [`ReadFault`]: the slot holds bytes that mean nothing.
pub async fn get(store: &Store, arena: &Arena, row: &Row) -> Result<(), ReadFault> {
    let result = store.get_opts(&row.path, GetOptions::default()).await?;
    let tag = result.meta.e_tag.clone();
    if result.meta.size != row.object_bytes() {
        return Err(of_another_length(result, tag).await);
    }
    receive(result, arena, row, tag).await
}

/// What an object is that is longer or shorter than the row.
async fn of_another_length(result: GetResult, tag: Option<String>) -> ReadFault {
    let mut stream = result.into_stream();
    let mut head = Vec::with_capacity(HEADER_BYTES);
    while head.len() < HEADER_BYTES
        && let Some(piece) = stream.next().await
    {
        match piece {
            Ok(piece) => {
                let missing = HEADER_BYTES.saturating_sub(head.len()).min(piece.len());
                head.extend_from_slice(piece.get(..missing).unwrap_or(&[]));
            }
            Err(error) => return error.into(),
        }
    }
    match RowHeader::decode(&head) {
        Err(HeaderError::NewerVersion) => ReadFault::Newer,
        _ => ReadFault::Foreign(tag, "has another length"),
    }
}

async fn receive(
    result: GetResult,
    arena: &Arena,
    row: &Row,
    tag: Option<String>,
) -> Result<(), ReadFault> {
    let mut stream = result.into_stream();
    let mut head = Vec::with_capacity(HEADER_BYTES);
    let mut expected: Option<RowChecksum> = None;
    let mut hasher = RowHasher::new(&row.namespace, &row.key, wide(row.row_bytes));
    let mut filled = 0_usize;
    while let Some(piece) = stream.next().await {
        let mut piece = piece?;
        if expected.is_none() {
            let missing = HEADER_BYTES.saturating_sub(head.len()).min(piece.len());
            head.extend_from_slice(&piece.split_to(missing));
            if head.len() < HEADER_BYTES {
                continue;
            }
            match RowHeader::decode(&head) {
                Ok(header) if row.is_of(&header) => expected = Some(header.checksum),
                Err(HeaderError::NewerVersion) => return Err(ReadFault::Newer),
                _ => return Err(ReadFault::Foreign(tag, "is another row's or none")),
            }
        }
        let end = filled.saturating_add(piece.len());
        let place = row.offset.saturating_add(filled);
        if end > row.row_bytes || !arena.copy_in(place, &piece) {
            return Err(ReadFault::Foreign(tag, "is longer than its row"));
        }
        hasher.update(&piece);
        filled = end;
    }
    if filled != row.row_bytes {
        let text = format!("{filled} of {} bytes came", row.row_bytes);
        return Err(ReadFault::Failed(Failure::new(FailureKind::Broken, text)));
    }
    if expected == Some(hasher.finish()) {
        Ok(())
    } else {
        Err(ReadFault::Foreign(tag, "does not match its checksum"))
    }
}

/// Reads the header of a row's object alone; the object's `ETag` where it is this row's.
///
/// # Errors
/// [`ReadFault`].
pub async fn get_header(store: &Store, row: &Row) -> Result<Option<String>, ReadFault> {
    let options = GetOptions {
        range: Some(GetRange::Bounded(0..wide(HEADER_BYTES))),
        ..GetOptions::default()
    };
    let result = match store.get_opts(&row.path, options).await {
        Ok(result) => result,
        Err(error) => {
            let failure = Failure::of(&error);
            return Err(if failure.kind == FailureKind::OutOfRange {
                ReadFault::Foreign(None, "is empty")
            } else {
                ReadFault::Failed(failure)
            });
        }
    };
    let tag = result.meta.e_tag.clone();
    if result.meta.size != row.object_bytes() {
        return Err(of_another_length(result, tag).await);
    }
    let bytes = result.bytes().await?;
    match RowHeader::decode(&bytes) {
        Ok(header) if row.is_of(&header) => Ok(tag),
        Err(HeaderError::NewerVersion) => Err(ReadFault::Newer),
        _ => Err(ReadFault::Foreign(tag, "is another row's or none")),
    }
}

/// Writes a row's object from its slot, in one request. Returns only when nothing reads the slot
/// any more, which is at once after the request's end, after `deadline`, or after `stop` became
/// true: a connection that still has some of it is cut.
///
/// # Errors
/// The request's failure; [`FailureKind::Late`] past `deadline`, or when stopped.
pub async fn put(
    store: &Store,
    arena: &Arc<Arena>,
    row: &Row,
    mode: &Mode,
    deadline: Instant,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Failure> {
    let (body, mut released) = lend(arena, row.offset, row.row_bytes);
    let checksum = PayloadChecksum::of(&body, row.shift);
    let header = RowHeader {
        namespace: row.namespace,
        key: row.key,
        payload_bytes: wide(row.row_bytes),
        checksum: checksum.of_row(&row.namespace, &row.key),
        epoch: row.epoch,
    };
    let header = header.encode();
    let mode = match mode {
        Mode::Create => PutMode::Create,
        Mode::Overwrite => PutMode::Overwrite,
        Mode::Replace(tag) => PutMode::Update(UpdateVersion {
            e_tag: Some(tag.clone()),
            version: None,
        }),
    };
    let mut options = put_with(mode, checksum.after(&header));
    let connection = Cut::default();
    options.extensions.insert(connection.clone());
    let payload = PutPayload::from_iter([Bytes::copy_from_slice(&header), body]);
    let ended = {
        // The request, and with it our copies of the bytes, are gone at the end of this block.
        let request = AssertUnwindSafe(store.put_opts(&row.path, payload, options));
        let request = timeout_at(deadline.into(), request.catch_unwind());
        let stopped = pin!(stop.wait_for(|stop| *stop));
        match select(pin!(request), stopped).await {
            Either::Left((Ok(Ok(result)), _)) => Some(result.map_err(|error| Failure::of(&error))),
            Either::Left((Ok(Err(_)), _)) => {
                let text = "the request panicked";
                Some(Err(Failure::new(FailureKind::Other, text)))
            }
            Either::Left((Err(_), _)) | Either::Right(_) => None,
        }
    };
    if released.try_recv() == Err(TryRecvError::Empty) {
        connection.cut();
        // An error means that the other end is gone, too: released all the same.
        let _ = released.await;
    }
    match ended {
        Some(result) => result.map(drop),
        None => Err(Failure::late()),
    }
}

/// Whether a row's object is there with the right length.
///
/// # Errors
/// The request's failure; a missing object is `Ok(false)`.
pub async fn is_there(store: &Store, path: &Path, row_bytes: usize) -> Result<bool, Failure> {
    match store.head(path).await {
        Ok(meta) => Ok(meta.size == wide(HEADER_BYTES).saturating_add(wide(row_bytes))),
        Err(error) => match Failure::of(&error) {
            failure if failure.kind == FailureKind::Missing => Ok(false),
            failure => Err(failure),
        },
    }
}

/// Deletes an object if it is still the one with this `ETag`; nothing where there is none. Between
/// the look and the deletion a peer may have written a good one: then a good one is gone, which
/// costs a miss.
///
/// # Errors
/// The failure of either request; nothing to delete is fine.
pub async fn delete_if(store: &Store, path: &Path, tag: Option<&str>) -> Result<bool, Failure> {
    if tag.is_none() {
        return Ok(false);
    }
    let missing = |error: &object_store::Error| {
        let failure = Failure::of(error);
        if failure.kind == FailureKind::Missing {
            Ok(false)
        } else {
            Err(failure)
        }
    };
    let meta = match store.head(path).await {
        Ok(meta) => meta,
        Err(error) => return missing(&error),
    };
    if meta.e_tag.as_deref() != tag {
        return Ok(false);
    }
    match store.delete(path).await {
        Ok(()) => Ok(true),
        Err(error) => missing(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::memory_store;

    #[test]
    fn only_the_object_that_was_meant_is_deleted() {
        let store = memory_store();
        let path = Path::from("a/row");
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(async {
            let put = store.put(&path, PutPayload::from_static(b"one")).await;
            let old = put.unwrap().e_tag;
            let put = store.put(&path, PutPayload::from_static(b"two")).await;
            let new = put.unwrap().e_tag;
            assert!(old != new && new.is_some());
            for other in [None, old.as_deref()] {
                assert!(!delete_if(&store, &path, other).await.unwrap());
                assert!(is_there_at_all(&store, &path).await);
            }
            assert!(delete_if(&store, &path, new.as_deref()).await.unwrap());
            assert!(!is_there_at_all(&store, &path).await);
            assert!(!delete_if(&store, &path, new.as_deref()).await.unwrap());
        });
    }

    async fn is_there_at_all(store: &Store, path: &Path) -> bool {
        store.head(path).await.is_ok()
    }
}
