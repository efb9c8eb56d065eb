"""Strangers at every port of a running cluster: nothing of theirs arrives, nothing of ours is lost.

``--malformed-connections 10000`` makes as many to each socket, and prints what the job's calls took meanwhile. By a
network, and at workers' ports: tests/netns/test_strangers_from_far.py.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import attacked_workers
import pace
import pytest
import strangers
from listening import listening

from rlinf_actors import Cluster, NodePlacementStrategy, procfs
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

FEW = 256
GROWTH = 20 << 20
"""Bytes that strangers may cost a process."""


@pytest.fixture
def few_files() -> Iterator[None]:
    """Few descriptors for what is started: those who listen have to raise that themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def local(few_files: None) -> Iterator[LocalCluster]:
    with LocalCluster(2, env={"PYTHONPATH": str(Path(__file__).parent)}) as made:
        yield made


def counters(cluster: Cluster) -> attacked_workers.Counter:
    group = attacked_workers.Counter.create_group().launch(
        cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="counters"
    )
    group.hit().wait()
    return group


@pytest.mark.timeout(600)
def test_strangers_cost_little_and_reach_nothing(local: LocalCluster, request: pytest.FixtureRequest):
    count = request.config.option.malformed_connections
    cluster = local.cluster()
    group = counters(cluster)
    workers = group.pid().wait()
    targets = [node.pid for node in local.nodes] + workers
    addresses = listening(pid for node in local.nodes for pid in procfs.subtree(node.pid))
    assert len(addresses) == 6
    strangers.knock(addresses, 5, 0)
    quiet, loud = strangers.Latencies(), strangers.Latencies()
    for _ in range(max(100, min(count, 1000))):
        quiet.of(lambda: group.hit().wait())

    def descriptors() -> dict[int, list[str]]:
        return {pid: strangers.descriptors(pid) for pid in targets}

    fds = pace.settled(descriptors)
    memory = {pid: strangers.resident(pid) for pid in targets}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.nice, (19,)) as others:
        # nice, since strangers have processors of their own: what they make others do is what counts
        came = others.submit(strangers.knock, addresses, count, 1)
        while not came.done():
            loud.of(lambda: group.hit().wait())
        ends = came.result()
    assert group.hit().wait() == [len(quiet) + len(loud) + 2] * 2, "a call of somebody else's was run"
    grown = {pid: strangers.resident(pid) - before for pid, before in memory.items()}
    assert all(bytes < GROWTH for bytes in grown.values()), grown
    assert pace.again_like(descriptors, fds) == fds
    for node in local.nodes:
        assert node.alive
        assert "Traceback" not in node.log()
        assert "internal error" not in node.log()
    print(
        f"\n{ends}\np99 of a call of two ranks: {quiet.p99:.2f} ms alone, {loud.p99:.2f} ms with strangers "
        f"({len(quiet)} and {len(loud)} calls); memory grew by {[n >> 10 for n in grown.values()]} KiB"
    )


def test_idle_connections_keep_no_node_from_joining(local: LocalCluster, request: pytest.FixtureRequest):
    count = max(500, request.config.option.malformed_connections // 2)
    head = [one for one in listening([local.nodes[0].pid]) if one.path == "" or one.path.endswith("/head")]
    assert len(head) == 2
    local.stop_node(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1], hard))
    idle = []
    try:
        for number in range(count):
            idle.append(head[number % 2].connect())
        local.restart_agent(1)
        assert counters(local.cluster()).hit().wait() == [2, 2]
    finally:
        for link in idle:
            link.close()
