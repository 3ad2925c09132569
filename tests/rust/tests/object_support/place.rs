//! A place in a bucket, for tiers and for a stranger who meddles with their objects.

use futures_util::StreamExt;
use kvstrata_core::key::Key;
use kvstrata_core::namespace::layout::directory_name;
use kvstrata_core::object::epoch_record;
use kvstrata_core::object::names::{Epoch, Names};
use kvstrata_core::object::{ObjectOptions, Store};
use kvstrata_core::tier::CircuitLimits;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};

use super::{listed, open_with};
use crate::tier_support::Harness;

/// A prefix of a bucket, for one promise: tiers are opened on it again and again, and a stranger
/// sees to its objects.
pub struct Place {
    pub options: ObjectOptions,
    /// The client of tiers, where it is not their own.
    pub given: Option<Store>,
    store: Store,
    runtime: Runtime,
}

impl Place {
    pub fn of(options: ObjectOptions, given: Option<Store>, store: Store) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        Self {
            options,
            given,
            store,
            runtime,
        }
    }

    pub fn open(&self, slots: usize) -> Harness {
        self.open_as(self.options.clone(), slots)
    }

    pub fn open_as(&self, options: ObjectOptions, slots: usize) -> Harness {
        let given = self.given.as_ref().map(Store::clone);
        listed(open_with(options, slots, given, CircuitLimits::default()))
    }

    /// The name of a row's object in the epoch of this number, which has begun.
    pub fn name(&self, number: u32, key: &Key) -> Path {
        let manifest = self.options.validate().unwrap();
        let directory = directory_name(&manifest);
        let names = Names::new(self.options.location.below(&directory));
        let listed: Vec<_> = self
            .runtime
            .block_on(self.store.list(Some(&names.epochs())).collect());
        let records = listed.into_iter().map(|meta| meta.unwrap().location);
        let epoch_of = |record: &Path| Epoch::parse(record.filename().unwrap()).unwrap();
        let record = records
            .filter(|record| epoch_of(record).number == number)
            .max_by_key(epoch_of)
            .unwrap();
        let epoch = epoch_record::parse(number, &self.read(&record).unwrap());
        names.row(epoch.unwrap(), key)
    }

    pub fn read(&self, name: &Path) -> Option<Vec<u8>> {
        let bytes = async { self.store.get(name).await.ok()?.bytes().await.ok() };
        self.runtime.block_on(bytes).map(Vec::from)
    }

    pub fn write(&self, name: &Path, bytes: Vec<u8>) {
        let put = self.store.put(name, PutPayload::from(bytes));
        self.runtime.block_on(put).unwrap();
    }

    pub fn delete(&self, name: &Path) {
        self.runtime.block_on(self.store.delete(name)).unwrap();
    }
}
