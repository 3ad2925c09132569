#!/usr/bin/env bash
# Runs a command while target/tmp, which holds the directories of Rust tests, is on another kind of
# file system, made for the purpose:
#   scripts/on_file_system.sh ext4|xfs|tmpfs|overlay|fuse COMMAND...
# The mounts are in namespaces of their own: however the command ends, the kernel takes them away.
# Exit status 77 after a line "skipped: ..." means that it cannot be done on this machine.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

SIZE=3G # at most; disks are images in memory, so that no other disk's syncs are waited for
PLACE=${CARGO_TARGET_DIR:-$ROOT/target}/tmp

skip() {
    say "skipped: $*"
    exit 77
}

# On Debian the programs come from packages; elsewhere they have to be there.
need() {
    command -v "$1" >/dev/null || scripts/env.sh "system:$2" >&2 ||
        skip "$1 is not there (Debian: $2)"
}

# loop DIRECTORY MKFS...: mounts a new disk on which MKFS has made a file system.
loop() {
    local directory=$1 image=$CACHE/image/disk
    shift
    mkdir -p "$CACHE/image"
    mount -t tmpfs -o size="$SIZE" kvstrata-image "$CACHE/image"
    truncate -s "$SIZE" "$image"
    "$@" "$image" >&2 || fail "$1 does not work"
    mount -o loop "$image" "$directory" || skip "no loop device can be had"
}

# The part that runs inside: mounts over PLACE, then becomes the command's parent.
inside() {
    local kind=$1
    shift
    mkdir -p "$PLACE"
    case $kind in
        tmpfs) mount -t tmpfs -o size="$SIZE" kvstrata-tests "$PLACE" ;;
        ext4) loop "$PLACE" mkfs.ext4 -q -F ;;
        xfs) loop "$PLACE" mkfs.xfs -q -f ;;
        overlay)
            loop "$PLACE" mkfs.ext4 -q -F
            mkdir "$PLACE"/{lower,upper,work}
            mount -t overlay -o "lowerdir=$PLACE/lower,upperdir=$PLACE/upper,workdir=$PLACE/work" \
                kvstrata-tests "$PLACE" || skip "overlayfs cannot be mounted"
            ;;
        fuse)
            loop "$PLACE" mkfs.ext4 -q -F
            mkdir "$PLACE"/{below,above}
            # Ends with the process namespace.
            bindfs -f "$PLACE/below" "$PLACE/above" &
            until [[ $(stat -f -c %T "$PLACE/above") == fuse* ]]; do
                kill -0 $! 2>/dev/null || skip "FUSE cannot be mounted"
                sleep 0.01
            done
            mount --bind "$PLACE/above" "$PLACE"
            ;;
    esac
    KVSTRATA_TEST_FILE_SYSTEM=$kind "$@"
}

if [[ ${1:-} == --inside ]]; then
    shift
    inside "$@"
    exit
fi

case ${1:-} in
    ext4 | overlay) need mkfs.ext4 e2fsprogs ;;
    xfs) need mkfs.xfs xfsprogs ;;
    tmpfs) ;;
    fuse)
        need mkfs.ext4 e2fsprogs
        need fusermount3 fuse3
        need bindfs bindfs
        ;;
    *) fail "usage: on_file_system.sh ext4|xfs|tmpfs|overlay|fuse COMMAND..." ;;
esac
mkdir -p "$CACHE"
namespaces=(unshare --mount --pid --fork --kill-child --mount-proc)
"${namespaces[@]}" mount -t tmpfs probe /mnt 2>/dev/null || skip "this process may not mount anything"
"${namespaces[@]}" "${BASH_SOURCE[0]}" --inside "$@"
