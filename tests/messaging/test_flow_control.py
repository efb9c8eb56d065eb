"""Credits in bytes."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import ConfigError
from rlinf_actors.messaging.flow_control import SLACK, CreditAccumulator, Window
from rlinf_actors.settings import SEND_WINDOW, Settings

KIB = 1024

LIMIT = 1024 * KIB


def test_items_within_the_window_are_sent_and_the_rest_waits_in_order():
    window = Window(LIMIT)
    assert window.offer(600 * KIB, "a")
    assert not window.offer(600 * KIB, "b")
    assert not window.offer(1, "c")  # it would fit, and must not overtake
    assert window.returned(600 * KIB) == ["b", "c"]
    assert window.outstanding == 600 * KIB + 1


def test_a_message_larger_than_the_window_goes_alone():
    window = Window(LIMIT)
    assert window.offer(10 * LIMIT, "large")
    assert not window.offer(1, "small")
    assert window.returned(10 * LIMIT) == ["small"]
    assert not window.offer(LIMIT, "x") or window.outstanding <= LIMIT + window.slack


def test_bytes_that_no_credit_comes_for_block_no_item():
    window = Window(LIMIT)
    window.offer(window.lump - 1, "taken, and not asked for")
    assert window.ask(window.lump - 1) == 0
    window.offer(SLACK - 1, "taken, asked for, and kept back")
    assert CreditAccumulator().taken("s", 1, SLACK - 1) == 0
    assert window.offer(10 * LIMIT, "large")


def test_credit_is_asked_for_in_lumps_of_all_that_was_sent():
    window = Window(LIMIT)
    assert [window.ask(100 * KIB) for _ in range(5)] == [0, 0, 300 * KIB, 0, 0]
    assert window.ask(LIMIT) == LIMIT + 200 * KIB


def test_credit_returns_in_lumps_for_each_sender():
    returns = CreditAccumulator()
    assert returns.taken("a", 1, SLACK // 2) == 0
    assert returns.taken("b", 1, SLACK // 2) == 0
    assert returns.taken("a", 1, SLACK // 2) == SLACK
    assert returns.taken("a", 1, 5 * SLACK) == 5 * SLACK


def test_waiting_items_are_removed_once():
    window = Window(LIMIT)
    window.offer(LIMIT, "sent")
    window.offer(1, "a")
    window.offer(1, "b")
    assert window.remove_waiting() == ["a", "b"]
    assert window.remove_waiting() == []


@given(
    st.lists(st.integers(1, 3 * LIMIT), max_size=40), st.sampled_from([0, 0.5, 1]), st.randoms(use_true_random=False)
)
def test_every_item_is_sent_in_order_and_within_the_bound(sizes, own, random):
    """A sender and a receiver that takes at random: no deadlock, no overtaking, bounded memory.

    *own*: share of the messages that ask for their own bytes, as those of broadcasts and of older senders do.
    """
    window, returns = Window(LIMIT), CreditAccumulator()
    arrived, taken = deque(), []

    def send(n, size):
        arrived.append((n, size, size if random.random() < own else window.ask(size)))

    offers = deque(enumerate(sizes))
    while offers or len(taken) < len(sizes):
        if offers and (random.random() < 0.6 or not arrived):
            n, size = offers.popleft()
            if window.offer(size, (n, size)):
                send(n, size)
        else:
            assert arrived, "the sender waits, and the receiver has nothing to take"
            n, _, credit = arrived.popleft()
            taken.append(n)
            back = returns.taken("sender", 1, credit)
            for item in window.returned(back) if back else ():
                send(*item)
        assert sum(size for _, size, _ in arrived) <= max(LIMIT, window.slack + max(sizes))
    assert taken == list(range(len(sizes)))


@pytest.mark.parametrize(("text", "size"), [(None, 64 << 20), ("", 64 << 20), ("1048576", 1 << 20)])
def test_the_window_of_the_environment(text, size):
    assert Settings.load({} if text is None else {SEND_WINDOW: text}).send_window_bytes == size


@pytest.mark.parametrize("text", ["64M", "0", "-1", "1048575"])
def test_an_invalid_window_is_refused(text):
    with pytest.raises(ConfigError, match=r"RLINF_ACTORS_SEND_WINDOW: is .* a number of bytes from 1048576 up"):
        Settings.load({SEND_WINDOW: text})
