"""Broadcasts over several nodes: a relay on each node, and the effect of a killed relay."""

from __future__ import annotations

import os
import signal

import message_workers as mw
import numpy as np
import pytest

from rlinf_actors import NodePlacementStrategy, PeerDiedError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

MIB = 1 << 20
GROUPS = [("a", list(range(6)))]


@pytest.fixture(scope="module")
def nodes():
    with LocalCluster(3) as local:
        yield local.cluster()


@pytest.fixture
def group(nodes):
    made = mw.AsyncTalker.create_group().launch(nodes, NodePlacementStrategy([0, 0, 1, 1, 2, 2]), name="a")
    yield made
    made.shutdown()


def test_large_and_small_broadcasts_arrive_in_order_on_every_node(group):
    values = [f"object {n}" if n % 2 else np.full(MIB, n, np.uint8) for n in range(24)]
    first = group.execute_on(0).give_many(values, GROUPS)
    rest = group.execute_on(*range(1, 6)).give_many([None] * len(values), GROUPS)
    first.wait()
    for got in rest.wait():
        assert [v if isinstance(v, str) else int(v[-1]) for v in got] == [
            v if isinstance(v, str) else n for n, v in enumerate(values)
        ]


def test_killed_relay_cuts_off_only_its_node(group):
    """a:2 relays for a:3, takes no part, and is killed: a:3 gets an error, all other members have the object."""
    group.give_many([None], GROUPS).wait()
    value = np.ones(MIB, np.uint8)
    results = {n: group.execute_on(n).give_many([value if n == 0 else None], GROUPS) for n in (0, 1, 3, 4, 5)}
    for n in (0, 1, 4, 5):
        assert results[n].wait()[0][0].sum() == MIB
    os.kill(group.execute_on(2).pid().wait()[0], signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=r"^a:3 on .*broadcast\(\) from a:0: worker a:2 on .*SIGKILL"):
        results[3].wait()
    for n in (1, 3, 4, 5):
        with pytest.raises(PeerDiedError, match=r"worker a:2 on .*SIGKILL"):
            group.execute_on(n).give_many([None], GROUPS).wait()
