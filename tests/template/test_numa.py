"""NumaBinding to NUMA nodes: the decision on made-up machines, the act on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors.template import child_setup
from rlinf_actors.template.child_setup import NumaBinding, decide, parse_cpus


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """Two nodes of four CPUs, one without memory, one without CPUs."""
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7", "8", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "has_memory").write_text("0-1,3\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "allowed", "expected"),
    [
        ([0], range(9), NumaBinding(frozenset({0, 1, 4, 5}), (0,))),
        ([0, 1], range(9), NumaBinding(frozenset(range(8)), (0, 1))),
        ([1], [2, 3], NumaBinding(frozenset({2, 3}), (1,))),
        ([2], range(9), NumaBinding(frozenset({8}), (), "NUMA node 2 has no memory")),
        ([-1, 0], range(9), NumaBinding(note="the NUMA node of its accelerators is not known")),
        ([0, 1], [0], NumaBinding(note="none of the CPUs of NUMA node 1 is among those that this process may use")),
        ([3], range(9), NumaBinding(note="none of the CPUs of NUMA node 3 is among those that this process may use")),
    ],
)
def test_numa_binding_is_decided(tree: str, wanted: list[int], allowed: list[int], expected: NumaBinding) -> None:
    assert decide(wanted, tree, allowed) == expected


def test_a_kernel_without_the_files(tmp_path: Path) -> None:
    found = decide([1], str(tmp_path / "none"), range(4))
    assert (found.cpus, found.memory) == (frozenset(), ())
    assert found.note.startswith("the kernel does not show NUMA node 1 (")


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cpus("\n") == set()


def make_nodes(root: Path, *cpulists: str) -> None:
    for number, text in enumerate(cpulists):
        directory = root / "sys/devices/system/node" / f"node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{text}\n")


ACT = """
import os, sys
from rlinf_actors.template import child_setup as numa
said = numa.bind([0], sys.argv[1])
print(sorted(os.sched_getaffinity(0)), next(open("/proc/self/numa_maps")).split()[1], said, sep="|")
"""


def _bound(root: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", ACT, root], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip().split("|")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA policies")
def test_on_this_machines_node_0() -> None:
    mine = decide([0], child_setup.SYSFS, os.sched_getaffinity(0))
    assert _bound("") == [str(sorted(mine.cpus)), "prefer:0", ""]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA policies")
def test_on_one_cpu_only(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    make_nodes(tmp_path, str(cpu))
    assert _bound(str(tmp_path)) == [f"[{cpu}]", "prefer:0", ""]
