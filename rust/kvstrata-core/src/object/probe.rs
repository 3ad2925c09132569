//! What is found out about a bucket before it is used: one object is put, read and deleted.

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutPayload};

use crate::object::signing::put_of;
use crate::object::{Failure, FailureKind, Location, Store};

/// Start of the names of probes, below the prefix. Older builds put 16 digits behind it.
pub const PROBE_PREFIX: &str = "kvstrata-probe-";
/// Probes that others delete while they are being tried, before it is believed that the server
/// lets an object be overwritten that must not be.
const TRIES: u8 = 4;
const BODY: &[u8] = b"written by kvstrata to find out whether it can be used; delete it at will\n";

/// What a bucket can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketFacts {
    /// Whether a PUT can be made to fail where an object is.
    pub conditional_put: bool,
}

/// Names of probes: 256 in all, so that those that nobody may delete do not pile up.
#[derive(Clone, Debug)]
pub struct Probes {
    location: Location,
    first: u8,
}

/// How a probe ended that did not fail.
enum Tried {
    /// This is what the bucket can do.
    Facts(BucketFacts),
    /// Someone else may have used the same name meanwhile.
    Unclear,
}

fn tell<T>(step: &str, result: object_store::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| {
        let failure = Failure::of(&error);
        Failure::new(failure.kind, format!("{step}: {}", failure.text))
    })
}

impl Probes {
    /// Those below a prefix, beginning with the one of this number, which others should not choose.
    #[must_use]
    pub const fn new(location: Location, first: u8) -> Self {
        Self { location, first }
    }

    /// Puts, reads and deletes an object.
    ///
    /// # Errors
    /// The first step that failed; where the object is left behind, it is named.
    pub async fn try_out(&self, store: &Store) -> Result<BucketFacts, Failure> {
        for step in 0..TRIES {
            let number = self.first.wrapping_add(step);
            let name = format!("{PROBE_PREFIX}{number:02x}");
            let path = Path::from(self.location.below(&name));
            if let Tried::Facts(facts) = probe(store, &path).await? {
                return Ok(facts);
            }
        }
        let conditional_put = false;
        Ok(BucketFacts { conditional_put })
    }
}

async fn probe(store: &Store, path: &Path) -> Result<Tried, Failure> {
    let body = PutPayload::from_static(BODY);
    let overwrite = put_of(PutMode::Overwrite, BODY);
    tell("put", store.put_opts(path, body, overwrite).await)?;
    let tried = put_again_and_get(store, path).await;
    let deleted = match tell("delete", store.delete(path).await) {
        Err(failure) if failure.kind != FailureKind::Missing => Err(failure),
        _ => Ok(()),
    };
    match (tried, deleted) {
        (tried, Ok(())) => tried,
        (Ok(_), Err(failure)) | (Err(failure), Err(_)) => Err(Failure::new(
            failure.kind,
            format!("{} (the object {path} is left behind)", failure.text),
        )),
    }
}

async fn put_again_and_get(store: &Store, path: &Path) -> Result<Tried, Failure> {
    let create = put_of(PutMode::Create, BODY);
    let again = store.put_opts(path, PutPayload::from_static(BODY), create);
    let tried = match again.await.as_ref().map_err(Failure::of) {
        Err(failure) if failure.kind == FailureKind::Exists => Tried::Facts(BucketFacts {
            conditional_put: true,
        }),
        // Ignored, or deleted by someone else who tried it out.
        Ok(_) => Tried::Unclear,
        // Refused as a header it does not know, or not done.
        Err(failure)
            if matches!(
                failure.kind,
                FailureKind::Unsupported
                    | FailureKind::Addressing
                    | FailureKind::Rejected
                    | FailureKind::Changed
            ) =>
        {
            Tried::Facts(BucketFacts {
                conditional_put: false,
            })
        }
        Err(failure) => {
            let text = format!("put if absent: {}", failure.text);
            return Err(Failure::new(failure.kind, text));
        }
    };
    let read = match tell("get", store.get(path).await) {
        Err(failure) if failure.kind == FailureKind::Missing => return Ok(Tried::Unclear),
        read => read?,
    };
    // Of another length it is not even read: there might be no room for it.
    let same =
        u64::try_from(BODY.len()) == Ok(read.meta.size) && tell("get", read.bytes().await)? == BODY;
    if same {
        return Ok(tried);
    }
    let text = "get: the bytes are not those that were put";
    Err(Failure::new(FailureKind::Other, text))
}
