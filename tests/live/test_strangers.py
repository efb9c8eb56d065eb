"""Strangers at every port of a running cluster: nothing of theirs arrives, nothing of ours is lost.

``--strangers 10000`` makes as many to each socket, ``--idle-connections 5000`` as many to the head that say nothing.
From another machine, and at workers' ports: tests/netns/test_strangers_from_far.py.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import attacked_workers
import pace
import pytest
import strangers
from listening import listening
from nightly import Figures

from rlinf_actors import Cluster, NodePlacementStrategy, procfs
from rlinf_actors.settings import LOCAL_LINK
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

FEW = 256
GROWTH = 20 << 20
"""Bytes that strangers may cost a process."""
IDLE = 4 << 10
"""Bytes that each connection that stays open may cost it."""


@pytest.fixture
def few_files() -> Iterator[None]:
    """Few descriptors for what is started: those who listen have to raise that themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def local(few_files: None) -> Iterator[LocalCluster]:
    env = {"PYTHONPATH": str(Path(__file__).parent), LOCAL_LINK: "unix"}  # strangers come to the unix streams too
    with LocalCluster(2, env=env) as made:
        yield made


def counters(cluster: Cluster) -> attacked_workers.Counter:
    group = attacked_workers.Counter.create_group().launch(
        cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="counters"
    )
    group.hit().wait()
    return group


@pytest.mark.timeout(600)
def test_strangers_cost_little_and_reach_nothing(local: LocalCluster, request: pytest.FixtureRequest, figures: Figures):
    count = request.config.option.strangers
    cluster = local.cluster()
    group = counters(cluster)
    workers = group.pid().wait()
    targets = [node.pid for node in local.nodes] + workers
    addresses = listening(pid for node in local.nodes for pid in procfs.subtree(node.pid))
    assert len(addresses) == 12  # of each node: its keeper, its template, its worker thrice; and the head, twice
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
    assert ends.total() - ends["last"] == count * len(addresses)
    figures.done(count * len(addresses), count * len(addresses), "strangers, 0 of whom reached anything")
    figures.add("p99 of a call of two ranks, alone", f"{quiet.p99:.2f} ms of {len(quiet)}")
    figures.add("with strangers", f"{loud.p99:.2f} ms of {len(loud)}")
    figures.add("memory that a process grew by", f"at most {max(grown.values()) >> 10:,} KiB (limit {GROWTH >> 10:,})")


@pytest.mark.timeout(600)
def test_node_can_join_despite_idle_connections(local: LocalCluster, request: pytest.FixtureRequest, figures: Figures):
    count = request.config.option.idle_connections
    head = [one for one in listening([local.nodes[0].pid]) if one.path == "" or one.path.endswith("/head")]
    assert len(head) == 2
    local.stop_node(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1], hard))
    before = strangers.resident(local.nodes[0].pid)
    idle = []
    try:
        for number in range(count):
            idle.append(head[number % len(head)].connect())
        begun = time.monotonic()
        local.restart_agent(1)
        took = time.monotonic() - begun
        assert counters(local.cluster()).hit().wait() == [2, 2]
        grown = strangers.resident(local.nodes[0].pid) - before
    finally:
        for link in idle:
            link.close()
    most = GROWTH // 5 + count * IDLE
    assert grown < most, grown
    figures.done(len(idle), count, "idle connections")
    figures.add("start of a node beside them", f"{took:.2f} s")
    figures.add("memory that the head grew by", f"{grown >> 10:,} KiB (limit {most >> 10:,})")
