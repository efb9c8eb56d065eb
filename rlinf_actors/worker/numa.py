"""Binding a worker to the NUMA nodes of its accelerators: decided from /sys by pure code, done by two system calls."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = "/sys/devices/system/node"

_MPOL_PREFERRED = 1
_MPOL_PREFERRED_MANY = 5
"""linux/mempolicy.h: memory from that node first, from those nodes first (Linux 5.15), else from any."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "loongarch64": 237}
"""Numbers of set_mempolicy(2), which libc has no function for: asm/unistd_64.h and asm-generic/unistd.h."""
_LONG_BITS = ctypes.sizeof(ctypes.c_ulong) * 8


@dataclass(frozen=True)
class Binding:
    """What to do, and what to say.

    Attributes:
        cpus: to run on; empty: as before.
        memory: NUMA nodes to prefer memory of; empty: as before.
        note: why the worker is not bound, or not wholly; "" if it is.
    """

    cpus: frozenset[int] = frozenset()
    memory: tuple[int, ...] = ()
    note: str = ""


def decide(wanted: Sequence[int], tree: str, allowed: Collection[int]) -> Binding:
    """How a worker is to be bound. Reads files, changes nothing.

    Args:
        wanted: NUMA nodes of its accelerators, -1 where unknown.
        tree: directory of the kernel's NUMA nodes.
        allowed: CPUs that the process may run on now (its cpuset).
    """
    if min(wanted, default=-1) < 0:
        return Binding(note="the NUMA node of its accelerators is not known")
    cpus: set[int] = set()
    for node in wanted:
        try:
            mine = parse_cpus(Path(tree, f"node{node}", "cpulist").read_text())
        except OSError as error:
            return Binding(note=f"the kernel does not show NUMA node {node} ({error.filename}: {error.strerror})")
        if not mine & set(allowed):
            return Binding(note=f"none of the CPUs of NUMA node {node} is among those that this process may use")
        cpus |= mine & set(allowed)
    memory = tuple(node for node in wanted if _has_memory(node, tree))
    missing = [str(node) for node in wanted if node not in memory]
    return Binding(frozenset(cpus), memory, f"NUMA node {', '.join(missing)} has no memory" if missing else "")


def parse_cpus(text: str) -> set[int]:
    """CPUs of the kernel's list form, such as ``0-3,8``; empty for a node without any."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def bind(wanted: Sequence[int], root: str = "") -> str:
    """Bind this process, whose threads-to-be inherit it; call it before there are others.

    Args:
        wanted: NUMA nodes of its accelerators, -1 where unknown.
        root: directory that has the machine's ``sys``, "" for ``/``; the probe's RLINF_ACTORS_PROBE_ROOT.

    Returns:
        What its log should say; "" if it is bound as wanted.

    Raises:
        OSError: the kernel refuses CPUs that it has just listed.
    """
    found = decide(wanted, root + SYSFS, os.sched_getaffinity(0))
    if found.cpus:
        os.sched_setaffinity(0, found.cpus)
    refused = prefer_memory(found.memory) if found.memory else ""
    said = "; ".join(text for text in (found.note, refused) if text)
    if not said:
        return ""
    return f"numa_bind: {said}; {'only its CPUs are bound' if found.cpus else 'this worker is not bound'}"


def prefer_memory(nodes: Sequence[int]) -> str:
    """Let this thread, and those that it makes, take memory of *nodes* first. Returns why not, "" if it does."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory cannot be preferred on {platform.machine()}"
    words = max(nodes) // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _LONG_BITS] |= 1 << node % _LONG_BITS
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_PREFERRED_MANY
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than maxnode says (set_mempolicy(2), "BUGS" of the C library's wrapper).
    size = ctypes.c_ulong(words * _LONG_BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, size):
        return f"the kernel does not let memory be preferred: {os.strerror(ctypes.get_errno())}"
    return ""


def _has_memory(node: int, tree: str) -> bool:
    """Whether a NUMA node has memory: nodes of CPUs alone exist, and the kernel refuses to prefer them."""
    try:
        return node in parse_cpus(Path(tree, "has_memory").read_text())
    except OSError:
        return True  # kernels from before the file: only they can tell
