"""Which CPUs a worker stays on: pure, and for real on a machine whose NUMA nodes a test makes up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import FlexiblePlacementStrategy, Worker
from rlinf_actors.testing import LocalCluster
from rlinf_actors.worker.numa import choose, parse_cpus, spell


def make_nodes(root: Path, *cpulists: str) -> Path:
    for number, text in enumerate(cpulists):
        directory = root / f"node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{text}\n")
    return root


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cpus_reads_as_it_was_written(cpus):
    assert parse_cpus(spell(cpus) if cpus else "") == cpus


@pytest.mark.parametrize(
    ("nodes", "allowed", "cpus", "why"),
    [
        ([0], range(8), {0, 1, 2, 3}, ""),
        ([1], range(8), {4, 5}, ""),
        ([0, 1], range(8), {0, 1, 2, 3, 4, 5}, ""),
        ([0], {2, 7}, {2}, ""),
        ([1], {0, 1}, set(), "none of the CPUs of NUMA node 1 (4-5), only 0-1"),
        ([], range(8), set(), "is not known"),
        ([0, 9], range(8), set(), "CPUs of NUMA node 9 cannot be read"),
        ([2], range(8), set(), "CPUs of NUMA node 2 cannot be read"),
    ],
)
def test_the_choice(tmp_path, nodes, allowed, cpus, why):
    root = make_nodes(tmp_path, "0-3", "4,5", "four")
    found = choose(nodes, set(allowed), root)
    assert set(found.cpus) == cpus
    assert why in found.why
    assert bool(found.cpus) is not bool(found.why)


class Bound(Worker):
    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def threads(self) -> int:
        import torch

        return int(torch.get_num_threads())


@pytest.mark.live
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_stay_next_to_their_accelerators(tmp_path, capfd):
    ours = sorted(os.sched_getaffinity(0))
    first, second, *rest = ours
    make_nodes(tmp_path / "sys/devices/system/node", str(first), spell([second, *rest]))
    hardware = {"accelerators": 3, "numa_nodes": [0, 1, -1]}

    def launch(cluster, ranks, **options):
        strategy = FlexiblePlacementStrategy(ranks)
        return Bound.create_group().launch(cluster, strategy, name=f"g{len(ranks)}{len(ranks[0])}{options}", **options)

    with (
        LocalCluster(1, hardware=hardware, env={"RLINF_ACTORS_PROBE_ROOT": str(tmp_path)}) as local,
        local.cluster() as cluster,
    ):
        with launch(cluster, [[0], [1], [2]], numa_bind=True) as group:
            assert group.cpus().wait() == [[first], [second, *rest], ours]
        with launch(cluster, [[0, 1]], numa_bind=True, start_method="spawn") as group:
            assert group.cpus().wait() == [ours]
        with launch(cluster, [[0]]) as group:
            assert group.cpus().wait() == [ours]
    assert "not bound to a NUMA node: the NUMA node of its accelerators is not known" in capfd.readouterr().err


@pytest.mark.live
@pytest.mark.torch
def test_libraries_get_as_many_threads_as_there_are_cpus_left(tmp_path):
    make_nodes(tmp_path / "sys/devices/system/node", str(min(os.sched_getaffinity(0))))
    with (
        LocalCluster(
            1, hardware={"accelerators": 1, "numa_nodes": [0]}, env={"RLINF_ACTORS_PROBE_ROOT": str(tmp_path)}
        ) as local,
        local.cluster() as cluster,
        Bound.create_group().launch(cluster, numa_bind=True, preload=["torch"]) as group,
    ):
        assert group.threads().wait() == [1]
