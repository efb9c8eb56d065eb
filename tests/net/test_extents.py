"""Extents: taken ranges do not overlap, returned ranges can be taken again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.net.shared_memory import PAGE, Extents


def test_the_lowest_gap_that_fits_is_taken():
    extents = Extents(8 * PAGE)
    first, second, third = (extents.take(2 * PAGE) for _ in range(3))
    extents.give(first)
    assert extents.take(3 * PAGE) is None
    assert extents.take(PAGE) == first
    assert (second, third) == (2 * PAGE, 4 * PAGE)


def test_one_byte_takes_a_page():
    extents = Extents(2 * PAGE)
    assert [extents.take(1), extents.take(PAGE + 1), extents.take(1)] == [0, None, PAGE]
    assert extents.used == 2 * PAGE


def test_adjacent_free_extents_are_merged():
    extents = Extents(6 * PAGE)
    starts = [extents.take(2 * PAGE) for _ in range(3)]
    for start in (starts[0], starts[2], starts[1]):
        extents.give(start)
    assert extents.free() == [(0, 6 * PAGE)]


def test_giving_back_an_extent_that_was_not_taken_raises_key_error():
    extents = Extents(2 * PAGE)
    with pytest.raises(KeyError):
        extents.give(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=60))
def test_taken_and_free_extents_always_cover_the_whole(steps):
    extents = Extents(16 * PAGE)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            start = extents.take(number)
            length = -(-number // PAGE) * PAGE
            if start is None:
                assert all(gap < length for _, gap in extents.free())
            else:
                taken[start] = length
        elif taken:
            start = sorted(taken)[number % len(taken)]
            extents.give(start)
            del taken[start]
        ranges = sorted([*taken.items(), *extents.free()])
        assert extents.used == sum(taken.values())
        position = 0
        for start, length in ranges:
            assert start == position
            position += length
        assert position == extents.size
