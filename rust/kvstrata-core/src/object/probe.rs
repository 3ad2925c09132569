//! What is found out about a bucket before it is used: one object is put, read and deleted.

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutPayload};

use crate::object::signing::put_of;
use crate::object::{Failure, FailureKind, Store};

/// Start of the names of probes, below the prefix.
pub const PROBE_PREFIX: &str = "kvstrata-probe-";
const BODY: &[u8] = b"written by kvstrata to find out whether it can be used; delete it at will\n";

/// What a bucket can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketFacts {
    /// Whether a PUT can be made to fail where an object is.
    pub conditional_put: bool,
}

fn tell<T>(step: &str, result: object_store::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| {
        let failure = Failure::of(&error);
        Failure::new(failure.kind, format!("{step}: {}", failure.text))
    })
}

/// Puts, reads and deletes the object `path`.
///
/// # Errors
/// The first step that failed.
pub async fn probe(store: &Store, path: &Path) -> Result<BucketFacts, Failure> {
    let body = PutPayload::from_static(BODY);
    let (overwrite, create) = (
        put_of(PutMode::Overwrite, BODY),
        put_of(PutMode::Create, BODY),
    );
    tell("put", store.put_opts(path, body.clone(), overwrite).await)?;
    let again = store.put_opts(path, body, create).await;
    let conditional_put = match again.as_ref().map_err(Failure::of) {
        Err(failure) if failure.kind == FailureKind::Exists => true,
        // Ignored, refused as a header it does not know, or not done.
        Ok(_) => false,
        Err(failure)
            if matches!(
                failure.kind,
                FailureKind::Unsupported | FailureKind::Addressing | FailureKind::Changed
            ) =>
        {
            false
        }
        Err(failure) => {
            return Err(Failure::new(
                failure.kind,
                format!("put if absent: {}", failure.text),
            ));
        }
    };
    let read = tell("get", store.get(path).await)?;
    // Of another length it is not even read: there might be no room for it.
    let same =
        u64::try_from(BODY.len()) == Ok(read.meta.size) && tell("get", read.bytes().await)? == BODY;
    if !same {
        let text = "get: the bytes are not those that were put";
        return Err(Failure::new(FailureKind::Other, text));
    }
    tell("delete", store.delete(path).await)?;
    Ok(BucketFacts { conditional_put })
}
