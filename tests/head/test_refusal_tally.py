"""The tally of refusals: the first of a kind is due at once, repetitions as a count, and none is uncounted."""

from __future__ import annotations

import math

import pytest

from rlinf_actors.head.refusal_log import Due, Tally


@pytest.fixture
def tally() -> Tally:
    return Tally(60.0, kinds=3)


def test_first_refusal_is_due_at_once_and_repetitions_as_a_count(tally):
    assert tally.next_deadline() == math.inf
    assert tally.note("ann", "key", "ann 1", 0.0)
    assert tally.take(0.0) == [Due("ann 1", 1)]
    assert not tally.note("ann", "key", "ann 2", 1.0, times=5)
    assert not tally.note("ann", "key", "ann 3", 59.0)
    assert (tally.take(59.9), tally.next_deadline()) == ([], 60.0)
    assert tally.take(60.0) == [Due("ann 3", 6, again=True)]


def test_kind_absent_for_a_window_counts_as_new(tally):
    tally.note("ann", "key", "1", 0.0)
    tally.take(0.0)
    assert tally.take(60.0) == []
    assert tally.next_deadline() == math.inf
    assert tally.note("ann", "key", "2", 61.0)
    assert tally.take(61.0) == [Due("2", 1)]


def test_several_refusals_at_once_are_reported_with_their_number(tally):
    assert tally.note("", "no key", "x", 0.0, times=7)
    assert tally.take(0.0) == [Due("x", 7)]


def test_kinds_beyond_the_limit_are_counted_together(tally):
    for who, kind in (("a", "1"), ("a", "2"), ("b", "1")):
        assert tally.note(who, kind, who + kind, 0.0)
    assert len(tally.take(0.0)) == 3
    assert not tally.note("b", "2", "b2", 10.0, times=2)
    assert not tally.note("c", "1", "c1", 20.0)
    assert tally.next_deadline() == 60.0
    assert tally.take(70.0) == [Due("c1", 3, others=True)]


def test_untaken_refusals_are_kept_and_bounded(tally):
    for n in range(1000):
        tally.note(str(n), "key", str(n), float(n))
    due = tally.take(5000.0)
    assert sum(one.times for one in due) == tally.count == 1000
    assert len(due) == 4


def test_unreported_refusal_is_noted_again(tally):
    tally.note("ann", "key", "x", 0.0)
    (first,) = tally.take(0.0)
    assert not tally.note("ann", "key", first.said, 0.0, first.times)
    assert tally.take(60.0) == [Due("x", 1, again=True)]
