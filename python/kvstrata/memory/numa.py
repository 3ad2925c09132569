"""On which memory nodes the arena's pages are put (``mbind(2)``), said before they are touched.

A policy is a wish: a machine with one node needs none, and a sandbox may forbid the call.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

POLICIES = ("off", "local", "interleave")

_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_CALL = {"x86_64": 237, "aarch64": 235}
_NODES = Path("/sys/devices/system/node")
_BITS = 64

logger = logging.getLogger(__name__)


def apply(policy: str, address: int, nbytes: int, nodes_dir: Path = _NODES) -> bool:
    """Ask for `policy` for ``[address, address + nbytes)``; `False` where nothing was asked.

    `local` prefers the node this thread runs on, `interleave` goes round all nodes.

    # Errors
    `ValueError` for a policy that is none.
    """
    if policy not in POLICIES:
        msg = f"numa is {policy!r}, not one of {', '.join(POLICIES)}"
        raise ValueError(msg)
    nodes = online(nodes_dir)
    if policy == "off" or len(nodes) < 2:  # noqa: PLR2004 -- one node leaves no choice
        return False
    if policy == "local":
        mode, chosen = _MPOL_PREFERRED, [_current(nodes, nodes_dir)]
    else:
        mode, chosen = _MPOL_INTERLEAVE, nodes
    return _mbind(address, nbytes, mode, chosen)


def online(nodes_dir: Path = _NODES) -> list[int]:
    """The memory nodes of this machine, from a list like ``0-1,3``."""
    try:
        text = (nodes_dir / "has_memory").read_text(encoding="ascii").strip()
    except OSError:
        return []
    return _numbers(text)


def _numbers(text: str) -> list[int]:
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def _current(nodes: list[int], nodes_dir: Path) -> int:
    """The node with the first processor this process may use."""
    allowed = os.sched_getaffinity(0)
    for node in nodes:
        try:
            text = (nodes_dir / f"node{node}/cpulist").read_text(encoding="ascii").strip()
        except OSError:
            continue
        if allowed.intersection(_numbers(text)):
            return node
    return nodes[0]


def _mbind(address: int, nbytes: int, mode: int, nodes: list[int]) -> bool:
    number = _CALL.get(platform.machine())
    if number is None:
        logger.warning("kvstrata: no memory policy on %s", platform.machine())
        return False
    words = [0] * (max(nodes) // _BITS + 1)
    for node in nodes:
        words[node // _BITS] |= 1 << node % _BITS
    mask = (ctypes.c_uint64 * len(words))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(mode),
        mask,
        ctypes.c_ulong(len(words) * _BITS + 1),
        ctypes.c_uint(0),
    )
    if answer != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.warning("kvstrata: the kernel refused the memory policy for the arena: %s", reason)
        return False
    return True
