//! What a file system says of itself.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{fstatfs, fstatvfs};

/// Kind and room of the file system that holds a directory or file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Linux's magic number of the kind.
    pub magic: u64,
    /// Name of the kind, `"unknown"` where the magic number is not in our table.
    pub name: &'static str,
    /// Allocation unit in bytes.
    pub block_bytes: u64,
    /// Size in bytes.
    pub total_bytes: u64,
    /// Bytes an ordinary user may still allocate.
    pub available_bytes: u64,
    /// Inodes in all; 0 where the file system does not count them.
    pub inodes_total: u64,
    /// Inodes left.
    pub inodes_free: u64,
}

/// Magic numbers from `linux/magic.h` and the file systems' own headers.
const NAMES: [(u64, &str); 18] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58F6, "ramfs"),
    (0x794C_7630, "overlayfs"),
    (0xF2F5_2010, "f2fs"),
    (0x2FC1_2FC1, "zfs"),
    (0xCA45_1A4E, "bcachefs"),
    (0x4D44, "vfat"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb2"),
    (0x00C3_6400, "ceph"),
    (0x0BD0_0BD0, "lustre"),
    (0x4750_4653, "gpfs"),
];

/// Name of the kind with `magic`.
fn name_of(magic: u64) -> &'static str {
    NAMES
        .iter()
        .find(|(number, _)| *number == magic)
        .map_or("unknown", |(_, name)| name)
}

/// Asks the file system that holds `fd`.
pub(super) fn file_system(fd: impl AsFd) -> io::Result<FileSystem> {
    let magic = u64::try_from(fstatfs(&fd)?.f_type).unwrap_or(0);
    let room = fstatvfs(&fd)?;
    Ok(FileSystem {
        magic,
        name: name_of(magic),
        block_bytes: room.f_frsize,
        total_bytes: room.f_blocks.saturating_mul(room.f_frsize),
        available_bytes: room.f_bavail.saturating_mul(room.f_frsize),
        inodes_total: room.f_files,
        inodes_free: room.f_ffree,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_magic_number_has_a_name_and_another_is_unknown() {
        assert_eq!(name_of(0xEF53), "ext4");
        assert_eq!(name_of(0x6573_5546), "fuse");
        assert_eq!(name_of(1), "unknown");
    }
}
