//! What a block access costs under each policy with a million entries, evictions included and where
//! all is found, how much memory it takes, and what the machine takes for a look at a random place.
//! `cargo bench --bench eviction [-- POLICY,... [TRACE [ENTRIES]]]`

use kvstrata_benches::replayed::Replayed;
use kvstrata_benches::workload::Workload;
use kvstrata_benches::{floor, say};

/// Rounds that policies see before anything is measured: directories are to be full, and entries that
/// come after each other are to be scattered, as they are in a tier that has run for long.
const ROUNDS_BEFORE: usize = 4;
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
    say(&format!(
        "a look at one of {entries} lines of memory: {}",
        floor::measure(entries)
    ));
    say(
        "fifo is what driving a policy costs, which is in all figures. Nanoseconds of processor time.",
    );
    let workload = Workload::of_trace(&trace, entries);
    report(
        &format!("{trace}, with evictions"),
        &policies,
        entries,
        &workload,
    );
    let workload = workload.that_fit(entries);
    report(
        &format!("{trace}, hits alone"),
        &policies,
        entries,
        &workload,
    );
}

fn report(name: &str, policies: &str, entries: usize, workload: &Workload) {
    say(&format!(
        "{name}: {} requests a round, {} accesses; {entries} entries",
        workload.requests(),
        workload.accesses(),
    ));
    for policy in policies.split(',') {
        let warm = || {
            let mut replayed = Replayed::new(policy, entries, workload);
            replayed.run(ROUNDS_BEFORE * workload.requests());
            replayed
        };
        // Which calls there are is found out before, so that nothing but the policy is measured.
        let calls = warm().calls_of(workload.requests());
        let measured = warm().measure(&calls);
        say(&format!("  {policy:10} {measured}"));
    }
}
