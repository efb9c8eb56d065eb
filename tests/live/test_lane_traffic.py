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


def test_lanes_carry_every_dtype_and_shape(pair):
    a, b = pair
    saying = a.say_sample("b")
    assert b.hear_sample("a").wait() == [True]
    saying.wait()
    assert (a.lane_threads().wait(), b.lane_threads().wait()) == ([1], [1])


def test_tensors_keep_their_order_among_plain_messages(pair):
    a, b = pair
    saying = a.say_many(30, 40_000, "b")
    assert b.hear_many(30, "a").wait() == [[float(n) for n in range(30)]]
    saying.wait()


def test_lanes_work_in_both_directions_at_once(pair):
    a, b = pair
    works = [a.swap_tensors(3_000_000, "b", 0, 4), b.swap_tensors(3_000_000, "a", 0, 4)]
    assert [work.wait() for work in works] == [[True], [True]]


def test_four_workers_exchange_tensors_with_each_other(launched):
    a = launched("a", 4)
    works = [a.execute_on(rank).swap_tensors(100_000, "a", 3 - rank, 3) for rank in range(4)]
    assert [work.wait() for work in works] == [[True]] * 4


def test_worker_can_send_tensors_to_itself(pair):
    a, _ = pair
    a.say_sample("a").wait()
    assert a.hear_sample("a").wait() == [True]
    assert a.lane_threads().wait() == [0]


def test_tensor_is_received_into_another(pair):
    a, b = pair
    a.say_tensor((300, 400), 2.5, "b").wait()
    assert b.hear_tensor((300, 400), "a").wait() == [[2.5, 2.5]]


def test_sent_tensor_may_change_after_send_has_returned(pair):
    a, b = pair
    hearing = b.hear_filled("a", 10)
    a.say_and_change("b", 10).wait()
    assert hearing.wait() == [[True] * 10]


def test_receiver_without_torch_loads_it_for_a_tensor(launched):
    a, b = launched("a"), launched("b", cls=lanes.Plain)
    saying = a.say_large(1, "b")
    assert torch.equal(b.hear("a").wait()[0], torch.ones(1 << 18))
    assert saying.wait() == [""]


def test_tensors_are_broadcast_within_a_node(launched):
    groups = [launched("a", 2), launched("b", 2)]
    members = [("a", [0, 1]), ("b", [0, 1])]
    works = [group.give_sample(members, 6) for group in groups]
    assert [good for work in works for good in work.wait()] == [[True] * 6] * 4


def test_broadcast_after_one_that_cannot_be_sent_arrives(launched):
    a = launched("a", 3)
    members = [("a", [0, 1, 2])]
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 3
    assert a.give_what_cannot_be_sent(members).wait() == ["SerializationError"] * 3
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 3


def test_killed_member_ends_the_broadcast(launched):
    a = launched("a", 5)
    members = [("a", [0, 1, 2, 3, 4])]
    assert a.give_sample(members, 2).wait() == [[True] * 2] * 5
    a.execute_on(1).kill_self_in_recv().wait()
    works = [a.execute_on(rank).give_large(members) for rank in range(5)]
    with pytest.raises(WorkerDiedError, match="a:1"):
        works[1].wait()
    assert works[0].wait() == ["PeerDiedError"]
    for work in works[2:]:  # members that had their object before have returned it
        assert work.wait()[0] in ("", "PeerDiedError")


def test_lanes_leave_the_users_default_group_unchanged(launched):
    a, b = launched("a"), launched("b")
    ports = a.own_ports(2).wait()[0]
    works = [a.own_group(ports, 0, "b"), b.own_group(ports, 1, "a")]
    for rank, work in enumerate(works):
        summed = ([6.0] * 3, 2, rank)
        assert work.wait() == [[False, False, [3.0] * 3, summed, [3.0] * 3, summed, False]]


def test_recv_that_times_out_during_a_transfer_takes_nothing(pair):
    a, b = pair
    b.hold_lanes().wait()  # before anything is sent: a lane receives also before the first recv()
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


def test_unreceived_tensors_are_bounded_by_the_window(launched):
    a, b = launched("a", env_vars={SEND_WINDOW: str(4 << 20)}), launched("b")
    a.say_until_the_window_is_full(8, "b").wait()
    a.finish(0, 3).wait()
    assert a.done().wait() == [[True] * 3 + [False] * 5]
    assert [value[0].item() for value in b.hear_all(8, "a").wait()[0]] == [float(n) for n in range(8)]
    a.finish().wait()


def test_transfer_that_takes_too_long_fails_and_the_next_works(launched):
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


def test_receiver_killed_during_a_transfer_fails_the_send(pair):
    a, b = pair
    b.kill_self_in_recv().wait()
    hearing = b.hear_large("a")
    assert a.say_large(256, "b").wait() == ["PeerDiedError"]
    with pytest.raises(WorkerDiedError, match="b:0"):
        hearing.wait()
    assert a.lanes_left().wait() == [0]


def test_sender_killed_during_a_transfer_fails_the_recv(pair):
    a, b = pair
    a.kill_self_in_send().wait()
    hearing = b.hear_large("a")
    with pytest.raises(WorkerDiedError, match="a:0"):
        a.say_two(256, "b").wait()
    assert hearing.wait() == ["PeerDiedError"]
    assert b.lanes_left().wait() == [0]


def test_sender_killed_before_the_recv_fails_the_later_recv(pair):
    a, b = pair
    a.kill_self_in_send().wait()
    with pytest.raises(WorkerDiedError, match="a:0"):
        a.say_two(256, "b").wait()
    assert b.hear_large("a").wait() == ["PeerDiedError"]
    assert b.lanes_left().wait() == [0]
