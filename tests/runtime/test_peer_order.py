"""A new link sends the backlog before all other messages."""

from __future__ import annotations

import sys

import pytest

from rlinf_actors.net.shared_memory import Arena
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint


class Link:
    """Keeps what is sent, and whether the peer had shown the link by then."""

    def __init__(self) -> None:
        self.sent: list[tuple[type, bool]] = []
        self.frames: list[frames.AnyFrame] = []
        self.peer: Peer | None = None

    def send(self, header, parts=(), *, now=False):
        assert self.peer is not None
        self.frames.append(frames.decode(header))
        self.sent.append((type(self.frames[-1]), self.peer._link is not None))

    def close(self, linger_ms=0):
        pass


class Network:
    bulk = None  # no streams between nodes

    def __init__(self, memory=None) -> None:
        self.memory = memory
        self.made = Link()

    def link(self, *_arguments, **_options):
        return self.made

    def soon(self, function):
        function()


def make(memory=None) -> tuple[Peer, Link]:
    network = Network(memory)
    peer = network.made.peer = Peer(network, "driver:x", "g:0", 0, "node")
    return peer, network.made


def test_link_becomes_visible_after_the_backlog_was_sent():
    peer, link = make()
    peer.send(frames.Call(1, "step"))
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: None)
    peer.send(frames.Cancel(1))
    kinds = [frames.Join, frames.Call, frames.Cancel]
    assert link.sent == list(zip(kinds, (False, False, True), strict=True))


def test_a_join_names_this_machines_byte_order():
    peer, link = make()
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: None)
    assert link.frames[0].byte_order == sys.byteorder


@pytest.mark.parametrize("answer", [frames.Memory(), frames.Memory(opened=True)])
def test_backlog_is_sent_after_the_answer_about_shared_memory(answer):
    arena = Arena(1 << 20)
    peer, link = make(arena)
    peer.send(frames.Call(1, "step"))
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: (frames.encode(frames.Create(2, "m:C", {})), ()))
    peer.send(frames.Cancel(1))
    assert [kind for kind, _ in link.sent] == [frames.Join, frames.Memory]
    peer._received(b"", frames.encode(answer), [])
    kinds = [frames.Join, frames.Memory, frames.Create, frames.Call, frames.Cancel]
    assert [kind for kind, _ in link.sent] == kinds
    peer.close()
    arena.close()


def test_peer_closed_before_the_shared_memory_answer_sends_nothing():
    arena = Arena(1 << 20)
    peer, link = make(arena)
    peer.connect(Endpoint("h", "ipc://x"), "h", "token", lambda: None)
    peer.send(frames.Call(1, "step"))
    peer.close()
    peer._received(b"", frames.encode(frames.Memory()), [])
    assert [kind for kind, _ in link.sent] == [frames.Join, frames.Memory]
    arena.close()
