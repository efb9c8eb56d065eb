"""Tensors between real workers."""

from __future__ import annotations

import os
import signal

import live_workers as lw
import pytest

from rlinf_actors.errors import PeerDiedError, WorkerDiedError
from rlinf_actors.messaging.pieces import PIECE
from rlinf_actors.settings import SHARED_MEMORY

torch = pytest.importorskip("torch")

import tensor_workers as tw  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.torch]


@pytest.fixture
def pair(cluster):
    return [lw.many(cluster, tw.TensorTalker, 1, name=name) for name in "ab"]


def test_message_is_received_into_a_tensor(pair):
    a, b = pair
    for async_op in (False, True):
        a.say_tensor((300, 400), 2.5, "b").wait()
        assert b.hear_tensor((300, 400), "a", async_op).wait() == [[2.5, 2.5]]
    a.say_tensor((2, 3), 1.0, "b").wait()
    with pytest.raises(ValueError, match=r"a:0 sent a tensor of shape \(2, 3\) and torch.float32, .* \(3, 2\)"):
        b.hear_tensor((3, 2), "a").wait()
    a.say_tensor((3, 2), 1.0, "b", "bfloat16").wait()
    with pytest.raises(ValueError, match=r"torch.bfloat16"):
        b.hear_tensor((3, 2), "a").wait()
    a.say([1], "b").wait()
    with pytest.raises(TypeError, match="got a list"):
        b.hear_tensor((3, 2), "a").wait()


def test_a_tensor_may_change_when_send_has_returned(pair):
    a, b = pair
    hearing = b.hear_filled("a", 30)
    a.say_and_change("b", 30).wait()
    assert hearing.wait() == [[True] * 30]


def test_tensor_that_is_not_contiguous_is_refused_and_not_sent(pair):
    a, b = pair
    said = a.say_not_contiguous("b").wait()[0].splitlines()
    assert [line.split(" is a tensor")[0] for line in said] == ["object['a']", "object"]
    a.say("first", "b").wait()
    assert b.hear("a").wait() == ["first"]


def test_tensors_of_many_kinds_travel_in_one_message(pair):
    a, b = pair
    value = {
        "bf16": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "view": torch.arange(100)[10:20],
        "large": torch.arange(100_000),
        "nested": [(torch.ones(2, 2), {"deep": torch.zeros(3, dtype=torch.complex64)})],
    }
    sending = a.say(value, "b")
    got = b.hear("a").wait()[0]
    sending.wait()
    for key in ("bf16", "scalar", "empty", "view", "large"):
        assert got[key].dtype == value[key].dtype
        assert torch.equal(got[key], value[key])
    assert type(got["nested"][0]) is tuple
    assert torch.equal(got["nested"][0][1]["deep"], torch.zeros(3, dtype=torch.complex64))


def test_each_member_owns_its_broadcast_tensor(cluster):
    group = lw.many(cluster, tw.TensorTalker, 5, name="g")
    try:
        assert group.give_and_change([("g", list(range(5)))], 20).wait() == [[True] * 20] * 5
    finally:
        group.shutdown()


@pytest.mark.parametrize("memory", ["shared", "sent"])
def test_large_tensors_arrive_in_every_way_of_receiving(cluster, memory):
    env = {} if memory == "shared" else {SHARED_MEMORY: "0"}
    a, b = (lw.many(cluster, tw.LargeTalker, 1, name=name, env_vars=env) for name in "ab")
    size, kinds = 5 * PIECE + 7, ["into", "object", "into", "into later", "into", "object", "into"]
    hearing = b.hear_large(size, kinds, "a")
    a.say_large(size, len(kinds), "b").wait()
    assert hearing.wait() == [[True] * len(kinds)]


@pytest.mark.parametrize("kind", ["into", "object"])
def test_sender_killed_between_pieces_fails_the_receive(cluster, kind):
    a, b = (lw.many(cluster, tw.LargeTalker, 1, name=name) for name in "ab")
    size, pid = 5 * PIECE, a.pid().wait()[0]
    a.say("meet", "b").wait()
    assert b.hear("a").wait() == ["meet"]
    sending = a.stop_after_a_piece(size, "b")
    b.wait_until_begun().wait(20)
    hearing = b.hear_large(size, [kind], "a")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerDiedError, match="a:0"):
        hearing.wait(20)
    with pytest.raises(WorkerDiedError):
        sending.wait(20)
