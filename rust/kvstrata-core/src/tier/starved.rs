//! Groups of which nothing can be stored for want of space: told once, and shown until there is some.

use std::io;

use crate::eviction::Class;
use crate::notice::Level;
use crate::sys::fs::FileSystem;
use crate::sys::sync::lock;
use crate::tier::disk::DiskTier;
use crate::tier::space::{Freed, Room, Space, inodes_kept};

/// What keeps a new row file from being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The tier has all the bytes that it may take.
    Capacity,
    /// The bytes that are to stay free.
    MinFree,
    /// The inodes that are left to others.
    Inodes,
    /// There are no bytes left.
    Disk,
    /// The file system refused, with this number of an error, though it has bytes: a quota, say, or
    /// a limit of a file's length.
    Refused(i32),
}

impl Limit {
    /// The word in the statistics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::MinFree => "min_free",
            Self::Inodes => "inodes",
            Self::Disk => "disk",
            Self::Refused(_) => "refused",
        }
    }
}

/// What a log line about a limit is about: each is said by itself.
const CAPACITY: &str = "capacity";
const GIVEN_BACK: &str = "given back";
const STARVED: &str = "no space";
const FED: &str = "space";

impl DiskTier {
    /// Keeps the limits for the first time, and says which of them ask for more than there is.
    pub(super) fn meet_limits(&self) {
        let evicted = &self.around.metrics.evicted_files;
        let (before, short) = (evicted.get(), self.say_shortage());
        self.keep_limits();
        let gone = evicted.get().saturating_sub(before);
        let removed = (gone > 0).then(|| format!("{gone} row files of earlier runs were removed"));
        self.note_limits(removed.as_deref());
        let Some((short, removed)) = short.zip(removed) else {
            return;
        };
        if lock(&self.space).starved.is_empty() {
            let notices = &self.around.notices;
            notices.say(Level::Warning, GIVEN_BACK, || format!("{short}: {removed}"));
        }
    }

    /// Says that the capacity is more than the file system has; returns what is short of `min_free`.
    fn say_shortage(&self) -> Option<String> {
        let space = lock(&self.space);
        let system = space.root.statistics().ok()?;
        let total = system.total_bytes;
        let min_free = space.min_free.resolve(total);
        let most = total.saturating_sub(min_free);
        // Some file systems do not say how large they are (0).
        if total > 0 && space.capacity_bytes > most {
            self.around.notices.say(Level::Warning, CAPACITY, || {
                format!(
                    "capacity: {} bytes are more than the {most} that the file system of {} has \
                     beside min_free ({total} less {min_free}): no more than that is used",
                    space.capacity_bytes,
                    space.root.path().display()
                )
            });
        }
        let short = system.available_bytes < min_free;
        short.then(|| missing(Limit::MinFree, &space, &system))
    }

    /// Says what keeps anything from being stored, and what was `removed` for it.
    fn note_limits(&self, removed: Option<&str>) {
        let mut space = lock(&self.space);
        let Ok(mut room) = self.room(&space) else {
            return;
        };
        // Other namespaces' files go when they have to.
        for file in &space.foreign {
            room = room.without(&Freed {
                counted_bytes: file.allocated_bytes,
                disk_bytes: file.allocated_bytes,
            });
        }
        let (classes, any_files) = {
            let state = lock(&self.state);
            let classes = state.inventory.classes().map(|(class, _)| class);
            let classes: Vec<Class> = classes.collect();
            (classes, state.inventory.containers().next().is_some())
        };
        for class in classes {
            if let Some(limit) = self.limit_of(&space, &room, class) {
                space.limit = Some(limit);
                // Files that are there may make room for those of another class.
                if !any_files {
                    self.starve(&mut space, class, removed);
                }
            }
        }
    }

    /// What keeps a class from having a row file.
    fn limit_of(&self, space: &Space, room: &Room, class: Class) -> Option<Limit> {
        space.limit_of(room, self.shape(class)?)
    }

    /// A limit kept a row file of a class from being made. Without any, and where no file of another
    /// class can make room, nothing of it can be stored.
    pub(super) fn note_limited(&self, space: &mut Space, class: Class) {
        self.starve(space, class, None);
    }

    /// [`DiskTier::note_limited`], and what was `removed` all the same.
    fn starve(&self, space: &mut Space, class: Class, removed: Option<&str>) {
        let limit = match space.limit {
            Some(limit) if limit != Limit::Capacity => limit,
            _ => return,
        };
        let has_files = {
            let state = lock(&self.state);
            let files = state.inventory.class(class);
            files.is_none_or(|files| !files.files.is_empty())
        };
        if has_files || space.starved.contains(&class) {
            return;
        }
        space.starved.push(class);
        if space.starved.len() > 1 {
            return;
        }
        let Ok(system) = space.root.statistics() else {
            return;
        };
        self.around.notices.say(Level::Warning, STARVED, || {
            let missing = missing(limit, space, &system);
            let until = match limit {
                Limit::Refused(_) => "it does",
                _ => "there is more",
            };
            let removed = removed.map_or_else(String::new, |removed| format!("; {removed}"));
            format!("{missing}: no row can be stored until {until}{removed}")
        });
    }

    /// A class has a new row file.
    pub(super) fn note_grown(&self, space: &mut Space, class: Class) {
        space.limit = None;
        self.feed(space, |starved| starved == class);
    }

    /// Looks whether there is space now.
    pub(super) fn look_again(&self, space: &mut Space, room: &Room) {
        // What the file system refuses it grants when it makes a file, and does not tell before.
        if matches!(space.limit, Some(Limit::Refused(_))) {
            return;
        }
        let fed: Vec<Class> = {
            let starved = space.starved.iter();
            let fed = starved.filter(|class| self.limit_of(space, room, **class).is_none());
            fed.copied().collect()
        };
        if fed.is_empty() {
            return;
        }
        space.limit = None;
        self.feed(space, |starved| fed.contains(&starved));
    }

    fn feed(&self, space: &mut Space, is_fed: impl Fn(Class) -> bool) {
        let before = space.starved.len();
        space.starved.retain(|class| !is_fed(*class));
        if before > 0 && space.starved.is_empty() {
            self.around.notices.say(Level::Info, FED, || {
                "there is space for rows again".to_owned()
            });
        }
    }
}

/// What there is too little of, in figures.
fn missing(limit: Limit, space: &Space, system: &FileSystem) -> String {
    let root = space.root.path().display();
    let (free, total) = (system.available_bytes, system.total_bytes);
    match limit {
        Limit::MinFree => {
            let min_free = space.min_free.resolve(total);
            format!(
                "min_free: {min_free} bytes are to stay free on the file system of {root}, which \
                 has {free} of {total} bytes free"
            )
        }
        Limit::Inodes => format!(
            "the file system of {root} has {} of {} inodes free, of which {} are left to others",
            system.inodes_free,
            system.inodes_total,
            inodes_kept(system)
        ),
        Limit::Disk | Limit::Capacity => {
            format!("the file system of {root} has {free} of {total} bytes free")
        }
        Limit::Refused(number) => format!(
            "the file system of {root} has {free} of {total} bytes free and makes no row file ({})",
            io::Error::from_raw_os_error(number)
        ),
    }
}
