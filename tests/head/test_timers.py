"""The head's timer heap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.head.timers import TimerHeap


def test_timers_run_by_deadline_and_then_by_creation():
    timers, ran = TimerHeap(), []
    for at, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        timers.at(at, lambda name=name: ran.append(name))
    assert timers.next_deadline() == 1.0
    timers.run_due(0.9)
    assert ran == []
    timers.run_due(2.0)
    assert (ran, timers.next_deadline(), len(timers)) == (["a", "b", "c"], 3.0, 1)


def test_cancelled_timer_never_runs():
    timers, ran = TimerHeap(), []
    first = timers.at(1.0, lambda: timers.cancel(second))
    second = timers.at(1.0, lambda: ran.append("second"))
    third = timers.at(0.5, lambda: ran.append("third"))
    timers.cancel(third)
    timers.cancel(third)
    timers.cancel(None)
    timers.run_due(1.0)
    timers.cancel(first)  # the timer has run
    assert (ran, timers.next_deadline(), len(timers)) == ([], math.inf, 0)


def test_timer_at_infinity_never_runs():
    timers = TimerHeap()
    timers.cancel(timers.at(math.inf, lambda: pytest.fail("never")))
    assert (timers.next_deadline(), len(timers)) == (math.inf, 0)


def test_timer_set_by_an_action_runs_at_the_next_call():
    timers, ran = TimerHeap(), []
    timers.at(1.0, lambda: timers.at(1.0, lambda: ran.append("next")))
    timers.run_due(1.0)
    assert (ran, timers.next_deadline()) == ([], 1.0)
    timers.run_due(1.0)
    assert ran == ["next"]


def test_cancelled_timers_are_removed_from_the_heap():
    timers = TimerHeap()
    for _ in range(10_000):
        timers.cancel(timers.at(60.0, lambda: None))
    assert len(timers._heap) < 200


@given(st.lists(st.tuples(st.sampled_from(["at", "cancel", "run"]), st.integers(0, 20)), max_size=60))
def test_heap_agrees_with_a_sorted_list(steps):
    timers, model, ran, expected, now = TimerHeap(), [], [], [], 0
    made = []
    for what, number in steps:
        if what == "at":
            name = len(made)
            made.append(timers.at(now + number, lambda name=name: ran.append(name)))
            model.append((now + number, name))
        elif what == "cancel" and made:
            timers.cancel(made[number % len(made)])
            model = [(at, name) for at, name in model if name != number % len(made)]
        elif what == "run":
            now += number
            timers.run_due(now)
            expected += [name for at, name in sorted(model) if at <= now]
            model = [(at, name) for at, name in model if at > now]
        assert timers.next_deadline() == min((at for at, _ in model), default=math.inf)
        assert (ran, len(timers)) == (expected, len(model))
