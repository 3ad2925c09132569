//! Epochs in a bucket: each is an object that is made before anything counts on it.

use futures_util::StreamExt;
use object_store::{PutMode, PutPayload};

use crate::format::row_table::EPOCH_LAST;
use crate::object::names::{Epoch, Names};
use crate::object::signing::put_of;
use crate::object::{Failure, FailureKind, Store};
use crate::tier::object::open::random;

/// The body of a record: shorter than any row, so that rules about old objects can leave it alone.
const BODY: &[u8] = b"an epoch of kvstrata; without it rows that were reset could come back\n";
/// Numbers that are tried one after the other when others take them at the same time.
const TRIES_MAX: u32 = 64;

/// The newest epoch that is recorded, and the newest that any row is in.
async fn newest(store: &Store, names: &Names) -> Result<(Option<Epoch>, Option<Epoch>), Failure> {
    let of_name = |path: &object_store::path::Path| Epoch::parse(path.filename()?);
    // In this order: an epoch is recorded before any row is in it, so that one which begins
    // meanwhile is not taken for one whose record was lost.
    let rows = store.list_with_delimiter(Some(&names.rows())).await;
    let rows = rows.map_err(|error| Failure::of(&error))?;
    let in_use = rows.common_prefixes.iter().filter_map(of_name).max();
    let mut records = store.list(Some(&names.epochs()));
    let mut recorded = None;
    while let Some(meta) = records.next().await {
        let meta = meta.map_err(|error| Failure::of(&error))?;
        recorded = recorded.max(of_name(&meta.location));
    }
    Ok((recorded, in_use))
}

/// The epoch that a process which opens a namespace works in: the newest, or a new one where
/// records were lost.
pub(super) async fn open(
    store: &Store,
    names: &Names,
    conditional_put: bool,
) -> Result<Epoch, Failure> {
    match newest(store, names).await? {
        (Some(recorded), in_use) if in_use <= Some(recorded) => Ok(recorded),
        (None, None) => {
            // Two that open at the same time make the same one.
            let first = Epoch {
                number: 1,
                suffix: 0,
            };
            match record(store, names, first, conditional_put).await {
                Err(failure) if failure.kind == FailureKind::Exists => Ok(first),
                made => made.map(|()| first),
            }
        }
        _ => advance(store, names, conditional_put, 0).await,
    }
}

/// Makes an epoch newer than every other, and than the number `at_least`.
pub(super) async fn advance(
    store: &Store,
    names: &Names,
    conditional_put: bool,
    at_least: u32,
) -> Result<Epoch, Failure> {
    let (recorded, in_use) = newest(store, names).await?;
    let last = recorded
        .max(in_use)
        .map_or(0, |epoch| epoch.number)
        .max(at_least);
    for step in 1..=TRIES_MAX {
        let number = last.saturating_add(step);
        if number > EPOCH_LAST {
            break;
        }
        let suffix = if conditional_put {
            0
        } else {
            u64::from_le_bytes(random()?) | 1
        };
        let epoch = Epoch { number, suffix };
        match record(store, names, epoch, conditional_put).await {
            // A peer's, or our own whose answer was lost: either way another one is newer.
            Err(failure) if failure.kind == FailureKind::Exists => {}
            made => return made.map(|()| epoch),
        }
    }
    let text = format!("no epoch after {last} is free");
    Err(Failure::new(FailureKind::Other, text))
}

async fn record(
    store: &Store,
    names: &Names,
    epoch: Epoch,
    conditional_put: bool,
) -> Result<(), Failure> {
    let mode = if conditional_put {
        PutMode::Create
    } else {
        PutMode::Overwrite
    };
    let body = PutPayload::from_static(BODY);
    let put = store
        .put_opts(&names.epoch(epoch), body, put_of(mode, BODY))
        .await;
    put.map(drop).map_err(|error| Failure::of(&error))
}
