"""Many starts and stops leave every process as it was. `--cycles 1000` is the long form."""

from __future__ import annotations

import math
import os

import pace
import pytest
from cycle_kit import Small, alive, check, files, held, template_of
from nightly import Figures

from rlinf_actors import Cluster, NodePlacementStrategy, WorkerDiedError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

WARM_UP = 5
"""Cycles before the first measurement, to fill caches and pools."""


@pytest.fixture
def cycles(request):
    return request.config.option.cycles


def once(cluster, n):
    """Launch and end a group; every third one ends by a crash."""
    group = Small.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name=f"group-{n}")
    pids = [pid for pid, _ in group.work(n % 2 == 0).wait()]
    assert len(group.big().wait()) == len(pids) == 2
    if n % 3 == 0:
        os.kill(pids[0], 9)
    group.shutdown()


def test_cycles_of_groups_leave_no_resources(rlinf_leak_check, cycles, figures: Figures):
    with Cluster(num_nodes=1) as cluster:
        agent = cluster._daemon._process.pid

        def look():
            pids = {"driver": os.getpid(), "agentd and head": agent, "template": template_of(agent)}
            return [held(name, pid) for name, pid in pids.items()], files(cluster._daemon.run_dir, pids["template"])

        for n in range(WARM_UP):
            once(cluster, n)
        before, there = pace.settled(look)
        for n in range(WARM_UP, WARM_UP + cycles):
            once(cluster, n)
            figures.done(n + 1 - WARM_UP, cycles, "groups")
        after, left = pace.again_like(look, (before, there))
        assert left == there
        check(before, after, cycles, "groups", figures)


def test_cycles_of_drivers_leave_no_resources(rlinf_leak_check, cycles, figures: Figures):
    with LocalCluster(1) as local:
        agent = local.nodes[0].pid

        def look():
            pids = {"driver": os.getpid(), "agentd and head": agent, "template": template_of(agent)}
            return [held(name, pid) for name, pid in pids.items()], files(local.nodes[0].run_dir, pids["template"])

        def life(n, look=lambda: None):
            with Cluster(num_nodes=1, head=local.head, keys=local.keys) as cluster:
                once(cluster, n)
                return look()  # measured while this driver lives, when the end of the driver before is complete

        for n in range(WARM_UP):
            life(n)
        before, there = life(WARM_UP, lambda: pace.settled(look))
        for n in range(WARM_UP + 1, WARM_UP + cycles):
            life(n)
            figures.done(n + 1 - WARM_UP, cycles, "drivers")
        after, left = life(WARM_UP + cycles, lambda: pace.again_like(look, (before, there)))
        assert left == there
        check(before, after, cycles, "drivers", figures)


def test_cycles_of_clusters_leave_no_resources(rlinf_leak_check, cycles, figures: Figures):
    def life(n):
        with Cluster(num_nodes=1) as cluster:
            once(cluster, n)

    some = max(1, cycles // 6)  # each cycle takes a second or two
    for n in range(2):
        life(n)

    def look():
        return held("driver", os.getpid())

    before = pace.settled(look)
    for n in range(some):
        life(n)
        figures.done(n + 1, some, "private clusters")
    check([before], [pace.again_like(look, before)], some, "private clusters", figures)


def test_no_setsid_grandchild_of_a_killed_worker_is_left(rlinf_leak_check, cycles, figures: Figures):
    """When the call has failed, the worker's children have ended."""
    survivors = []
    with Cluster(num_nodes=1) as cluster:
        for n in range(0, cycles, 5):
            group = Small.create_group().launch(cluster, NodePlacementStrategy([0] * 5), name=f"group-{n}")
            left = group.leave().wait()
            for rank, (pid, child) in enumerate(left):
                waiting = group.execute_on(rank).block()
                os.kill(pid, 9)
                with pytest.raises(WorkerDiedError):
                    waiting.wait()
                if alive(child):
                    survivors.append(child)
            group.shutdown()
            figures.done(n + 5, math.ceil(cycles / 5) * 5, "killed workers with a grandchild")
    figures.add("grandchildren that were left", len(survivors))
    assert survivors == []
