"""Workers whose peer is killed or does not receive: how their operations end, their memory and their CPU time."""

from __future__ import annotations

import os
import signal

import ends_workers as ew
import live_workers as lw
import message_workers as mw
import pytest

from rlinf_actors.messaging.flow_control import OVERHEAD, Window
from rlinf_actors.settings import SEND_WINDOW, SHARED_MEMORY

pytestmark = pytest.mark.live

MIB = 1 << 20


def kill(group, rank=0):
    os.kill(group.execute_on(rank).pid().wait()[0], signal.SIGKILL)


WAYS = ["send", "256 MiB", "recv", "256 MiB from it", "broadcast from it", "broadcast to it"]


@pytest.mark.parametrize("memory", ["shared", "sent"])
def test_killed_peer_fails_all_operations_and_leaves_nothing_open(cluster, memory):
    """A peer is killed by SIGKILL while others wait for it: all get PeerDiedError, and no resource of the peer stays
    open.
    """
    env = {SEND_WINDOW: str(16 * MIB)} | ({} if memory == "shared" else {SHARED_MEMORY: "0"})
    survivors = lw.many(cluster, ew.Survivor, 3, name="survivor", env_vars=env)
    survivors.meet_all([("survivor", [0, 1, 2])], ("survivor", 0)).wait()
    survivors.meet_all([("survivor", [0, 1, 2])], ("survivor", 1)).wait()
    before = survivors.has_open().wait()
    for what in WAYS:
        victim = lw.many(cluster, ew.Survivor, 1, name="victim", env_vars=env)
        groups = [("survivor", [0, 1, 2]), ("victim", 0)]
        source = ("victim", 0) if what == "broadcast from it" else ("survivor", 0)
        first = survivors.execute_on(0)
        if what.startswith("broadcast"):
            met = survivors.meet_all(groups, source)
            victim.meet_all(groups, source).wait()
        else:
            met = first.meet("victim", first=True)
            victim.meet("survivor", first=False).wait()
        met.wait()
        pid = victim.pid().wait()[0]
        if what == "256 MiB from it":
            victim.start_filled(256 * MIB, "survivor").wait()
        os.kill(pid, signal.SIGSTOP)  # what is on its way when it is killed stays there
        enduring = first.endures(what, "victim", groups, source)
        if what.startswith("broadcast"):  # these may have all of it before it is killed, if it is not the source
            others = survivors.execute_on(1, 2).endures(what, "victim", groups, source)
        os.kill(pid, signal.SIGKILL)
        assert enduring.wait() == ["PeerDiedError"], what
        if what.startswith("broadcast"):
            assert set(others.wait()) <= {"PeerDiedError"} | ({""} if source[0] == "survivor" else set())
            first = survivors
        assert set(first.endures(what, "victim", groups, source).wait()) == {"PeerDiedError"}, what
    assert [survivors.execute_on(rank).has_open_like(before[rank]).wait()[0] for rank in range(3)] == before


@pytest.mark.parametrize("memory", ["shared", "sent"])
@pytest.mark.parametrize(("size", "window", "times"), [(MIB, 64 * MIB, 4), (20_000, 64 * MIB, 2), (10, 8 * MIB, 2)])
def test_idle_receiver_costs_the_sender_at_most_the_window(cluster, size, window, times, memory):
    env = {SEND_WINDOW: str(window)} | ({} if memory == "shared" else {SHARED_MEMORY: "0"})
    a = lw.many(cluster, ew.Bounded, 1, name="a", env_vars=env)
    b = lw.many(cluster, ew.Bounded, 1, name="b", env_vars=env)
    a.start_many(size, 3, "b").wait()
    assert b.take(3, "a").wait() == [3]
    for group in (a, b):
        group.begin().wait()
    count = times * window // (size + OVERHEAD)
    a.start_many(size, count, "b").wait()
    room = window - Window(window).slack  # of the rest, messages that were taken may have part
    held = b.hold(room // (size + 1000) - 2).wait()[0]
    assert held * size <= window
    assert a.done_count().wait()[0] <= count / times
    assert b.grown().wait()[0] < window * 1.1
    assert b.take(count, "a").wait() == [count]
    a.finish().wait()
    assert b.held_messages().wait() == [0]


def test_waiting_worker_uses_no_cpu(cluster):
    """Blocked in recv, in a coroutine's recv and in a broadcast, while another works: in the same time, no ticks."""
    spinner = lw.many(cluster, ew.Spinner, 1, name="spinner")
    waits = lw.many(cluster, mw.Talker, 2, name="waits")
    coroutine = lw.many(cluster, mw.AsyncTalker, 1, name="coroutine")
    groups = [("spinner", 0), ("waits", 1)]
    pids = [*waits.pid().wait(), *coroutine.pid().wait()]

    def begun():
        return [
            waits.execute_on(0).hear("spinner"),
            waits.execute_on(1).give(None, groups),
            coroutine.hear_many(1, "spinner"),
        ]

    def ended(waiting, value):
        spinner.say(value, "waits").wait()
        spinner.say(value, "coroutine").wait()
        spinner.give(value, groups).wait()
        assert [result.wait()[0] for result in waiting] == [value, value, [value]]

    ended(begun(), "the links are there")
    waiting = begun()
    spinner.spin(5).wait()  # what led to the waiting is over
    before = [ew.ticks(pid) for pid in pids]
    used = spinner.spin(100).wait()[0]
    grown = [ew.ticks(pid) - start for pid, start in zip(pids, before, strict=True)]
    assert all(ticks <= used // 20 for ticks in grown), grown
    ended(waiting, "end")
