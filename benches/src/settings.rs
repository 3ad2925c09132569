//! Where and how much is measured, from the environment.

use std::path::PathBuf;

/// Settings of a run; the environment variables are named at each.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `KVSTRATA_BENCH_DIR`: the directory measured; else the temporary directory.
    pub directory: PathBuf,
    /// `KVSTRATA_BENCH_MIB`: MiB moved by each pass, 2048 if not set.
    pub pass_bytes: usize,
    /// `KVSTRATA_BENCH_ROUNDS`: passes of which the median counts, 5 if not set.
    pub rounds: usize,
    /// `KVSTRATA_BENCH_PAGES`: `small` for an arena in small pages; else in large ones, as the arena
    /// under vLLM.
    pub large_pages: bool,
    /// `KVSTRATA_BENCH_JSON`: the file that gets the figures as JSON; none if not set.
    pub json: Option<PathBuf>,
    /// `KVSTRATA_BENCH_KIB`: row sizes in KiB, separated by commas; 64,256,2048 if not set.
    pub row_bytes: Vec<usize>,
    /// `KVSTRATA_BENCH_WHAT`: of first, overwrite and load those that are measured; all if not set.
    pub what: Option<String>,
    /// `KVSTRATA_BENCH_WAYS`: beginnings of the names of the ways that are measured, separated by
    /// commas; all if not set.
    pub ways: Option<String>,
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
        let sizes = std::env::var("KVSTRATA_BENCH_KIB");
        let sizes = sizes.unwrap_or_else(|_| "64,256,2048".to_owned());
        Self {
            directory: directory.map_or_else(|_| std::env::temp_dir(), PathBuf::from),
            pass_bytes: number("KVSTRATA_BENCH_MIB", 2048).max(4) << 20,
            rounds: number("KVSTRATA_BENCH_ROUNDS", 5).max(1),
            large_pages: std::env::var("KVSTRATA_BENCH_PAGES").as_deref() != Ok("small"),
            json: std::env::var("KVSTRATA_BENCH_JSON").ok().map(PathBuf::from),
            row_bytes: sizes
                .split(',')
                .filter_map(|size| size.trim().parse::<usize>().ok())
                .map(|size| size << 10)
                .collect(),
            what: std::env::var("KVSTRATA_BENCH_WHAT").ok(),
            ways: std::env::var("KVSTRATA_BENCH_WAYS").ok(),
        }
    }

    /// Whether rows are to go through this.
    pub fn measures(&self, what: &str) -> bool {
        let chosen = |all: &String| all.split(',').any(|one| one.trim() == what);
        self.what.as_ref().is_none_or(chosen)
    }

    /// Whether this way is to be measured.
    pub fn takes(&self, way: &str) -> bool {
        let chosen = |all: &String| all.split(',').any(|one| way.starts_with(one.trim()));
        self.ways.as_ref().is_none_or(chosen)
    }
}
