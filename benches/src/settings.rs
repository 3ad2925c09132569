//! Where and how much is measured, from the environment.

use std::path::PathBuf;

/// Settings of a run; the environment variables are named at each.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `KVSTRATA_BENCH_DIR`: the directory measured; else the temporary directory.
    pub directory: PathBuf,
    /// `KVSTRATA_BENCH_MIB`: MiB moved by each pass, 512 if not set.
    pub pass_bytes: usize,
    /// `KVSTRATA_BENCH_ROUNDS`: passes of which the median counts, 5 if not set.
    pub rounds: usize,
}

impl Settings {
    /// Reads the environment; a number that is none is as good as not set.
    #[expect(
        clippy::disallowed_methods,
        reason = "a benchmark is configured by its environment"
    )]
    pub fn from_environment() -> Self {
        let number = |name: &str, default: usize| {
            std::env::var(name)
                .ok()
                .and_then(|text| text.parse().ok())
                .unwrap_or(default)
        };
        let directory = std::env::var("KVSTRATA_BENCH_DIR");
        Self {
            directory: directory.map_or_else(|_| std::env::temp_dir(), PathBuf::from),
            pass_bytes: number("KVSTRATA_BENCH_MIB", 512).max(4) << 20,
            rounds: number("KVSTRATA_BENCH_ROUNDS", 5).max(1),
        }
    }
}
