"""send, recv and broadcast between real workers, some of which are killed."""

from __future__ import annotations

import contextlib
import os
import signal

import live_workers as lw
import message_workers as mw
import numpy as np
import pytest

from rlinf_actors import GroupNotFoundError, PeerDiedError, PlacementError, SerializationError
from rlinf_actors.settings import MIN_SEND_WINDOW, SEND_WINDOW

pytestmark = pytest.mark.live

MIB = 1 << 20
SMALL_WINDOW = {SEND_WINDOW: str(4 * MIB)}


@pytest.fixture
def launched(cluster):
    """Launches groups that talk."""

    def launch(name, count=1, cls=mw.Talker, **options):
        return lw.many(cluster, cls, count, name=name, **options)

    return launch


@pytest.fixture
def pair(launched):
    """Two groups of one, called a and b."""
    return launched("a"), launched("b")


def kill(group, rank=0):
    os.kill(group.execute_on(rank).pid().wait()[0], signal.SIGKILL)


# --- order ---


def test_sync_and_async_sends_arrive_in_order(pair):
    a, b = pair
    for n in range(0, 30, 3):
        a.say(n, "b").wait()
        a.start_sends([n + 1, np.full(MIB, n, np.uint8)], "b").wait()
    got = [b.hear("a").wait()[0] for _ in range(30)]
    assert [v if isinstance(v, int) else int(v[0]) + 2 for v in got] == list(range(30))


def test_two_workers_may_both_send_first(pair):
    a, b = pair
    big = np.arange(32 * MIB, dtype=np.uint8)
    first, second = a.swap(big, "b"), b.swap(big[::-1].copy(), "a")
    assert np.array_equal(second.wait()[0], big)
    assert np.array_equal(first.wait()[0], big[::-1])


def test_a_worker_may_send_to_itself(pair):
    a, _ = pair
    assert a.swap("me", "a").wait() == ["me"]


def test_messages_reach_ranks_and_carry_a_piggyback(launched):
    a, b = launched("a", 2), launched("b")
    a.execute_on(1).say([1, 2], "b", [0], piggyback_payload={"step": 7}).wait()
    a.execute_on(0).say("zero", "b").wait()
    assert b.hear("a", [1]).wait() == [([1, 2], {"step": 7})]
    assert b.hear("a", 0).wait() == ["zero"]


def test_message_sent_before_the_receiver_is_constructed_arrives(launched):
    a = launched("a")
    b = launched("b")  # the test does not wait for it
    a.say("early", "b").wait()
    assert b.hear("a").wait() == ["early"]


def test_sent_message_outlives_its_sender(pair):
    a, b = pair
    a.say(np.ones(MIB, np.uint8), "b").wait()
    a.say("last", "b", async_op=False).wait()
    b.hear("a").wait()
    kill(a)
    assert b.hear("a").wait() == ["last"]
    with pytest.raises(PeerDiedError):
        b.hear("a").wait()


# --- errors before anything is sent ---


def test_wrong_addresses_and_arguments_are_refused(pair):
    a, b = pair
    with pytest.raises(GroupNotFoundError, match="no group 'nobody' is running"):
        a.say(1, "nobody").wait()
    with pytest.raises(GroupNotFoundError, match="no group 'nobody' is running"):
        a.hear("nobody").wait()
    with pytest.raises(PlacementError, match="rank 3 is not in group 'b', which has ranks 0-0"):
        a.say(1, "b", 3).wait()
    with pytest.raises(PlacementError, match="rank 3 is not in group 'b', which has ranks 0-0"):
        a.say(1, "b", [3, 1]).wait()
    with pytest.raises(ValueError, match=r"\[0, -1\] leads to no child"):
        a.say(1, "b", [0, -1]).wait()
    with pytest.raises(TypeError, match="options is a dict"):
        a.say(1, "b", options={}).wait()
    with pytest.raises(ValueError, match="timeout is 'soon'"):
        a.hear("b", timeout="soon").wait()
    a.say("first", "b").wait()
    assert b.hear("a").wait() == ["first"]


def test_object_that_cannot_be_pickled_fails_its_send_only(pair):
    a, b = pair
    assert a.say_unpicklable("b").wait() == [SerializationError.__name__]
    a.say("next", "b").wait()
    assert b.hear("a").wait() == ["next"]


def test_forked_child_can_send_only_as_itself(pair):
    a, b = pair
    assert a.say_from_a_child("b").wait() == ["UsageError"]
    assert b.hear("a", [0, 0]).wait() == ["from a child"]


# --- time ---


def test_recv_that_times_out_takes_no_message(pair):
    a, b = pair
    with pytest.raises(TimeoutError, match=r"no message came within 0\.05 s"):
        b.hear("a", timeout=0.05).wait()
    assert b.hear_late("a", 0.05).wait() == ["TimeoutError"]
    a.say(1, "b").wait()
    assert b.hear("a", timeout=10).wait() == [1]
    assert b.hear_late("a", 0.0).wait() == ["TimeoutError"]


# --- a receiver that does not receive ---


def test_the_window_bounds_what_a_receiver_holds(launched):
    a, b = launched("a", env_vars=SMALL_WINDOW), launched("b")
    count = a.start_sends([np.zeros(MIB - 4096, np.uint8)] * 64, "b").wait()[0]
    assert count == 64
    a.finish(0, 4).wait()
    assert a.done().wait()[0] == [True] * 4 + [False] * 60
    assert b.held_messages().wait()[0] <= 4
    for _ in range(64):
        assert b.hear("a").wait()[0].nbytes == MIB - 4096
    a.finish().wait()
    assert b.held_messages().wait() == [0]


def test_a_message_larger_than_the_window_goes_alone(launched):
    a, b = launched("a", env_vars={SEND_WINDOW: str(MIN_SEND_WINDOW)}), launched("b")
    sent = a.start_sends([np.full(8 * MIB, n, np.uint8) for n in range(3)], "b")
    sent.wait()
    assert [int(b.hear("a").wait()[0][-1]) for _ in range(3)] == [0, 1, 2]
    a.finish().wait()


# --- death ---


def test_killed_receiver_fails_a_send_that_waits_for_the_window(launched):
    a, b = launched("a", env_vars=SMALL_WINDOW), launched("b")
    a.start_sends([np.zeros(MIB, np.uint8)] * 16, "b").wait()
    sending = a.say(np.zeros(MIB, np.uint8), "b")
    kill(b)
    with pytest.raises(PeerDiedError, match=r"send\(\) to b:0: worker b:0 .*SIGKILL"):
        sending.wait()
    with pytest.raises(PeerDiedError):
        a.finish(8).wait()
    with pytest.raises(PeerDiedError):
        a.say("more", "b").wait()


def test_worker_killed_during_a_large_tensor_fails_its_peer(launched):
    a, b = launched("a"), launched("b")
    a.say("hello", "b").wait()
    pid = b.pid().wait()[0]
    os.kill(pid, signal.SIGSTOP)  # what the kernel's buffers do not hold stays in the sender
    tensor = np.zeros(256 * MIB, np.uint8)
    sending = [a.say(tensor, "b"), a.say(tensor, "b")]  # the second waits for the window
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(PeerDiedError):  # or it was in shared memory by then, and had ended
        sending[0].wait()
    with pytest.raises(PeerDiedError):
        sending[1].wait()
    assert a.shared_in_use().wait() == [0]


def test_killed_sender_fails_a_waiting_recv(pair):
    a, b = pair
    a.say("hello", "b").wait()
    b.hear("a").wait()
    waiting = b.hear("a")
    later = b.works_of_recv("a", 2)
    kill(a)
    with pytest.raises(PeerDiedError, match=r"recv\(\) from a:0: worker a:0 .*SIGKILL") as caught:
        waiting.wait()
    assert caught.value.peer == "a:0"
    assert later.wait() == [["PeerDiedError", "PeerDiedError"]]
    with pytest.raises(PeerDiedError):
        b.hear("a").wait()


def test_ended_group_fails_operations_that_wait_for_it(pair):
    a, b = pair
    a.say("hello", "b").wait()
    b.hear("a").wait()
    waiting = b.hear("a")
    b_waits = b.pid()  # queued behind the recv
    a.shutdown()
    with pytest.raises(PeerDiedError):
        waiting.wait()
    b_waits.wait()


def test_relaunched_group_of_the_same_name_is_another_sender(launched):
    b = launched("b")
    first = launched("a")
    first.say("old", "b").wait()
    assert b.hear("a").wait() == ["old"]
    first.say("stale", "b").wait()
    first.shutdown()
    second = launched("a")
    second.say("new", "b").wait()
    assert b.hear("a").wait() == ["new"]


# --- coroutines ---


def test_messages_work_in_coroutines(launched):
    a, b = launched("a", cls=mw.AsyncTalker), launched("b", cls=mw.AsyncTalker)
    got = b.hear_many(1000, "a")
    a.say_many(list(range(1000)), "b").wait()
    assert got.wait() == [list(range(1000))]
    blocking = b.hear_blocking("a")
    a.say_many(["x"], "b").wait()
    assert blocking.wait() == ["x"]


def test_a_cancelled_recv_loses_nothing(launched):
    a, b = launched("a", cls=mw.AsyncTalker), launched("b", cls=mw.AsyncTalker)
    got = b.cancelled_then_heard("a")
    a.say_many(["kept"], "b").wait()
    assert got.wait() == ["kept"]


def test_then_runs_on_a_received_message(launched):
    a, b = launched("a", cls=mw.AsyncTalker), launched("b", cls=mw.AsyncTalker)
    chained = b.chained("a")
    a.say_many(["go"], "b").wait()
    assert chained.wait() == [3]


# --- broadcast ---


def members_of(*groups):
    return [(name, list(range(count))) for name, count in groups]


def test_broadcast_reaches_two_groups(launched):
    a, b = launched("a", 2), launched("b", 5)
    groups = members_of(("a", 2), ("b", 5))
    value = {"weights": np.arange(MIB), "step": 1}
    results = [a.execute_on(0).give(value, groups), a.execute_on(1).give(None, groups), b.give(None, groups)]
    assert results[0].wait() == ["mine"]
    for got in [*results[1].wait(), *results[2].wait()]:
        assert got["step"] == 1
        assert np.array_equal(got["weights"], np.arange(MIB))
    reply = b.execute_on(3).give("from b:3", groups, ("b", 3))
    rest = b.execute_on(0, 1, 2, 4).give(None, groups, ("b", 3))
    others = a.give(None, groups, ("b", 3))
    assert reply.wait() == ["mine"]
    assert rest.wait() + others.wait() == ["from b:3"] * 6


def test_broadcasts_in_a_row_keep_their_order(launched):
    group = launched("a", 7, cls=mw.AsyncTalker)
    groups = members_of(("a", 7))
    values = [f"object {n}" if n % 3 else np.full(MIB // 8, n, np.uint8) for n in range(60)]
    first = group.execute_on(0).give_many(values, groups)
    rest = group.execute_on(*range(1, 7)).give_many([None] * 60, groups)
    first.wait()
    for got in rest.wait():
        assert [v if isinstance(v, str) else int(v[-1]) for v in got] == [
            v if isinstance(v, str) else n for n, v in enumerate(values)
        ]


def test_broadcast_goes_to_the_own_group_and_refuses_a_source_outside(launched):
    a, b = launched("a", 3), launched("b")
    first, rest = a.execute_on(0).give(5, None), a.execute_on(1, 2).give(None, None)
    assert first.wait() + rest.wait() == ["mine", 5, 5]
    with pytest.raises(ValueError, match="b:0 is not a member of the broadcast: a:0, a:1"):
        b.give(1, members_of(("a", 2))).wait()
    with pytest.raises(ValueError, match="src b:0 is not a member"):
        a.execute_on(0).give(1, members_of(("a", 2)), ("b", 0)).wait()


@pytest.mark.parametrize(
    ("victim", "is_source", "cut_off"),
    [("b", True, range(6)), ("b", False, ())],
    ids=["source", "leaf"],
)
def test_killed_member_ends_the_broadcast_for_all_that_wait(launched, victim, is_source, cut_off):
    """The victim never takes part. Members that do not depend on it get the object; no member waits for ever."""
    group, lost = launched("a", 6), launched(victim)
    members = [(victim, 0), ("a", list(range(6)))]
    source = (victim if is_source else "a", 0)
    met = [group.give("all are here", members, source), lost.give("all are here", members, source)]
    for result in met:
        result.wait()
    value = np.zeros(MIB, np.uint8)
    results = [group.execute_on(n).give(value if n == 0 else None, members, source) for n in range(6)]
    for n in set(range(6)) - set(cut_off):
        results[n].wait()
    kill(lost)
    for n in cut_off:
        with pytest.raises(PeerDiedError, match="SIGKILL") as caught:
            results[n].wait()
        assert caught.value.peer == f"{victim}:0"
    for n in cut_off or range(1, 6):  # the source may be done before it hears of the end
        with pytest.raises(PeerDiedError):
            group.execute_on(n).give(value, members, source).wait()


def test_failed_broadcast_ends_for_all_members_and_the_next_works(launched):
    group = launched("a", 3)
    groups = members_of(("a", 3))
    waiting = group.execute_on(1, 2).give(None, groups)
    assert group.execute_on(0).give_unpicklable(groups).wait() == [SerializationError.__name__]
    with pytest.raises(SerializationError, match=r"broadcast\(\) from a:0: a:0 on .* cannot be pickled"):
        waiting.wait()
    results = [
        group.execute_on(n).give("next" if n == 0 else None, groups, options={} if n else None) for n in range(3)
    ]
    for n in (1, 2):
        with pytest.raises(TypeError, match="options is a dict"):
            results[n].wait()
    assert results[0].wait() == ["mine"]
    results = [group.execute_on(n).give("next" if n == 0 else None, groups) for n in range(3)]
    assert [result.wait() for result in results] == [["mine"], ["next"], ["next"]]


def test_a_warm_send_of_an_array_visits_few_files(launched):
    sender, receiver = launched("sender", cls=mw.Walker), launched("receiver", cls=mw.Walker)
    hearing = receiver.hear("sender", 20)
    files, calls = sender.walk("receiver", 20).wait()[0]
    hearing.wait()
    assert len(files) <= 16, files  # one of them counts for metrics, one holds signals back
    assert calls <= 44
