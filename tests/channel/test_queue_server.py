"""The shell round the queue: whose memory items are in, and who is watched."""

from __future__ import annotations

import msgspec

from rlinf_actors.channel import queue_server
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import ERROR_CHARS
from rlinf_actors.channel.queue_server import QueueServer
from rlinf_actors.wire import frames

A, A2, B = b"worker:a#1-x", b"worker:a#2-y", b"worker:b#1-z"


class Kit:
    def __init__(self, **queue):
        self.sent = []
        self.watched = {}
        self.later = []
        self.host = QueueServer(
            ChannelQueue(**queue), self.send, self.watched.__setitem__, self.keep, soon=self.later.append
        )

    def send(self, peer, frame, parts=(), *, now=False, alone=True):
        self.sent.append((peer, frame, list(parts), alone))

    def keep(self, part):
        assert not self.sent, "acknowledged before it was copied"
        return memoryview(bytearray(part))


def test_an_item_is_in_the_hosts_memory_before_its_put_is_acknowledged():
    kit = Kit()
    theirs = bytearray(b"x" * 100)
    kit.host.handle(A, frames.ChannelPut(1, b"k", 0, False), [b"P", memoryview(theirs)])
    kit.later.pop()()
    [(peer, frame, _, _)] = kit.sent
    assert (peer, frame) == (A, frames.ChannelAccepted([1]))
    theirs[:] = b"y" * 100
    kit.host.handle(B, frames.ChannelGet(2, b"k", False), [])
    _, frame, parts, alone = kit.sent[1]
    assert frame == frames.Ok(2)
    assert bytes(parts[2]) == b"x" * 100
    assert not alone  # the consumer's changes are its own: the item may be delivered once more


def test_requests_that_arrive_together_share_answers():
    kit = Kit()
    for n in range(3):
        kit.host.handle(A, frames.ChannelPut(n, b"k", 0, False), [b"M%d" % n])
    kit.host.handle(A2, frames.ChannelPut(9, b"k", 0, False), [b"M9"])
    for n in range(4):
        kit.host.handle(B, frames.ChannelGet(n, b"k", False), [])
    assert not kit.sent
    [answer] = kit.later
    answer()
    assert [(peer, frame) for peer, frame, _, _ in kit.sent] == [
        (A, frames.ChannelAccepted([0, 1, 2])),
        (A2, frames.ChannelAccepted([9])),
        (B, frames.ChannelItems([0, 1, 2, 3])),
    ]
    kit.host.handle(A, frames.ChannelPut(10, b"k", 0, False), [b"M"])
    assert len(kit.later) == 2


def test_link_that_sends_several_requests_in_a_frame_reads_answers_to_several():
    kit = Kit(maxsize=1)
    kit.host.handle(A, frames.ChannelPuts([1, 2, 3], b"k"), [b"M"] * 3)
    kit.host.handle(B, frames.ChannelGets([1, 2, 3], b"k"), [])
    kit.later.pop()()
    assert [(peer, frame) for peer, frame, _, _ in kit.sent] == [
        (A, frames.ChannelAccepted([1, 2, 3])),
        (B, frames.ChannelItems([1, 2, 3])),
    ]


def test_a_process_is_watched_once_and_again_when_it_comes_back():
    kit = Kit()
    for peer in (A, A2, A):
        kit.host.handle(peer, frames.ChannelGet(1, b"k", True), [])
    assert list(kit.watched) == ["a"]
    kit.watched.pop("a")()
    kit.host.handle(A2, frames.ChannelGet(2, b"k", True), [])  # it was in the socket when its sender died
    assert list(kit.watched) == ["a"]


def test_items_of_both_links_of_a_dead_process_come_back():
    kit = Kit()
    for n in range(2):
        kit.host.handle(B, frames.ChannelPut(n, b"k", 0, False), [b"M"])
    kit.host.handle(A, frames.ChannelGet(1, b"k", False), [])
    kit.host.handle(A2, frames.ChannelGet(1, b"k", False), [])
    kit.watched.pop("a")()
    kit.host.handle(B, frames.ChannelLook(5, b"k"), [])
    assert kit.sent[-1][2] == [b"\x92\x02\xc2"]


def test_names_and_reasons_of_consumers_are_bounded_and_one_line():
    kit = Kit(max_deliveries=1)
    kit.host.handle(A, frames.ChannelPut(1, b"k", 0, False), [b"P"])
    kit.host.handle(A, frames.ChannelGet(2, b"k", False, "a\n" * 1000), [])
    kit.host.handle(B, frames.ChannelRelease(0, 2, "not mine"), [])
    assert len(kit.host._queue._delivered) == 1
    kit.host.handle(A, frames.ChannelRelease(0, 2, "e\n" * 10_000), [])
    kit.host.handle(A, frames.ChannelGet(3, b"k", False, "a"), [])
    _, raised, [said], _ = kit.sent[-1]
    assert raised.kind == "undeliverable"
    failed, consumer, how = msgspec.msgpack.decode(said)
    assert failed == 1
    assert consumer.isprintable()
    assert len(consumer) <= 2 * queue_server.NAME_CHARS
    assert len(how) <= 2 * ERROR_CHARS
