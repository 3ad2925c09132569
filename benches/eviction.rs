//! What a block access costs under each policy with a million entries, evictions included, and how
//! much memory it takes. `cargo bench --bench eviction [-- POLICY,... [TRACE [ENTRIES]]]`

use kvstrata_benches::replayed::{Replayed, Workload};
use kvstrata_benches::say;

/// Policies whose directory is to be full before anything is measured see so many rounds first.
const ROUNDS_BEFORE: usize = 2;
const ENTRIES: usize = 1_000_000;

fn main() {
    let all = std::env::args().skip(1);
    let arguments: Vec<String> = all.filter(|one| !one.starts_with('-')).collect();
    let argument = |at: usize, default: &str| {
        let given = arguments.get(at);
        given.cloned().unwrap_or_else(|| default.to_owned())
    };
    let policies = argument(0, "fifo,lru,s3fifo,arc_vllm,th");
    let trace = argument(1, "mc_conv");
    let entries = argument(2, "").parse().unwrap_or(ENTRIES);
    let workload = Workload::of_trace(&trace, entries);
    say(&format!(
        "{trace}: {} requests, {} accesses, {} blocks a round; {entries} entries",
        workload.requests(),
        workload.accesses(),
        workload.unique()
    ));
    say("fifo is what driving a policy costs. Nanoseconds of processor time.");
    for policy in policies.split(',') {
        let mut replayed = Replayed::new(policy, entries, &workload);
        replayed.run(ROUNDS_BEFORE * workload.requests());
        let measured = replayed.measure(workload.requests() / 2);
        say(&format!("{policy:10} {measured}"));
    }
}
