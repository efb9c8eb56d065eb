"""Requests that come in one frame: the queue decides as if they had come one by one, at few Python calls an item."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from rlinf_actors.channel.put_window import Put
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import AcceptPut, AcceptPuts, DeliverItems, QueuedItem, Ticket, one_by_one
from rlinf_actors.channel.queue_server import QueueServer
from rlinf_actors.channel.request_sender import RequestSender
from rlinf_actors.net.shared_memory import SHARED_FROM
from rlinf_actors.wire import frames

OWNERS, KEYS = ("a", "b"), (b"k", b"l")
A, B = b"worker:a#1-x", b"worker:b#1-z"
MANY = 200


class Told:
    """A queue, and what its commands have told the requests."""

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        self.queue = ChannelQueue(maxsize, max_bytes)
        self.accepted: list[tuple[bytes, int]] = []
        self.delivered: dict[Ticket, list[int]] = {}
        self.refused: list[tuple[Ticket, str]] = []

    def take(self, commands) -> None:
        for command in one_by_one(commands):
            if isinstance(command, AcceptPuts):
                self.accepted += [(command.peer, id) for id in command.ids]
            elif isinstance(command, AcceptPut):
                self.accepted.append((command.ticket.peer, command.ticket.id))
            elif isinstance(command, DeliverItems):
                assert command.ticket not in self.delivered
                self.delivered[command.ticket] = [item.value for item in command.items]
            else:
                self.refused.append((command.ticket, command.why))

    def state(self):
        keys = [(key, [item.value for item in self.queue.waiting(key)], self.queue.full(key)) for key in KEYS]
        return self.accepted, self.delivered, self.refused, keys, self.queue.nbytes, sorted(self.queue.in_use())


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_requests_of_one_frame_are_decided_like_single_ones(first):
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        limits = rng.choice((0, 1, 3, 7)), rng.choice((0, 10, 40))
        together, single = Told(*limits), Told(*limits)
        number = iter(range(10_000))
        for step in range(60):
            owner, key = rng.choice(OWNERS), rng.choice(KEYS)
            kind = rng.choice(("put", "put", "get", "get", "ack", "batch", "back", "die", "close"))
            ids = [next(number) for _ in range(rng.choice((1, 2, 5)))]
            tickets = [Ticket(owner, owner.encode(), id) for id in ids]
            out = sorted(single.delivered)
            chosen = rng.sample(out, min(len(out), 3))
            sizes = [rng.randrange(12) for _ in ids]
            dies = rng.random() < 0.2
            for told in (together, single):
                queue = told.queue
                items = [QueuedItem(id, size) for id, size in zip(ids, sizes, strict=True)]
                if kind == "put" and told is together:
                    told.take(queue.put_all(owner, owner.encode(), ids, key, items))
                elif kind == "put":
                    for ticket, item in zip(tickets, items, strict=True):
                        told.take(queue.put(ticket, key, item))
                elif kind == "get" and told is together:
                    told.take(queue.get_all(owner, owner.encode(), ids, key))
                elif kind == "get":
                    for ticket in tickets:
                        told.take(queue.get(ticket, key))
                elif kind == "ack":
                    told.take(queue.ack(*chosen))
                elif kind == "batch":
                    told.take(queue.batch(tickets[0], key, 1))
                elif kind == "back" and chosen:
                    told.take(queue.cancel(chosen[0], back=True))
                elif kind == "die" and dies:
                    told.take(queue.owner_gone(owner))
                elif kind == "close" and seed % 5 == 0 and step > 50:
                    told.take(queue.close())
                if kind in ("ack", "back"):
                    for ticket in chosen if kind == "ack" else chosen[:1]:
                        told.delivered.pop(ticket)
            assert together.state() == single.state(), f"seed {seed}, step {step}, {kind}"


@pytest.mark.parametrize("maxsize", [0, MANY // 2])
def test_host_makes_few_python_calls_for_an_item_of_a_frame(maxsize):
    sent = []

    def send(peer, frame, parts=(), *, now=False, alone=True):
        sent.append((peer, frame))

    host = QueueServer(ChannelQueue(maxsize), send, lambda name, gone: None)
    host.handle(A, frames.ChannelPut(1, b"k", 0, False), [b"M"])
    host.handle(B, frames.ChannelGet(1, b"k", False), [])
    host.handle(B, frames.ChannelAck([1]), [])
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    ids = list(range(2, 2 + MANY))
    sent.clear()
    sys.setprofile(count)
    try:
        host.handle(A, frames.ChannelPuts(ids, b"k"), [b"M"] * MANY)
        host.handle(B, frames.ChannelGets(ids, b"k"), [])
        host.handle(B, frames.ChannelAck(ids), [])
    finally:
        sys.setprofile(None)
    assert sum(len(frame.ids) for _, frame in sent if isinstance(frame, frames.ChannelItems)) == MANY
    assert sum(len(frame.ids) for _, frame in sent if isinstance(frame, frames.ChannelAccepted)) == MANY
    assert len(sent) <= 4
    assert calls <= 3 * MANY, calls / MANY


class Host:
    """The Peer of a host with an answer to come. `sent` has each frame, and True if its thread sent it at once."""

    def __init__(self) -> None:
        self.pending = {1: object()}
        self.sent: list[tuple[frames.AnyFrame, bool]] = []

    def open(self, pending) -> int:
        return 2

    def send(self, frame, parts=(), *, now=False, give=False) -> None:
        self.sent.append((frame, now))


@pytest.mark.parametrize(("size", "at_once"), [(SHARED_FROM, True), (SHARED_FROM - 1, False)])
def test_large_put_is_sent_by_its_own_thread_though_others_are_under_way(size, at_once):
    host = Host()
    sender = RequestSender(host, lambda flush: None, threading.RLock())
    sender.put(Put("put", b"k", 0, False, [b"P", bytes(size - 1)]))
    assert [(type(frame), now) for frame, now in host.sent] == [(frames.ChannelPut, at_once)]


def test_requests_of_one_key_share_a_frame():
    host = Host()
    sender = RequestSender(host, lambda flush: None, threading.RLock())
    for id in range(3):
        sender.add((b"k", id), False)
    for id in range(3, 6):
        sender.add((b"k", id, 0, b"M"), False)
    sender.flush()
    assert [type(frame) for frame, _ in host.sent] == [frames.ChannelGets, frames.ChannelPuts]
