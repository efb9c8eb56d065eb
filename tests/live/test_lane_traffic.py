"""Tensors by lanes between real workers: gloo, by the setting that sends CPU tensors this way."""

from __future__ import annotations

import os
import signal

import live_workers as lw
import pytest

torch = pytest.importorskip("torch")

import lane_workers as lanes  # noqa: E402

from rlinf_actors import WorkerDiedError  # noqa: E402
from rlinf_actors.settings import PATHS, SEND_WINDOW, TIMEOUT_MINUTES  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.torch]

BY_LANE = {PATHS: "cpu=lane"}


@pytest.fixture
def launched(cluster):
    """Launches groups that talk by lane."""

    def launch(name, count=1, cls=lanes.LaneTalker, env_vars=None):
        return lw.many(cluster, cls, count, name=name, env_vars={**BY_LANE, **(env_vars or {})})

    return launch


@pytest.fixture
def pair(launched):
    return launched("a"), launched("b")


def test_every_dtype_and_shape(pair):
    a, b = pair
    saying = a.say_sample("b")
    assert b.hear_sample("a").wait() == [True]
    saying.wait()
    assert (a.lane_threads().wait(), b.lane_threads().wait()) == ([1], [1])


def test_one_after_the_other_between_plain_messages(pair):
    a, b = pair
    saying = a.say_many(30, 40_000, "b")
    assert b.hear_many(30, "a").wait() == [[float(n) for n in range(30)]]
    saying.wait()


def test_both_directions_at_once(pair):
    a, b = pair
    works = [a.swap_tensors(3_000_000, "b", 0, 4), b.swap_tensors(3_000_000, "a", 0, 4)]
    assert [work.wait() for work in works] == [[True], [True]]


def test_a_group_of_four_all_to_all(launched):
    a = launched("a", 4)
    works = [a.execute_on(rank).swap_tensors(100_000, "a", 3 - rank, 3) for rank in range(4)]
    assert [work.wait() for work in works] == [[True]] * 4


def test_a_worker_that_sends_to_itself(pair):
    a, _ = pair
    a.say_sample("a").wait()
    assert a.hear_sample("a").wait() == [True]
    assert a.lane_threads().wait() == [0]


def test_into_a_tensor(pair):
    a, b = pair
    a.say_tensor((300, 400), 2.5, "b").wait()
    assert b.hear_tensor((300, 400), "a").wait() == [[2.5, 2.5]]


def test_what_was_sent_may_change_when_send_has_returned(pair):
    a, b = pair
    hearing = b.hear_filled("a", 10)
    a.say_and_change("b", 10).wait()
    assert hearing.wait() == [[True] * 10]


def test_to_a_worker_that_has_not_loaded_torch(launched):
    a, b = launched("a"), launched("b", cls=lanes.Plain)
    saying = a.say_large(1, "b")
    assert torch.equal(b.hear("a").wait()[0], torch.ones(1 << 18))
    assert saying.wait() == [""]


def test_broadcast_within_a_node(launched):
    groups = [launched("a", 2), launched("b", 2)]
    members = [("a", [0, 1]), ("b", [0, 1])]
    works = [group.give_sample(members, 6) for group in groups]
    assert [good for work in works for good in work.wait()] == [[True] * 6] * 4


def test_a_broadcast_that_cannot_be_sent_and_one_after_it(launched):
    a = launched("a", 3)
    members = [("a", [0, 1, 2])]
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 3
    assert a.give_what_cannot_be_sent(members).wait() == ["SerializationError"] * 3
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 3


def test_a_member_is_killed_in_a_broadcast(launched):
    a = launched("a", 5)
    members = [("a", [0, 1, 2, 3, 4])]
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 5
    a.execute_on(1).kill_self_in_recv().wait()
    works = [a.execute_on(rank).give_large(members) for rank in range(5)]
    with pytest.raises(WorkerDiedError, match="a:1"):
        works[1].wait()
    assert works[0].wait() == ["PeerDiedError"]
    for work in works[2:]:  # those that had theirs before are done
        assert work.wait()[0] in ("", "PeerDiedError")


def test_the_users_own_default_group_is_not_touched(launched):
    a, b = launched("a"), launched("b")
    ports = a.own_ports(2).wait()[0]
    works = [a.own_group(ports, 0, "b"), b.own_group(ports, 1, "a")]
    for rank, work in enumerate(works):
        summed = ([6.0] * 3, 2, rank)
        assert work.wait() == [[False, False, [3.0] * 3, summed, [3.0] * 3, summed, False]]


def test_a_time_limit_that_ends_while_a_tensor_is_on_its_way_takes_nothing(pair):
    a, b = pair
    hearing = b.hear_late("a")
    a.say_both("b").wait()
    assert hearing.wait() == [["TimeoutError", "TimeoutError", 50_000.0, "behind"]]


def test_a_lane_that_cannot_be_joined_fails_at_both_ends_and_the_next_works(pair):
    a, b = pair
    b.join_badly().wait()
    hearing = b.error_of_hear("a")
    said = a.error_of_say("b").wait()[0]
    assert said.startswith("RlinfActorsError: the lane from a:0 to b:0 (gloo) failed: the interface is down. ")
    assert hearing.wait()[0].startswith(
        "RlinfActorsError: the lane from a:0 to b:0 (gloo) failed: the interface is down."
    )
    hearing = b.error_of_hear("a")
    assert (a.error_of_say("b").wait(), hearing.wait()) == ([""], [""])


def test_what_nobody_receives_is_bounded_by_the_window(launched):
    a, b = launched("a", env_vars={SEND_WINDOW: str(4 << 20)}), launched("b")
    a.say_until_the_window_is_full(8, "b").wait()
    a.finish(0, 3).wait()
    assert a.done().wait() == [[True] * 3 + [False] * 5]
    assert [value[0].item() for value in b.hear_all(8, "a").wait()[0]] == [float(n) for n in range(8)]
    a.finish().wait()


def test_a_transfer_that_takes_too_long(launched):
    a, b = launched("a", env_vars={TIMEOUT_MINUTES: "0.2"}), launched("b")
    pid = b.pid().wait()[0]
    b.stop_self_in_recv().wait()
    hearing = b.hear_large("a")
    assert a.say_large(16, "b").wait() == ["TimeoutError"]
    os.kill(pid, signal.SIGCONT)
    assert hearing.wait() == ["RlinfActorsError"]
    hearing = b.hear_large("a")
    assert a.say_large(16, "b").wait() == [""]
    assert hearing.wait() == [""]


def test_the_receiver_is_killed_in_the_middle_of_a_tensor(pair):
    a, b = pair
    b.kill_self_in_recv().wait()
    hearing = b.hear_large("a")
    assert a.say_large(256, "b").wait() == ["PeerDiedError"]
    with pytest.raises(WorkerDiedError, match="b:0"):
        hearing.wait()
    assert a.lanes_left().wait() == [0]


def test_the_sender_is_killed_in_the_middle_of_a_tensor(pair):
    a, b = pair
    a.kill_self_in_send().wait()
    hearing = b.hear_large("a")
    with pytest.raises(WorkerDiedError, match="a:0"):
        a.say_two(256, "b").wait()
    assert hearing.wait() == ["PeerDiedError"]
    assert b.lanes_left().wait() == [0]


def test_the_sender_is_killed_and_nobody_had_asked_for_its_tensor(pair):
    a, b = pair
    a.kill_self_in_send().wait()
    with pytest.raises(WorkerDiedError, match="a:0"):
        a.say_two(256, "b").wait()
    assert b.hear_large("a").wait() == ["PeerDiedError"]
    assert b.lanes_left().wait() == [0]
