"""Keeping a worker on the CPUs that are nearest to its accelerators (``launch(..., numa_bind=True)``).

Only the CPUs are bound: Linux takes memory from the node of the CPU that touches it first (MPOL_DEFAULT), so that it
follows, and does not fail when that node is full.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors.settings import PROBE_ROOT


@dataclass(frozen=True)
class Binding:
    """What to do.

    Attributes:
        cpus: the CPUs to stay on; empty to change nothing.
        why: why nothing, or not all, is done; "" if all is.
    """

    cpus: frozenset[int] = frozenset()
    why: str = ""


def choose(nodes: Sequence[int], allowed: AbstractSet[int], root: Path) -> Binding:
    """The CPUs of some NUMA nodes that this process may use.

    Args:
        nodes: NUMA nodes of the worker's accelerators; empty if they are not known.
        allowed: CPUs that this process may run on.
        root: where the kernel describes its nodes: ``/sys/devices/system/node``.
    """
    if not nodes:
        return Binding(why="the NUMA node of its accelerators is not known")
    named = f"NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
    cpus: set[int] = set()
    for node in nodes:
        try:
            cpus |= parse_cpus((root / f"node{node}" / "cpulist").read_text())
        except (OSError, ValueError) as error:
            return Binding(why=f"the CPUs of NUMA node {node} cannot be read: {error}")
    chosen = frozenset(cpus & allowed)
    if not chosen:
        return Binding(why=f"it may use none of the CPUs of {named} ({spell(cpus)}), only {spell(allowed)}")
    return Binding(chosen)


def bind(nodes: Sequence[int]) -> None:
    """Stay on the CPUs of *nodes*, or say on stderr why not. Before any thread is started: those inherit it."""
    root = Path(f"{os.environ.get(PROBE_ROOT, '').rstrip('/')}/sys/devices/system/node")
    binding = choose(nodes, os.sched_getaffinity(0), root)
    if binding.cpus:
        os.sched_setaffinity(0, binding.cpus)
    if binding.why:
        print(f"[rlinf-actors] not bound to a NUMA node: {binding.why}", file=sys.stderr)  # noqa: T201 the worker's log


def parse_cpus(text: str) -> set[int]:
    """The CPUs in the kernel's list format: ``0-3,8,10-11``.

    Raises:
        ValueError: it is none.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def spell(cpus: Iterable[int]) -> str:
    """CPUs for people, in the kernel's list format; "none" without any."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
