//! Row files on their way back to the file system.

use core::time::Duration;
use std::io;

use crate::eviction::{Class, ContainerId};
use crate::key::GroupId;
use crate::metrics::count;
use crate::sys::fs::Directory;
use crate::sys::sync::{Arc, lock};
use crate::tier::container::Container;
use crate::tier::disk::DiskTier;
use crate::tier::inventory::Inventory;
use crate::tier::space::{Freed, Room, Space};

/// Most files that other groups give back for one new file.
const TAKE_OVER_MAX: usize = 8;

/// A file of another group is only taken when it has not been used for longer than this group's
/// next victim, by one part in this many: without it, two groups with the same demand would take
/// each other's files in turn.
const AGE_MARGIN: u64 = 8;

/// Shortest and longest time between two looks at the limits.
const LOOK_MIN: Duration = Duration::from_secs(2);
const LOOK_MAX: Duration = Duration::from_secs(18);
/// What strangers may be expected to take in a second: the closer a limit, the sooner the next look.
const STRANGER_BYTES_PER_SECOND: i128 = 1 << 30;
const STRANGER_INODES_PER_SECOND: i128 = 10_000;

impl DiskTier {
    /// Gives files back until what is there fits the limits, which may be broken by a smaller
    /// capacity than before, or by strangers. Says when to look again, if there is anything left
    /// to give, or if stores wait for space.
    pub(super) fn keep_limits(&self) -> Option<Duration> {
        let mut space = lock(&self.space);
        // What sparse files are still promised is not missing yet.
        let system = space.root.statistics();
        let room = match system.map(|system| Room::new(&space, &system, 0)) {
            Ok(room) => room,
            Err(error) => {
                let path = space.root.path().to_path_buf();
                self.space_error(&path, &error);
                return Some(LOOK_MAX);
            }
        };
        let room = self.give_back_while_short(&mut space, room);
        self.look_again(&mut space, &room);
        let starved = !space.starved.is_empty();
        let mut state = lock(&self.state);
        // What could not be written is tried again.
        let untried = state.inventory.try_unwritable();
        let any = !space.foreign.is_empty() || state.inventory.containers().next().is_some();
        drop(state);
        for file in untried {
            // Loads may have opened it for reading only.
            file.file.close();
        }
        (any || starved).then(|| next_look(&room))
    }

    /// Gives back other namespaces' files, then the coldest of our own, while a limit is broken.
    /// One that cannot go leaves its turn to the next, and is tried again at the next look.
    fn give_back_while_short(&self, space: &mut Space, mut room: Room) -> Room {
        let mut kept = Vec::new();
        while room.is_short() {
            if let Some(freed) = self.give_back_foreign(space) {
                room = room.without(&freed);
                continue;
            }
            let Some(coldest) = coldest(&lock(&self.state).inventory, &kept) else {
                break;
            };
            match self.give_back(space, coldest) {
                Some(freed) => room = room.without(&freed),
                None => kept.push(coldest),
            }
        }
        room
    }

    /// Takes other namespaces' files until a file of `bytes` can be made, or none is left.
    pub(super) fn make_room(&self, space: &mut Space, bytes: u64) -> io::Result<Room> {
        let mut room = self.room(space)?;
        while !room.takes(bytes) {
            let Some(freed) = self.give_back_foreign(space) else {
                break;
            };
            room = room.without(&freed);
        }
        Ok(room)
    }

    /// Removes the file of another namespace that goes first; says what that freed. One that cannot
    /// go is tried again after all others.
    fn give_back_foreign(&self, space: &mut Space) -> Option<Freed> {
        for _ in 0..space.foreign.len() {
            let file = space.foreign.pop()?;
            match unlink(&file.directory, &file.name) {
                Ok(disk_bytes) => {
                    self.around.metrics.evicted_files.add(1);
                    let counted_bytes = file.allocated_bytes;
                    space.used_bytes = space.used_bytes.saturating_sub(counted_bytes);
                    return Some(Freed {
                        counted_bytes,
                        disk_bytes,
                    });
                }
                Err(error) => {
                    self.space_error(&file.directory.path_of(&file.name), &error);
                    space.foreign.insert(0, file);
                }
            }
        }
        None
    }

    /// Gives files of other groups back if all of them were last used before the next victim of
    /// this class, or if this class has fewer victims than it is `short` of rows; and if a file of
    /// it can then be made: that is how space moves between groups.
    pub(super) fn take_over_files(&self, space: &mut Space, class: Class, short: usize) -> bool {
        let Some(shape) = self.shape(class) else {
            return false;
        };
        let mut state = lock(&self.state);
        let begun = state.kept.tick();
        let before = oldest_kept(&mut state.inventory, class, short, begun);
        let room = space.boundless_room();
        if files_to_take(&state.inventory, space, (class, shape), before, room).is_empty() {
            return false;
        }
        drop(state);
        let Ok(room) = self.room(space) else {
            return false;
        };
        if space.could_grow(&room, shape) {
            // It was not for want of space that no file could be made.
            return false;
        }
        let state = lock(&self.state);
        let files = files_to_take(&state.inventory, space, (class, shape), before, room);
        drop(state);
        // The first that cannot go ends it: the others would go for nothing.
        let all_went = files.iter().all(|id| self.give_back(space, *id).is_some());
        all_went && !files.is_empty()
    }

    /// Removes a file that nobody uses and evicts all its rows; says what that freed. A file that
    /// cannot be removed keeps its rows.
    fn give_back(&self, space: &mut Space, id: ContainerId) -> Option<Freed> {
        let state = lock(&self.state);
        if !state.inventory.can_evict_container(id) {
            return None;
        }
        let row_file = Arc::clone(&state.inventory.container(id)?.row_file);
        drop(state);
        let disk_bytes = match unlink(row_file.file.directory(), row_file.file.name()) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.space_error(&row_file.path(), &error);
                return None;
            }
        };
        let mut state = lock(&self.state);
        let Some(evicted) = state.inventory.evict_container(id) else {
            // A load has found one of its rows meanwhile. The file is without a name: its space is
            // free, and counted so, when the load has ended.
            state.inventory.lose_container(id);
            return Some(Freed::default());
        };
        let container = state.inventory.remove_container(id)?;
        drop(state);
        row_file.file.close();
        self.around.metrics.evicted_rows.add(count(evicted));
        self.around.metrics.evicted_files.add(1);
        let counted_bytes = container.allocated_bytes;
        space.used_bytes = space.used_bytes.saturating_sub(counted_bytes);
        Some(Freed {
            counted_bytes,
            disk_bytes,
        })
    }

    /// Unlinks a row file; a file that is gone already counts as removed.
    fn remove_file(&self, space: &mut Space, container: &Container) {
        let file = &container.row_file.file;
        let removed = unlink(file.directory(), file.name());
        file.close();
        match removed {
            Ok(_) => {
                let bytes = container.allocated_bytes;
                space.used_bytes = space.used_bytes.saturating_sub(bytes);
            }
            Err(error) => self.space_error(&container.row_file.path(), &error),
        }
    }

    /// Removes the files that vanished or were cut, once nobody uses their rows.
    pub(super) fn give_back_lost_files(&self) {
        let mut state = lock(&self.state);
        let lost: Vec<ContainerId> = state
            .inventory
            .containers()
            .filter(|(_, container)| container.lost && container.rows.is_unused())
            .map(|(id, _)| id)
            .collect();
        if lost.is_empty() {
            return;
        }
        let containers: Vec<Container> = lost
            .iter()
            .filter_map(|id| state.inventory.remove_container(*id))
            .collect();
        drop(state);
        let mut space = lock(&self.space);
        for container in &containers {
            self.remove_file(&mut space, container);
        }
    }
}

/// The file that goes first, of any class, but for those that were `kept`.
fn coldest(inventory: &Inventory, kept: &[ContainerId]) -> Option<ContainerId> {
    inventory
        .classes()
        .flat_map(|(class, _)| inventory.coldest_containers(class, kept.len() + 1))
        .filter(|(id, _)| !kept.contains(id))
        .min_by_key(|(_, tick)| *tick)
        .map(|(id, _)| id)
}

/// The fewest files of other groups, coldest first and last used before the tick `before`, in whose
/// place a file of a class can be made; none when all of those do not do.
fn files_to_take(
    inventory: &Inventory,
    space: &Space,
    (class, shape): (Class, (GroupId, u64)),
    before: u64,
    mut room: Room,
) -> Vec<ContainerId> {
    let mut others: Vec<(u64, ContainerId)> = inventory
        .classes()
        .filter(|(of, _)| *of != class)
        .flat_map(|(of, _)| inventory.coldest_containers(of, TAKE_OVER_MAX))
        .filter(|(_, tick)| *tick < before)
        .map(|(id, tick)| (tick, id))
        .collect();
    others.sort_unstable();
    let mut chosen = Vec::new();
    for (_, id) in others.into_iter().take(TAKE_OVER_MAX) {
        // A sparse file gives back what it was promised too.
        let bytes = inventory.container(id).map_or((0, 0), |file| {
            let whole = file.row_file.geometry.file_bytes();
            (file.allocated_bytes, whole)
        });
        room = room.without(&Freed {
            counted_bytes: bytes.0,
            disk_bytes: bytes.1,
        });
        chosen.push(id);
        if space.could_grow(&room, shape) {
            return chosen;
        }
    }
    Vec::new()
}

/// Files of other classes are kept from `class`, which is `short` of rows, when they were used at
/// this tick or later. `begun` is when the stores that need them were.
fn oldest_kept(inventory: &mut Inventory, class: Class, short: usize, begun: Option<u64>) -> u64 {
    let now = inventory.now();
    if inventory.evictable(class) < short {
        // Once all of its own that can go is gone, what others have is the oldest, but for what
        // they came to have or use while these stores were planned.
        return begun.map_or(u64::MAX, |tick| tick.saturating_add(1));
    }
    inventory.coldest(class).map_or(u64::MAX, |own| {
        own.saturating_sub(now.saturating_sub(own) / AGE_MARGIN)
    })
}

/// When to look at the limits again.
fn next_look(room: &Room) -> Duration {
    let seconds = (room.free_bytes / STRANGER_BYTES_PER_SECOND)
        .min(room.inodes / STRANGER_INODES_PER_SECOND)
        .max(0);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(u64::MAX)).clamp(LOOK_MIN, LOOK_MAX)
}

/// Unlinks a row file; says how many bytes it took. What bears its name and is no regular file is
/// a stranger's: it stays.
fn unlink(directory: &Directory, name: &str) -> io::Result<u64> {
    let removed = match directory.stat(name) {
        Ok(stat) if !stat.is_regular => return Ok(0),
        Ok(stat) => directory.unlink(name).map(|()| stat.allocated_bytes),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closer_a_limit_the_sooner_the_next_look() {
        let room = |free_bytes: i128, inodes: i128| Room {
            capacity_bytes: 0,
            free_bytes,
            min_free_bytes: 0,
            inodes,
        };
        for (room, seconds) in [
            (room(-5, 1 << 40), 2),
            (room(1 << 50, -5), 2),
            (room(5 << 30, 1 << 40), 5),
            (room(1 << 50, 70_000), 7),
            (room(1 << 50, 1 << 40), 18),
        ] {
            assert_eq!(next_look(&room), Duration::from_secs(seconds), "{room:?}");
        }
    }
}
