"""The mailbox: messages and receives, paired in order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.messaging.flow_control import SLACK, CreditAccumulator
from rlinf_actors.messaging.mailbox import REMEMBERED, ArrivedMessage, Mailbox

A = ("a:0", "")
B = ("b:0", "")


@dataclass(eq=False)
class Receive:
    incarnation: str = "1"
    abandoned: bool = False


def message(body, incarnation="1", size=10):
    return ArrivedMessage(incarnation, size, body)


def test_a_message_waits_for_a_receive():
    box = Mailbox()
    assert box.arrived(A, message("x")) is None
    assert (len(box), box.has_messages(A), box.has_messages(B)) == (1, True, False)
    got, stale = box.posted(A, Receive())
    assert (got.parts, stale, len(box), box.has_messages(A)) == ("x", [], 0, False)


def test_a_receive_waits_for_a_message():
    box, first, second = Mailbox(), Receive(), Receive()
    assert box.posted(A, first) == (None, [])
    assert box.posted(A, second) == (None, [])
    assert box.arrived(B, message("for another")) is None
    assert box.arrived(A, message("x")) is first
    assert box.arrived(A, message("y")) is second


@given(st.lists(st.booleans(), max_size=60))
def test_the_nth_message_goes_to_the_nth_receive(steps):
    box, sent, posted, pairs = Mailbox(), 0, 0, []
    receives = []
    for is_message in steps:
        if is_message:
            to = box.arrived(A, message(sent))
            if to is not None:
                pairs.append((receives.index(to), sent))
            sent += 1
        else:
            receives.append(Receive())
            got, _ = box.posted(A, receives[-1])
            if got is not None:
                pairs.append((posted, got.parts))
            posted += 1
    assert pairs == [(n, n) for n in range(min(sent, posted))]
    assert len(box) == max(0, sent - posted)


def test_a_withdrawn_receive_gets_nothing():
    box, first, second = Mailbox(), Receive(), Receive()
    box.posted(A, first)
    box.posted(A, second)
    assert box.withdraw(A, first)
    assert not box.withdraw(A, first)
    assert box.arrived(A, message("x")) is second
    assert not box.withdraw(A, second)


def test_an_abandoned_receive_is_passed_over():
    box, dropped, waiting = Mailbox(), Receive(), Receive()
    box.posted(A, dropped)
    box.posted(A, waiting)
    dropped.abandoned = True
    assert box.arrived(A, message("x")) is waiting


def test_a_message_that_is_put_back_has_its_place_again():
    box = Mailbox()
    for n in range(4):
        box.arrived(A, message(n))
    taken = [box.posted(A, Receive())[0] for _ in range(3)]
    for one in (taken[1], taken[0], taken[2]):
        assert box.put_back(A, one) is None
    assert len(box) == 4
    assert [box.posted(A, Receive())[0].parts for _ in range(4)] == [0, 1, 2, 3]
    waiting = Receive()
    box.posted(A, waiting)
    assert box.put_back(A, taken[0]) is waiting


def test_a_successor_of_the_same_name_is_another_sender():
    box, old, new = Mailbox(), Receive("1"), Receive("2")
    box.posted(A, old)
    box.posted(A, new)
    assert box.arrived(A, message("from the new", "2")) is new
    box.arrived(A, message("left over", "1" * 2))
    box.arrived(A, message("fresh", "2"))
    got, stale = box.posted(A, Receive("2"))
    assert (got.parts, [m.parts for m in stale], len(box)) == ("fresh", ["left over"], 0)


def test_messages_of_a_successor_stay_when_a_receive_wants_the_earlier_worker():
    """The news of the end of one worker may come after the first message of the next one of its name."""
    box, late = Mailbox(), Receive("1")
    box.arrived(A, message("from the new", "2"))
    assert box.posted(A, late) == (None, [])
    assert box.sender_gone("a:0", "1") == [late]
    got, stale = box.posted(A, Receive("2"))
    assert (got.parts, stale) == ("from the new", [])


def test_a_receive_without_an_incarnation_takes_any():
    box = Mailbox()
    box.arrived(A, message("x", "7"))
    assert box.posted(A, Receive(""))[0].parts == "x"
    anyone = Receive("")
    box.posted(A, anyone)
    assert box.arrived(A, message("y", "8")) is anyone


def test_a_dead_sender_ends_only_receives_that_wait_for_it():
    box, lost, other, successor = Mailbox(), Receive("1"), Receive("1"), Receive("2")
    box.posted(A, lost)
    box.posted(A, successor)
    box.posted(B, other)
    assert box.sender_gone("a:0", "1") == [lost]
    assert box.sender_gone("a:0", "1") == []
    assert box.arrived(A, message("x", "2")) is successor
    assert box.arrived(B, message("y")) is other


def test_messages_of_a_dead_sender_can_be_received():
    box = Mailbox()
    box.arrived(A, message("x"))
    assert box.sender_gone("a:0", "1") == []
    assert box.posted(A, Receive())[0].parts == "x"


def test_a_forgotten_queue_drops_its_messages():
    box = Mailbox()
    box.arrived(A, message("x"))
    box.arrived(B, message("y"))
    assert [m.parts for m in box.forget(A)] == ["x"]
    assert box.forget(A) == []
    assert len(box) == 1
    assert [box.wants(key, "1") for key in (A, B)] == [False, True]


def test_broadcast_messages_of_a_dead_sender_are_dropped():
    box, ring = Mailbox(), ("a:0", "a broadcast's")
    for key in (A, ring, ("b:0", "a broadcast's")):
        box.arrived(key, message("x"))
    box.arrived(ring, message("of a successor", "2"))
    box.sender_gone("a:0", "1")
    assert len(box) == 3
    assert [box.wants(key, "1") for key in (A, ring)] == [True, False]
    assert box.wants(ring, "2")
    assert box.posted(ring, Receive("2"))[0].parts == "of a successor"


def test_empty_queues_are_dropped():
    box = Mailbox()
    for n in range(100):
        box.arrived((f"s:{n}", ""), message(n))
        box.posted((f"s:{n}", ""), Receive())
        waiting = Receive()
        box.posted((f"s:{n}", ""), waiting)
        box.withdraw((f"s:{n}", ""), waiting)
    assert box._queues == {}


def test_memory_of_ended_senders_and_broadcasts_is_bounded():
    box = Mailbox()
    for n in range(3 * REMEMBERED):
        box.sender_gone(f"a:{n}", f"id-{n}")
        box.forget((f"a:{n}", "stream"))
    assert len(box._gone) == len(box._forgotten) == REMEMBERED
    last = 3 * REMEMBERED - 1
    assert not box.wants((f"b:{last}", "stream"), f"id-{last}")
    assert not box.wants((f"a:{last}", "stream"), "another")


def test_credit_is_owed_by_outbox_and_to_no_link_that_has_ended():
    returns = CreditAccumulator()
    assert returns.taken(b"link", 1, SLACK - 1) == 0
    assert returns.taken(b"link", 2, 1) == 0
    assert returns.taken(b"link", 1, 1) == SLACK
    returns.forget(b"link")
    assert returns.taken(b"link", 1, 10 * SLACK) == 0
    assert returns._owed == {}
