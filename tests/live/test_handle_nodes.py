"""Handles that travel between nodes, with keys and without, and detached groups of drivers with keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import handle_workers as hw
import live_workers as lw
import pace
import pytest
from keyed_cluster import keyed_cluster

from rlinf_actors import Channel, NodePlacementStrategy
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


def test_handles_travel_between_nodes_without_keys():
    with LocalCluster(2) as local, local.cluster() as cluster:
        counter = lw.on_every_node(cluster, hw.Counter, name="counter")
        holder = lw.on_every_node(cluster, hw.Holder, name="holder")
        assert sorted(rank for pair in holder.calls(counter).wait() for rank in pair) == [1, 1, 2, 2]
        view = counter.execute_on(1)
        channel = Channel.create("far", node_rank=1)
        channel.put(view)
        assert holder.execute_on(0).takes(channel).wait() == [[3]]
        [[kind, _]] = holder.execute_on(0).kills(view).wait()
        assert kind == "WorkerDiedError"


def test_first_use_of_a_handle_in_a_running_loop_does_not_wait_for_the_head():
    with LocalCluster(2, options=pace.timers(beat_s=0.1)) as local, local.cluster() as cluster:
        counter = lw.many(cluster, hw.Counter, 1, name="counter")
        counter.add().wait()
        caller = hw.AsyncHolder.create_group().launch(cluster, NodePlacementStrategy([1]), name="caller")
        assert caller.calls_while_the_head_stands(counter, local.nodes[0].pid).wait() == [[2, 3]]


@pytest.fixture(scope="module")
def keyed():
    with keyed_cluster() as made:
        made.node("n1")
        made.join("ann", "--driver")
        made.join("bob", "--driver")
        yield made


def said(keyed, who, what):
    """What keyed_handles_driver.py has printed."""
    script = Path(__file__).with_name("keyed_handles_driver.py")
    done = subprocess.run(
        [sys.executable, script, what], env=keyed.env(who), capture_output=True, text=True, timeout=pace.PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_handles_travel_between_nodes_with_keys(keyed):
    assert said(keyed, "ann", "send") == "[[1], [2], [3], [4]]"


def test_detached_group_is_reachable_only_with_its_drivers_key(keyed):
    assert said(keyed, "ann", "leave") == "[['it']]"
    refused = said(keyed, "bob", "find")
    assert "may not join job 'standing': it is the job of driver 'ann'" in refused
    refused = keyed.cli("groups", "stop", "left", "--job", "standing", at="bob", code=64)
    assert "there is no group 'left' in job 'standing'" in refused.err  # it is not shown to others
    assert said(keyed, "ann", "find") == "[['it', 'too']]"
    keyed.cli("groups", "stop", "left", "--yes", at="ann")
