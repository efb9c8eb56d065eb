"""Numbers of seconds that users pass: accepted and refused values."""

from __future__ import annotations

import math

import pytest

from rlinf_actors.wire.protocol import deadline, waiting

NO_NUMBERS = [math.nan, "5", b"5", [], object(), 10**400]


@pytest.mark.parametrize(
    ("given", "taken"),
    [(None, None), (math.inf, None), (5, 5.0), (0, 0.0), (-1.5, 0.0), (-math.inf, 0.0), (1e300, 1e300)],
)
def test_waiting_accepts_numbers_of_seconds(given, taken):
    assert waiting(given) == taken


@pytest.mark.parametrize("given", NO_NUMBERS)
def test_error_names_the_argument_that_is_not_a_number(given):
    with pytest.raises(ValueError, match=r"the patience is .*; it must be a number of seconds"):
        waiting(given, "the patience")
    with pytest.raises(ValueError, match=r"the timeout is .*; it must be a number of seconds"):
        deadline(given)


def test_a_deadline_is_above_zero():
    assert (deadline(0.5), deadline(math.inf)) == (0.5, None)
    for given in (0, -1, -math.inf):
        with pytest.raises(ValueError, match="above 0"):
            deadline(given)
