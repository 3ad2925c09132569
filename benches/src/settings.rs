//! Where and how much is measured, from the environment.

use std::ffi::OsString;
use std::path::PathBuf;

use kvstrata_core::error::{Error, Result};

use crate::count;

/// The kinds of passes of [`Settings::what`].
const KINDS: [&str; 3] = ["first", "overwrite", "load"];
/// Fewest MiB of a pass: two of the largest rows that are measured if none are named.
const MEBIBYTES_MIN: usize = 4;
/// Numbers of rows of [`Settings::recovery_rows`], if none are named.
const RECOVERY_ROWS: &str = "100000,1000000,10000000";

/// Settings of a run; the environment variables are named at each.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `KVSTRATA_BENCH_DIR`: the directory measured; else the temporary directory.
    pub directory: PathBuf,
    /// `KVSTRATA_BENCH_MIB`: MiB moved by each pass, 2048 if not set.
    pub pass_bytes: usize,
    /// `KVSTRATA_BENCH_ROUNDS`: passes of which the median counts, 5 if not set.
    pub rounds: usize,
    /// `KVSTRATA_BENCH_PAGES`: `small` for an arena in small pages; `large`, and if not set, in
    /// large ones, as the arena under vLLM.
    pub large_pages: bool,
    /// `KVSTRATA_BENCH_JSON`: the file that gets the figures as JSON; none if not set.
    pub json: Option<PathBuf>,
    /// `KVSTRATA_BENCH_KIB`: row sizes in KiB, separated by commas; 64,256,2048 if not set.
    pub row_bytes: Vec<usize>,
    /// `KVSTRATA_BENCH_WHAT`: of first, overwrite and load those that are measured; all if not set.
    what: Option<Vec<String>>,
    /// `KVSTRATA_BENCH_WAYS`: beginnings of the names of the ways that are measured, separated by
    /// commas; all if not set.
    ways: Option<Vec<String>>,
    /// `KVSTRATA_BENCH_RECOVERY_ROWS`: numbers of rows that a tier opens on, separated by commas.
    pub recovery_rows: Vec<u64>,
}

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// A variable, its value and what is expected.
    pub fn from_environment() -> Result<Self> {
        Self::read(&Variables(|name: &str| std::env::var_os(name)))
    }

    fn read<F: Fn(&str) -> Option<OsString>>(variables: &Variables<F>) -> Result<Self> {
        let mebibytes = variables.number("KVSTRATA_BENCH_MIB", "2048", MEBIBYTES_MIN)?;
        let pass_bytes = mebibytes << 20;
        let what = variables.words("KVSTRATA_BENCH_WHAT")?;
        let is_kind = |one: &String| KINDS.contains(&one.as_str());
        if let Some(wrong) = what.iter().flatten().find(|one| !is_kind(one)) {
            let expected = "first, overwrite or load";
            return Err(refused("a kind in KVSTRATA_BENCH_WHAT", wrong, expected));
        }
        let pages = variables.text("KVSTRATA_BENCH_PAGES", "large")?;
        if !matches!(pages.as_str(), "large" | "small") {
            return Err(refused("KVSTRATA_BENCH_PAGES", &pages, "small or large"));
        }
        let mut row_bytes = Vec::new();
        for kibibytes in variables.numbers("KVSTRATA_BENCH_KIB", "64,256,2048")? {
            if kibibytes > count(pass_bytes >> 10) {
                let (size, most) = (kibibytes.to_string(), pass_bytes >> 10);
                let expected = format!("no more than a pass, which is of {most} KiB,");
                return Err(refused("a size in KVSTRATA_BENCH_KIB", &size, &expected));
            }
            row_bytes.push(usize::try_from(kibibytes).map_or(pass_bytes, |size| size << 10));
        }
        let directory = variables.path("KVSTRATA_BENCH_DIR");
        Ok(Self {
            directory: directory.unwrap_or_else(std::env::temp_dir),
            pass_bytes,
            rounds: variables.number("KVSTRATA_BENCH_ROUNDS", "5", 1)?,
            large_pages: pages == "large",
            json: variables.path("KVSTRATA_BENCH_JSON"),
            row_bytes,
            what,
            ways: variables.words("KVSTRATA_BENCH_WAYS")?,
            recovery_rows: variables.numbers("KVSTRATA_BENCH_RECOVERY_ROWS", RECOVERY_ROWS)?,
        })
    }

    /// Whether rows are to go through this.
    pub fn measures(&self, what: &str) -> bool {
        let chosen = |all: &Vec<String>| all.iter().any(|one| one == what);
        self.what.as_ref().is_none_or(chosen)
    }

    /// Whether this way is to be measured.
    pub fn takes(&self, way: &str) -> bool {
        let chosen = |all: &Vec<String>| all.iter().any(|one| way.starts_with(one.as_str()));
        self.ways.as_ref().is_none_or(chosen)
    }

    /// Refuses a beginning with which no name of a way begins.
    ///
    /// # Errors
    /// The beginning, and the names.
    pub fn check_ways(&self, names: &[String]) -> Result<()> {
        let begins = |one: &String| {
            let mut names = names.iter();
            !one.is_empty() && names.any(|name| name.starts_with(one.as_str()))
        };
        match self.ways.iter().flatten().find(|one| !begins(one)) {
            Some(wrong) => {
                let names = names.join(", ");
                let expected = format!("the beginning of a way's name ({names})");
                Err(refused("a name in KVSTRATA_BENCH_WAYS", wrong, &expected))
            }
            None => Ok(()),
        }
    }
}

/// The variables of an environment; an empty one is as good as not set.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<OsString>> Variables<F> {
    fn get(&self, name: &str) -> Option<OsString> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(PathBuf::from)
    }

    fn text(&self, name: &str, default: &str) -> Result<String> {
        let value = self.get(name).unwrap_or_else(|| default.into());
        let wrong = |value: OsString| refused(name, &value.to_string_lossy(), "text in UTF-8");
        value.into_string().map_err(wrong)
    }

    fn number(&self, name: &str, default: &str, least: usize) -> Result<usize> {
        let text = self.text(name, default)?;
        let number = text.trim().parse::<u32>().ok();
        let number = number.and_then(|number| usize::try_from(number).ok());
        let expected = format!("an int from {least} to 2**32 - 1");
        let number = number.filter(|number| *number >= least);
        number.ok_or_else(|| refused(name, &text, &expected))
    }

    fn numbers(&self, name: &str, default: &str) -> Result<Vec<u64>> {
        let text = self.text(name, default)?;
        let read = |one: &str| one.trim().parse().ok().filter(|number| *number > 0);
        let numbers: Option<Vec<u64>> = text.split(',').map(read).collect();
        let expected = "a list of ints from 1 to 2**64 - 1, separated by commas,";
        numbers.ok_or_else(|| refused(name, &text, expected))
    }

    fn words(&self, name: &str) -> Result<Option<Vec<String>>> {
        let text = self.text(name, "")?;
        let words = || text.split(',').map(|one| one.trim().to_owned()).collect();
        Ok((!text.is_empty()).then(words))
    }
}

/// The error of a variable, or of one of the values in it.
fn refused(what: &str, value: &str, expected: &str) -> Error {
    Error::config(format!("{what} is {value:?}; {expected} is expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings> {
        Settings::read(&Variables(|asked: &str| {
            (asked == name).then(|| value.into())
        }))
    }

    #[test]
    fn what_is_not_set_or_empty_has_a_default() {
        for name in [
            "KVSTRATA_BENCH_MIB",
            "KVSTRATA_BENCH_KIB",
            "KVSTRATA_BENCH_WHAT",
            "none",
        ] {
            let settings = with(name, "").unwrap();
            assert_eq!(settings.pass_bytes, 2 << 30);
            assert_eq!(settings.rounds, 5);
            assert_eq!(settings.row_bytes, [64 << 10, 256 << 10, 2 << 20]);
            assert_eq!(settings.recovery_rows, [100_000, 1_000_000, 10_000_000]);
            assert!(settings.large_pages && KINDS.iter().all(|kind| settings.measures(kind)));
            assert!(settings.takes("fio") && settings.json.is_none());
        }
    }

    #[test]
    fn what_is_set_is_taken() {
        assert_eq!(with("KVSTRATA_BENCH_MIB", "4").unwrap().pass_bytes, 4 << 20);
        assert_eq!(with("KVSTRATA_BENCH_ROUNDS", "1").unwrap().rounds, 1);
        let sizes = with("KVSTRATA_BENCH_KIB", "4, 2097152").unwrap().row_bytes;
        assert_eq!(sizes, [4 << 10, 2 << 30]);
        assert!(!with("KVSTRATA_BENCH_PAGES", "small").unwrap().large_pages);
        let some = with("KVSTRATA_BENCH_WHAT", "first, load").unwrap();
        assert_eq!(KINDS.map(|kind| some.measures(kind)), [true, false, true]);
        let some = with("KVSTRATA_BENCH_WAYS", "tier,raw u").unwrap();
        let names = ["tier uring", "raw uring(64)", "raw threads(32)"];
        assert_eq!(names.map(|name| some.takes(name)), [true, true, false]);
        some.check_ways(&names.map(str::to_owned)).unwrap();
    }

    #[test]
    fn a_wrong_value_is_refused_with_the_variable_and_what_is_expected() {
        for (name, value, told) in [
            (
                "MIB",
                "abc",
                "is \"abc\"; an int from 4 to 2**32 - 1 is expected",
            ),
            (
                "MIB",
                "0",
                "is \"0\"; an int from 4 to 2**32 - 1 is expected",
            ),
            ("MIB", "4294967296", "is \"4294967296\"; an int from 4 to"),
            (
                "ROUNDS",
                "0",
                "is \"0\"; an int from 1 to 2**32 - 1 is expected",
            ),
            ("ROUNDS", "-1", "is \"-1\"; an int from 1 to"),
            (
                "WHAT",
                "load,store",
                "is \"store\"; first, overwrite or load is expected",
            ),
            ("PAGES", "tiny", "is \"tiny\"; small or large is expected"),
            (
                "KIB",
                "64,abc",
                "is \"64,abc\"; a list of ints from 1 to 2**64 - 1, separated by",
            ),
            ("KIB", "0", "is \"0\"; a list of ints"),
            ("KIB", "64,", "is \"64,\"; a list of ints"),
            (
                "KIB",
                "2097153",
                "is \"2097153\"; no more than a pass, which is of 2097152 KiB,",
            ),
            (
                "RECOVERY_ROWS",
                "1e6",
                "is \"1e6\"; a list of ints from 1 to",
            ),
        ] {
            let name = format!("KVSTRATA_BENCH_{name}");
            let error = with(&name, value).unwrap_err().to_string();
            assert!(error.contains(&format!("{name} {told}")), "{error}");
        }
        let names = ["tier uring", "fio"].map(str::to_owned);
        for wrong in ["foo", "tier,foo", "tier,"] {
            let settings = with("KVSTRATA_BENCH_WAYS", wrong).unwrap();
            let error = settings.check_ways(&names).unwrap_err().to_string();
            let last = wrong.rsplit(',').next().unwrap();
            assert_eq!(
                error,
                format!(
                    "a name in KVSTRATA_BENCH_WAYS is {last:?}; the beginning of a way's name \
                     (tier uring, fio) is expected"
                )
            );
        }
    }
}
