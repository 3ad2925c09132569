//! The table and the JSON of what was measured.

use std::path::Path;

use serde_json::{Value, json};

use crate::measure::{Pass, median};
use crate::say;

/// What a way is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A whole tier.
    Tier,
    /// An engine alone.
    Engine,
    /// The reference.
    Raw,
    /// The reference without checksums.
    Bare,
    /// The other reference, of stores.
    Fio,
}

/// The passes of one way.
#[derive(Clone, Debug)]
pub struct Line {
    /// The way's name.
    pub name: String,
    /// What it is.
    pub role: Role,
    /// Its passes, one a round.
    pub passes: Vec<Pass>,
}

/// What was measured with one size of rows in one direction.
#[derive(Clone, Debug)]
pub struct Figures {
    /// What the rows went through.
    pub what: &'static str,
    /// Payload bytes of a row.
    pub row_bytes: usize,
    /// A line for each way.
    pub lines: Vec<Line>,
}

impl Figures {
    fn best(&self, role: Role) -> Option<f64> {
        self.lines
            .iter()
            .filter(|line| line.role == role)
            .filter_map(|line| Some(median(line.passes.clone())?.0.gigabytes_per_second()))
            .max_by(f64::total_cmp)
    }

    /// Prints the table; returns the same as JSON.
    pub fn report(&self) -> Value {
        let (raw, bare) = (self.best(Role::Raw), self.best(Role::Bare));
        let fio = self.best(Role::Fio);
        let mut lines = Vec::new();
        for line in &self.lines {
            let Some((middle, low, high)) = median(line.passes.clone()) else {
                continue;
            };
            let speed = middle.gigabytes_per_second();
            let to = |reference: Option<f64>| reference.map(|reference| speed / reference);
            let text = |ratio: Option<f64>| {
                ratio.map_or_else(|| "    -".to_owned(), |ratio| format!("{ratio:5.2}"))
            };
            say(&format!(
                "{:<10} {:>5} KiB  {:<17} {speed:>5.2} GB/s ({low:.2} to {high:.2})  {:.3} CPU s/GB  \
                 {} of raw  {} of bare  {} of fio",
                self.what,
                self.row_bytes >> 10,
                line.name,
                middle.processor_per_gigabyte(),
                text(to(raw)),
                text(to(bare)),
                text(to(fio)),
            ));
            let all: Vec<f64> = line.passes.iter().map(Pass::gigabytes_per_second).collect();
            lines.push(json!({
                "way": line.name,
                "gigabytes_per_second": speed,
                "passes": all,
                "processor_seconds_per_gigabyte": middle.processor_per_gigabyte(),
                "of_better_raw": to(raw),
                "of_better_bare": to(bare),
                "of_fio": to(fio),
            }));
        }
        json!({"what": self.what, "row_bytes": self.row_bytes, "ways": lines})
    }
}

/// Writes all figures to a file.
///
/// # Errors
/// The file system's.
#[expect(clippy::disallowed_methods, reason = "a file that the user names")]
pub fn write(path: &Path, machine: &Value, figures: &[Value]) -> std::io::Result<()> {
    let all = json!({"machine": machine, "figures": figures});
    std::fs::write(path, format!("{all:#}\n"))
}
