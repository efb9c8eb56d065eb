"""Every kind of object, by every way that messages go."""

from __future__ import annotations

import importlib.util

import live_workers as lw
import message_zoo
import object_workers as ow
import pytest

from rlinf_actors.settings import SHARED_MEMORY

pytestmark = pytest.mark.live

GROUPS = [("a", 0), ("b", [0, 1, 2])]


@pytest.mark.parametrize("memory", ["shared", "sent"])
@pytest.mark.parametrize("with_torch", [False, pytest.param(True, marks=pytest.mark.torch)], ids=["plain", "torch"])
def test_every_kind_of_object_arrives_unchanged(cluster, with_torch, memory):
    assert not with_torch or importlib.util.find_spec("torch")
    env = {} if memory == "shared" else {SHARED_MEMORY: "0"}
    preload = ["torch"] if with_torch else []  # once, not in each worker
    a = lw.many(cluster, ow.Keeper, 1, name="a", env_vars=env, preload=preload)
    b = lw.many(cluster, ow.Keeper, 3, name="b", env_vars=env, preload=preload)
    for way in ("sync", "async", "piggyback", "broadcast"):
        sent = a.send_all(way, with_torch, GROUPS)
        receivers = b if way == "broadcast" else b.execute_on(0)
        for wrong in receivers.compare_all(way, with_torch, GROUPS).wait():
            assert wrong == []
        sent.wait()


def test_comparison_of_objects_detects_a_difference():
    ours = message_zoo.zoo(with_torch=False)
    for name, animal in message_zoo.zoo(with_torch=False).items():
        assert message_zoo.differs(ours[name], animal) == ""
        for other, theirs in ours.items():
            assert name == other or message_zoo.differs(animal, [theirs])
