//! What the process that kills looks at between two lives of its child.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kvstrata_core::format::{ENTRY_BYTES, FileId, Generation, RowEntry, Superblock};
use kvstrata_core::namespace::layout;

use super::{below, everything};

/// What was seen of the rows of all files: their generations only rise.
#[derive(Default)]
pub struct Generations {
    /// The last entry seen of each row.
    rows: HashMap<(FileId, u32), RowEntry>,
    pub seen: u64,
}

impl Generations {
    /// Looks at all row tables; says what is wrong, if anything is.
    pub fn look(&mut self, root: &Path) -> Result<(), String> {
        for (path, file_id) in row_files(root) {
            let bytes = std::fs::read(&path).map_err(|error| error.to_string())?;
            let sector = bytes.first_chunk::<512>();
            let Some(Ok(superblock)) = sector.map(|sector| Superblock::decode(sector)) else {
                continue;
            };
            let mut of_file: HashMap<Generation, u32> = HashMap::new();
            for row in 0..superblock.geometry.row_count() {
                let at = usize::try_from(superblock.geometry.entry_offset(row)).unwrap();
                let entry = bytes.get(at..at + ENTRY_BYTES).unwrap();
                let Ok(Some(entry)) = RowEntry::decode(entry.try_into().unwrap(), file_id, row)
                else {
                    continue;
                };
                self.seen += 1;
                if let Some(other) = of_file.insert(entry.generation, row) {
                    return Err(format!(
                        "rows {other} and {row} of {file_id} have generation {:?}",
                        entry.generation
                    ));
                }
                if entry.generation.incarnation > superblock.incarnation {
                    return Err(format!(
                        "{file_id} has the incarnation of its row {row} to come"
                    ));
                }
                let before = self.rows.insert((file_id, row), entry);
                if let Some(before) = before
                    && !follows(&before, &entry)
                {
                    return Err(format!(
                        "row {row} of {file_id}: {before:?}, then {entry:?}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Whether `after` may be found where `before` was: the same content (its access time apart), or
/// another one of a later generation.
fn follows(before: &RowEntry, after: &RowEntry) -> bool {
    let same = RowEntry {
        access_time: before.access_time,
        ..*after
    };
    same == *before || after.generation > before.generation
}

/// All row files with their numbers.
pub fn row_files(root: &Path) -> Vec<(PathBuf, FileId)> {
    let mut found: Vec<_> = everything(root)
        .into_iter()
        .filter_map(|path| {
            let file_id = layout::parse_row_file_name(path.file_name()?.to_str()?)?;
            Some((path, file_id))
        })
        .collect();
    found.sort();
    found
}

/// Flips some bits: any byte of any row file.
pub fn flip_bits(root: &Path, chance: &mut u64) -> u64 {
    let files = row_files(root);
    let count = below(chance, 6);
    if files.is_empty() {
        return 0;
    }
    for _ in 0..count {
        let at = below(chance, u64::try_from(files.len()).unwrap());
        let (path, _) = &files[usize::try_from(at).unwrap()];
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        let length = file.metadata().unwrap().len();
        // Half of them where superblock, change page and row table are.
        let length = if below(chance, 2) == 0 {
            length.min(65_536)
        } else {
            length
        };
        let offset = below(chance, length);
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        let bit = 1 << below(chance, 8);
        file.write_all_at(&[byte[0] ^ bit], offset).unwrap();
    }
    count
}
