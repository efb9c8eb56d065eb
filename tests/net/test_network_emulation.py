"""Links and listeners that emulate a network: what is delayed, in which order, and for whom."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pace
import pytest

from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.net.buffer_lending import MARK, _encode, _Leases
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.network_emulation import EmulatedNetwork, Postman
from rlinf_actors.wire import frames

JOIN = frames.Join(7, "1", "3.11", "worker:x", "t", "w-0")


class Ends:
    """The real link or listener: notes what is sent, and when."""

    def __init__(self):
        self.sent: list[tuple[float, bytes, bytes]] = []
        self.changed = threading.Condition()
        self.lingered = -1
        self.on_unreachable = None

    def link(self, *args: Any, **keys: Any) -> Ends:
        return self

    def listener(self, *args: Any, **keys: Any) -> Ends:
        return self

    def send(self, *message: Any, now: bool = False) -> None:
        *peer, header, _parts = message
        with self.changed:
            self.sent.append((time.monotonic(), peer[0] if peer else b"", header))
            self.changed.notify_all()

    def close(self, linger_ms: int = 0) -> None:
        self.lingered = linger_ms

    def kinds(self):
        return [type(frames.decode(header)) for _, _, header in self.sent]

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent) >= count, pace.PATIENCE_S), self.kinds()


def network(ends: Ends, me: str = "env:0", **section: Any) -> EmulatedNetwork:
    pairs = [{"src": "env:0", "dst": "actor", "delay_ms": 50}, {"src": "env:0", "dst": "far", "delay_ms": 3_600_000}]
    config = NetEmulationConfig.from_cfg({"enabled": True, "crossdc_pairs": pairs, **section})
    assert config is not None
    return EmulatedNetwork(ends, config, me, 0)  # type: ignore[arg-type]


@pytest.fixture
def ends():
    return Ends()


@pytest.fixture
def emulated(ends):
    made = network(ends)
    yield made
    made.close()


def message(stream: str = "", size: int = 0) -> bytes:
    return frames.encode(frames.UserMessage(1, 0, "env:0", "w", stream, size))


def test_postman_is_never_early_and_keeps_the_order_of_one_time():
    postman, late, order = Postman(), [], []
    for _ in range(10):
        due, done = time.monotonic() + 0.002, threading.Event()
        postman.post(due, None, lambda due=due, done=done: (late.append(time.monotonic() - due), done.set()))
        assert done.wait(pace.PATIENCE_S)
    assert min(late) >= 0
    due = time.monotonic() + 1.0
    for number in range(5):
        postman.post(due, None, lambda number=number: order.append(number))
    postman.post(due - 0.5, None, lambda: order.append("earlier"))
    postman.drain(pace.PATIENCE_S)
    postman.close()
    assert order == ["earlier", 0, 1, 2, 3, 4]


def test_messages_are_sent_late_and_in_order(emulated, ends):
    link, began = emulated.link("ipc://x", b"me", None, LinkOptions(to="actor:3")), time.monotonic()
    headers = [message(size=n) for n in range(5)]
    for header in headers:
        link.send(header, [b"x" * 1000])
    ends.wait(5)
    assert [header for _, _, header in ends.sent] == headers
    assert ends.sent[0][0] - began >= 0.05


def test_links_to_other_workers_and_to_the_head_are_not_delayed(emulated, ends):
    assert emulated.link("ipc://x", b"me", None) is ends
    emulated.link("ipc://x", b"me", None, LinkOptions(to="rollout:0")).send(message())
    assert len(ends.sent) == 1


@pytest.mark.parametrize(
    ("frame", "delayed"),
    [
        (frames.Call(1, "step"), True),
        (frames.Cancel(1), True),
        (frames.Credit(1, 1), True),
        (frames.ChannelPut(1, b"k", 0, False), True),
        (frames.ChannelAck([1]), True),
        (frames.Create(1, "m:c", {}), True),
        (frames.Memory(), False),
        (frames.Dropped([1]), False),
        (frames.Ask(1), False),
        (frames.WhatRuns(1), False),
    ],
)
def test_frames_that_may_not_overtake_one_another_are_delayed(emulated, ends, frame, delayed):
    emulated.link("ipc://x", b"me", None, LinkOptions(to="far:0")).send(frames.encode(frame))
    assert (ends.sent == []) is delayed


def test_join_tells_the_listener_who_connects_and_answers_are_delayed(ends):
    client = network(ends)
    client.link("ipc://x", b"me", None, LinkOptions(to="far:0")).send(frames.encode(JOIN))
    joined = ends.sent.pop()[2]
    assert frames.decode(joined) == msgspec.structs.replace(JOIN, place="env:0@0")
    served, arrived = Ends(), []
    server = network(served, "far:0")
    listener = server.listener(lambda peer, header, parts: arrived.append((peer, header)))
    listener.received(b"env", joined, [])
    listener.received(b"stranger", frames.encode(JOIN), [])
    assert arrived == [(b"env", joined), (b"stranger", frames.encode(JOIN))]
    for peer in (b"env", b"stranger"):
        for frame in (frames.Ok(1), frames.Raised(2, "", "", ""), frames.Held(3, 1), frames.Returned(4, 9)):
            listener.send(peer, frames.encode(frame))
    sent = [(peer, type(frames.decode(header))) for _, peer, header in served.sent]
    acknowledged = [frames.Held, frames.Returned]
    assert [kind for peer, kind in sent if peer == b"env"] == acknowledged
    assert [kind for peer, kind in sent if peer == b"stranger"] == [frames.Ok, frames.Raised, *acknowledged]
    client.close()
    server.close()


def test_close_with_a_linger_sends_what_is_held_and_without_drops_it(emulated, ends):
    kept, dropped = (emulated.link("ipc://x", b"me", None, LinkOptions(to="far:0")) for _ in range(2))
    for link in (kept, dropped):
        link.send(frames.encode(frames.Call(1, "a")))
        link.send(frames.encode(frames.Call(2, "b")))
    kept.close(100)
    assert [frames.decode(header).method for _, _, header in ends.sent] == ["a", "b"]
    assert ends.lingered == 100
    dropped.close()
    assert len(ends.sent) == 2


def due(emulated: EmulatedNetwork, began: float) -> list[float]:
    """When the held messages are sent, in seconds from the send of the first, which was after *began*.

    The first takes 10 s. The others wait for it, however late they were sent.
    """
    first, *others = sorted(entry[0] for entry in emulated._postman._due)
    assert began <= first - 10 <= time.monotonic()
    return [10, *(10 + at - first for at in others)]


def test_size_counts_parts_lent_memory_and_tensors_beside_the_message(ends):
    emulated = network(ends, crossdc_pairs=[{"src": "env:0", "dst": "actor", "delay_ms": 0, "bandwidth_mbps": 8}])
    link = emulated.link("ipc://x", b"me", None, LinkOptions(to="actor:0"))
    transfer = frames.TensorTransfer(1, 1, [])
    beside = frames.encode(frames.UserMessage(1, 0, "env:0", "w", "", 30_000_000, transfer))
    lent = MARK + _encode(_Leases(True, False, [(1, 7, 0, 20_000_000)], message()))
    began = time.monotonic()
    for header, parts in ((message(), [b"", bytes(10_000_000)]), (lent, [b"", b""]), (beside, [b""])):
        link.send(header, parts)
    assert due(emulated, began) == pytest.approx([10, 30, 60], rel=1e-4), "but for the headers"
    emulated.close()


def test_broadcast_to_several_workers_uses_the_bandwidth_once(ends):
    pairs = [{"src": "env:0", "dst": "actor", "delay_ms": 0}]
    groups = [{"members": ["env:0"], "bandwidth_mbps": 8}]
    emulated = network(ends, crossdc_pairs=pairs, bandwidth_groups=groups)
    links = [emulated.link("ipc://x", b"me", None, LinkOptions(to=f"actor:{rank}")) for rank in range(3)]
    began = time.monotonic()
    for _ in range(2):
        for link in links:
            link.send(message("tree"), [b"", bytes(10_000_000)])
    assert due(emulated, began) == pytest.approx([10] * 3 + [20] * 3, rel=1e-4), "but for the headers"
    emulated.close()


def test_channel_items_take_the_path_of_their_producer_to_the_consumer(ends):
    host = network(ends, "channel:0")
    listener = host.listener(lambda *message: None)
    for peer, place in ((b"producer", "env:0@1"), (b"near", "near:0@1"), (b"consumer", "far:2@1")):
        listener.received(peer, frames.encode(msgspec.structs.replace(JOIN, place=place)), [])
    host.carried_for(b"consumer", [(b"near", 100)])
    listener.send(b"consumer", frames.encode(frames.Ok(1)))
    assert len(ends.sent) == 1
    host.carried_for(b"consumer", [(b"near", 100), (b"producer", 100)])
    before = time.monotonic()
    listener.send(b"consumer", frames.encode(frames.Ok(2)))
    ((at, *_),) = host._postman._due
    assert before + 3600 <= at <= time.monotonic() + 3600.001
    listener.send(b"consumer", frames.encode(frames.Ok(3)))
    assert len(ends.sent) == 2, "the producers were for one answer"
    host.close()
