"""Timers of threads without an event loop."""

from __future__ import annotations

import os
import threading
import time

import pytest

from rlinf_actors.runtime.deadline_timers import DeadlineTimers


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlinf-actors-timers"]


def test_functions_are_called_in_the_order_of_their_times(monkeypatch):
    timers, order, over = DeadlineTimers(), [], threading.Event()
    now = time.monotonic()
    with timers._changed, monkeypatch.context() as patch:  # all begin at one time, before the thread looks
        patch.setattr(time, "monotonic", lambda: now)
        timers.start(0.06, over.set)
        timers.start(0.04, lambda: order.append("second"))
        timers.start(0.02, lambda: order.append("first"))
        cancelled = timers.start(0.03, lambda: order.append("cancelled"))
        cancelled.cancel()
        cancelled.cancel()
    assert over.wait(20)
    assert order == ["first", "second"]


def test_a_function_that_raises_does_not_end_the_others(caplog):
    timers, over = DeadlineTimers(), threading.Event()
    timers.start(0, lambda: 1 / 0)
    timers.start(0.01, over.set)
    assert over.wait(20)
    assert "ZeroDivisionError" in caplog.text


def test_the_thread_ends_when_it_is_idle():
    before = set(running())
    timers = DeadlineTimers()
    kept = [timers.start(3600, list) for _ in range(100)]
    (thread,) = set(running()) - before
    for timer in kept:
        timer.cancel()
    thread.join(20)
    assert not thread.is_alive()
    over = threading.Event()
    timers.start(0, over.set)
    assert over.wait(20), "a later timer starts another thread"


def test_cancelled_timers_do_not_pile_up():
    timers = DeadlineTimers()
    for _ in range(1000):
        timers.start(3600, list).cancel()
    assert len(timers._heap) < 200


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_timers_of_its_own():
    timers = DeadlineTimers()
    timers.start(3600, list)
    child = os.fork()
    if not child:
        over = threading.Event()
        timers.start(0, over.set)
        os._exit(0 if over.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_earlier_timer_runs_before_a_later_one_that_was_set_first():
    timers, over = DeadlineTimers(), threading.Event()
    timers.start(3600, list)
    timers.start(0, over.set)
    assert over.wait(20)
