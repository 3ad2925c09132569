//! Who this process is, so that others can tell it from every process before and after it.

use core::fmt;

/// Longest text that is read about the process or its machine, in bytes.
const TEXT_BYTES_MAX: usize = 4096;
/// Field of `/proc/self/stat` with the start time, counted from the end of the command's name.
const START_FIELD: usize = 19;

/// What tells a process from all others, as far as it can be found out; what cannot is `unknown`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The machine's id, or where there is none its node name.
    pub host: String,
    /// The kernel's id of this boot.
    pub boot: String,
    /// The process's number, in its own namespace of such numbers.
    pub process: i32,
    /// When it was started, in clock ticks after boot.
    pub started: String,
}

impl ProcessIdentity {
    /// The identity of this process.
    pub fn own() -> Self {
        let unknown = || "unknown".to_owned();
        let node = || {
            let name = rustix::system::uname();
            plain(&name.nodename().to_string_lossy())
        };
        Self {
            host: text("/etc/machine-id")
                .or_else(node)
                .unwrap_or_else(unknown),
            boot: text("/proc/sys/kernel/random/boot_id").unwrap_or_else(unknown),
            process: rustix::process::getpid().as_raw_nonzero().get(),
            started: start_time().unwrap_or_else(unknown),
        }
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "host {}", self.host)?;
        writeln!(formatter, "boot {}", self.boot)?;
        writeln!(formatter, "process {}", self.process)?;
        writeln!(formatter, "started {}", self.started)
    }
}

/// When this process was started, in clock ticks after boot.
fn start_time() -> Option<String> {
    let stat = read("/proc/self/stat")?;
    // The command's name may hold anything, spaces and parentheses too.
    let (_, rest) = stat.rsplit_once(')')?;
    plain(rest.split_ascii_whitespace().nth(START_FIELD)?)
}

/// The one line of a file, if it is one word.
fn text(path: &str) -> Option<String> {
    plain(read(path)?.trim())
}

/// `word`, if it is one of few printable characters.
fn plain(word: &str) -> Option<String> {
    let fits = (1..=64).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic());
    fits.then(|| word.to_owned())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the seam every other module goes through"
)]
fn read(path: &str) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    let file = std::fs::File::open(path).ok()?;
    let most = u64::try_from(TEXT_BYTES_MAX).unwrap_or(u64::MAX);
    file.take(most).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_itself_again() {
        let own = ProcessIdentity::own();
        assert_eq!(own, ProcessIdentity::own());
        assert_eq!(u32::try_from(own.process).unwrap(), std::process::id());
        assert!(own.started.parse::<u64>().unwrap() > 0);
        assert_eq!(own.boot.len(), 36);
        assert_eq!(own.to_string().lines().count(), 4);
    }

    #[test]
    fn only_single_words_are_taken_over() {
        assert_eq!(plain("a b"), None);
        assert_eq!(plain(""), None);
        assert_eq!(plain("host-1.x"), Some("host-1.x".to_owned()));
        assert_eq!(plain(&"x".repeat(65)), None);
    }
}
