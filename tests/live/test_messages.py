"""send, recv and their failures between real workers."""

from __future__ import annotations

import live_workers as lw
import message_workers as mw
import pytest

from rlinf_actors import Cluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster():
    with_cluster = Cluster(num_nodes=1)
    yield with_cluster
    with_cluster.shutdown()


@pytest.fixture
def pair(cluster):
    """Two groups of one, called a and b."""
    a = lw.many(cluster, mw.Talker, 1, name="a").wait_ready()
    b = lw.many(cluster, mw.Talker, 1, name="b").wait_ready()
    yield a, b
    a.shutdown()
    b.shutdown()


def test_a_message_arrives(pair):
    a, b = pair
    a.say({"x": 1}, "b").wait()
    assert b.hear("a").wait() == [{"x": 1}]
