"""Tensors by lanes between the workers of several nodes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import lane_workers as lanes  # noqa: E402

from rlinf_actors import NodePlacementStrategy, WorkerDiedError  # noqa: E402
from rlinf_actors.settings import PATHS  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.torch]

BY_LANE = {PATHS: "cpu=lane"}


def test_broadcast_by_lanes_is_relayed_on_each_node(local_cluster):
    cluster = local_cluster(3).cluster()  # a template with torch on each
    strategy = NodePlacementStrategy([0, 1, 2, 1, 2])
    group = lanes.LaneTalker.create_group().launch(cluster, strategy, name="a", env_vars=BY_LANE)
    members = [("a", list(range(5)))]
    assert group.give_sample(members, 6).wait() == [[True] * 6] * 5
    assert group.give_what_cannot_be_sent(members).wait() == ["SerializationError"] * 5
    assert group.give_sample(members, 2).wait() == [[True] * 2] * 5
    group.execute_on(1).kill_self_in_recv().wait()
    works = [group.execute_on(rank).give_large(members) for rank in range(5)]
    with pytest.raises(WorkerDiedError, match="a:1"):
        works[1].wait()
    assert works[0].wait() == ["PeerDiedError"]
    assert works[3].wait() == ["PeerDiedError"]  # on node 1, too
    assert {works[rank].wait()[0] for rank in (2, 4)} <= {"", "PeerDiedError"}
