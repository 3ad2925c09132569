//! What a block costs on the two paths of every policy, by Criterion.
//! `cargo bench --bench policies [-- FILTER]`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvstrata_benches::paths::{BLOCKS, Paths};
use kvstrata_core::eviction::POLICIES;

const ENTRIES: usize = 100_000;

fn paths(criterion: &mut Criterion) {
    for policy in POLICIES {
        let mut group = criterion.benchmark_group(*policy);
        group.throughput(Throughput::Elements(u64::from(BLOCKS)));
        let mut full = Paths::new(policy, ENTRIES);
        let touch = |bencher: &mut criterion::Bencher<'_>| bencher.iter(|| full.touch());
        group.bench_function("touch", touch);
        let store = |bencher: &mut criterion::Bencher<'_>| bencher.iter(|| full.store());
        group.bench_function("store and evict", store);
        group.finish();
    }
}

criterion_group!(benches, paths);
criterion_main!(benches);
