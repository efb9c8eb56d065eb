"""Whose message the head handles next: counted in turns, with costs that the test decides."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.net.fair_queue import Chunk, FairQueue


def put(queue: FairQueue, member: str, *messages: bytes, peer: bytes = b"", size: int = 1) -> None:
    queue.put(member, Chunk(peer or member.encode(), iter(messages), size))


def serve(queue: FairQueue, turns: int, cost=lambda message: 1.0) -> list[bytes]:
    """Handle messages; return them in order."""
    taken = []
    while len(taken) < turns and (chunk := queue.first()) is not None:
        message, _ = chunk.take()
        taken.append(message)
        queue.charge(chunk, cost(message))
    return taken


def test_member_with_one_message_waits_for_one_message_of_each_other():
    queue = FairQueue()
    for member in "abc":
        put(queue, member, *[member.encode()] * 1000)
    serve(queue, 50)
    put(queue, "victim", b"v")
    assert b"v" in serve(queue, 4)


def test_members_get_equal_time_whatever_their_messages_cost():
    queue = FairQueue()
    put(queue, "cheap", *[b"cheap"] * 1000)
    put(queue, "costly", *[b"costly"] * 1000)
    counts = Counter(serve(queue, 110, lambda message: 10.0 if message == b"costly" else 1.0))
    assert counts == {b"cheap": 100, b"costly": 10}


def test_member_that_always_has_one_costly_message_pays_for_the_last():
    queue = FairQueue()
    put(queue, "steady", *[b"s"] * 1000)
    taken = []
    for _ in range(330):
        if not queue.waits("bursts", b"bursts"):
            put(queue, "bursts", b"b")
        taken += serve(queue, 1, lambda message: 10.0 if message == b"b" else 1.0)
    assert 25 <= Counter(taken)[b"b"] <= 35


def test_connections_of_a_member_share_its_time():
    queue = FairQueue()
    for peer in (b"p1", b"p2"):
        put(queue, "job", *[peer] * 100, peer=peer)
    put(queue, "other", *[b"o"] * 100)
    assert Counter(serve(queue, 40)) == {b"o": 20, b"p1": 10, b"p2": 10}


def test_dropped_connection_leaves_the_others():
    queue = FairQueue()
    put(queue, "job", b"1", b"2", peer=b"bad", size=50)
    put(queue, "job", b"3", peer=b"good", size=5)
    chunk = queue.first()
    assert chunk is not None
    assert queue.heavy("job") == [b"bad"]
    queue.drop("job", b"bad")
    queue.charge(chunk, 1.0)
    assert (queue.held("job"), serve(queue, 9), bool(queue)) == (5, [b"3"], False)
    put(queue, "job", b"4", peer=b"bad")
    assert serve(queue, 9) == [b"4"]


def test_member_whose_messages_were_dropped_gets_no_further_turns():
    """A member that is refused again and again would otherwise get the more time the more often that happens."""
    queue = FairQueue()
    for _ in range(20):
        put(queue, "bad", *[b"bad"] * 1000)
        queue.drop("bad", b"bad")
    put(queue, "bad", *[b"bad"] * 1000)
    put(queue, "good", *[b"good"] * 1000)
    assert Counter(serve(queue, 40)) == {b"bad": 20, b"good": 20}


def test_connection_whose_messages_were_dropped_gets_no_further_turns():
    queue = FairQueue()
    put(queue, "job", *[b"good"] * 1000, peer=b"good")
    for _ in range(20):
        put(queue, "job", *[b"bad"] * 1000, peer=b"bad")
        queue.drop("job", b"bad")
    put(queue, "job", *[b"bad"] * 1000, peer=b"bad")
    assert Counter(serve(queue, 40)) == {b"bad": 20, b"good": 20}


@pytest.mark.parametrize("waits", [True, False])
def test_work_outside_of_turns_is_paid_for_in_turns(waits):
    queue = FairQueue()
    put(queue, "steady", *[b"s"] * 1000)
    serve(queue, 5)
    if not waits:
        queue.owe("long", 10.0)
    put(queue, "long", *[b"l"] * 1000)
    if waits:
        queue.owe("long", 10.0)
    assert 18 <= Counter(serve(queue, 30))[b"s"] <= 21


def test_message_that_is_at_work_counts_for_its_member_until_its_connection_goes_on():
    """Else a member keeps as many long messages in the head's memory as it has connections."""
    held_back: set[bytes] = set()
    queue = FairQueue(held_back)
    put(queue, "job", b"x" * 100, peer=b"p1", size=100)
    chunk = queue.first()
    assert chunk is not None
    chunk.take()
    held_back.add(b"p1")
    queue.charge(chunk, 1.0)
    assert (queue.held("job"), queue.heavy("job")) == (100, [])
    held_back.discard(b"p1")
    queue.release(b"p1")
    assert queue.held("job") == 0


@pytest.mark.hypothesis
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=60))
def test_nothing_is_lost_and_each_connection_keeps_its_order(steps):
    queue, number = FairQueue(), 0
    wanted: dict[bytes, list[bytes]] = {}
    got: dict[bytes, list[bytes]] = {}
    for member, peer, count, handle in steps:
        name = b"%d.%d" % (member, peer)
        messages = [name + b":%d" % n for n in range(number, number + count)]
        number += count
        wanted.setdefault(name, []).extend(messages)
        put(queue, str(member), *messages, peer=name, size=count)
        for message in serve(queue, 2 if handle else 0, lambda message: float(len(message) % 3)):
            got.setdefault(message.partition(b":")[0], []).append(message)
    for message in serve(queue, 10_000):
        got.setdefault(message.partition(b":")[0], []).append(message)
    assert (got, bool(queue)) == (wanted, False)
    assert not any(queue.held(str(member)) for member in range(4))


class Counted(float):
    """Seconds that count how often they are compared."""

    compared = 0

    def __radd__(self, other: float) -> Counted:
        return Counted(float(other) + float(self))

    __add__ = __radd__

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) > float(other)


@pytest.mark.parametrize("members", [100, 3000])
def test_turn_costs_the_same_however_many_members_there_are(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, rounds = FairQueue(), 3
    monkeypatch.setattr(Counted, "compared", 0)
    for _ in range(rounds):
        for member in range(members):
            put(queue, str(member), b"m")
        serve(queue, members, lambda message: Counted(1.0))
    assert Counted.compared <= 20 * rounds * members, "a heap compares log2(3000) = 12 times"
