"""The store of a lane over gloo: both ends have both ends' keys, and nothing waits longer than it should."""

from __future__ import annotations

import datetime
import threading

import pytest

from rlinf_actors.messaging.lane_store import LaneStore


def pair():
    """Return the sender's and the receiver's end, and the keys that travelled, in order."""
    sent = []

    def to_receiver(key, value):
        sent.append(("to receiver", key))
        receiver.arrived(key, value)

    def to_sender(key, value):
        sent.append(("to sender", key))
        sender.arrived(key, value)

    sender, receiver = LaneStore(to_receiver, 5.0), LaneStore(to_sender, 5.0, begins=True)
    return sender, receiver, sent


@pytest.mark.parametrize("sender_first", [True, False])
def test_each_end_gets_the_keys_of_both(sender_first):
    sender, receiver, sent = pair()
    ends = [(sender, "0", b"a"), (receiver, "1", b"b")]
    for end, key, value in ends if sender_first else reversed(ends):
        end.set(key, value)
    for end in (sender, receiver):
        end.wait(["0", "1"], datetime.timedelta(0))
        assert [end.get("0"), end.get("1")] == [b"a", b"b"]
    assert sent[0] == ("to sender", "1"), "the receiver may not know the lane before it begins"
    assert sorted(sent) == [("to receiver", "0"), ("to sender", "1")], "each key travels once"


def test_a_key_that_does_not_come_is_a_time_out():
    sender, _, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        sender.wait(["1"], datetime.timedelta(0))


def test_the_end_of_a_lane_ends_the_wait_for_a_key():
    sender, _, _ = pair()
    outcome = []

    def wait():
        try:
            sender.get("1")
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    sender.close()
    thread.join(15)
    assert outcome == ["the lane has ended"]
