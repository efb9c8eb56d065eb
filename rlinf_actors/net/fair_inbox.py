"""What the head's socket has received and not handled: fair among members, urgent messages first, and bounded.

Theory of operation. The head handles all messages on one thread. `FairInbox` gets each chunk as it arrives, before it
is decoded, and hands out messages until the turn of the loop is over:

1. emergency stops, which also overtake messages of their own connection, and heartbeats of a connection that is held
   back, because the head is at work for it;
2. heartbeats, and messages that end something, unless an earlier message of their connection still waits;
3. all others, by `net.fair_queue`: the member that has used the least time of the head goes first.

A member has so many urgent messages a second; further ones wait with its others. A member that floods the head waits in
its own queue. If more than HELD_BYTES wait there, its next request is refused, and its connections with more than their
share are closed, as are those of a member that does not read what it gets (`net.unread`). It may connect again. Local
processes, whose connections need no key, share the time as members do, and have no limit of bytes.

Loop thread only.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.fair_queue import Chunk, FairQueue, Holder
from rlinf_actors.net.framing import headers, only_header
from rlinf_actors.net.link import Verbs
from rlinf_actors.net.unread import Connections

if TYPE_CHECKING:
    import zmq

TURN_S = 0.0025
"""Seconds for which messages are handled in one turn of the loop. A single message may take longer."""
SHARE_S = 0.0005
"""Seconds for which messages of one chunk are handled before the next member has its turn."""
HELD_BYTES = 32 << 20
"""Most bytes of messages of one member that wait to be handled, or are being handled in slices. A launch of 100,000
workers sends 4 MiB at a time."""
CHUNK_BYTES = 300
"""Bytes that a waiting chunk takes besides its messages."""
BYTE_S = 2.5e-9
"""Seconds that a member is charged for each byte: libzmq's thread decrypts 0.4 GB/s."""
SCANNED = 4096
"""Largest chunk that is searched for urgent messages when it arrives. An honest heartbeat travels in a smaller one."""
URGENT_S = 200
"""Urgent messages of one member in a second. A driver's key has at most 1,000 processes with a heartbeat a second each;
those of more than 200 wait for their member's turn."""
REFUSED = 32
"""Requests of a chunk beyond the limit that get an answer."""

clock = time.perf_counter


class _Allowance:
    """The urgent messages that one member may still send: URGENT_S a second, and as many at once."""

    __slots__ = ("_at", "_left")

    def __init__(self) -> None:
        self._at, self._left = 0.0, 0.0

    def take(self, now: float) -> bool:
        self._left = min(URGENT_S, self._left + (now - self._at) * URGENT_S)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class FairInbox:
    """Chunks of all connections of one listener that wait to be handled.

    Args:
        verbs: reads control messages.
        connections: the listener's connections.
        wake: called when `serve` must be called soon, because a connection that was held back goes on.

    Attributes:
        busy: True if messages wait in the queues.
    """

    def __init__(self, verbs: Verbs, connections: Connections, wake: Callable[[], object] = lambda: None) -> None:
        self._verbs = verbs
        self._connections = connections
        self._wake = wake
        self._held_back = verbs.held_back.peers
        verbs.held_back.on_release = self._release
        self._stops: deque[tuple[bytes, bytes]] = deque()  # peer and message
        self._urgent: deque[tuple[bytes, bytes]] = deque()
        self._others = FairQueue(self._held_back)
        verbs.held_back.on_work = self._others.owe
        self.busy = False
        self._allowances: dict[Holder, _Allowance] = {}
        self._only: tuple[bytes, Holder, bytes] | None = None  # a message that came while nothing waited

    @property
    def waits(self) -> bool:
        """True if a message waits."""
        return self._only is not None or self.busy

    def add(self, peer: bytes, key: str, first: zmq.Frame, big: list[Buffer]) -> None:
        """Add the chunk in the frame *first* of a connection, whose member has *key*; "" for a local process.

        Raises:
            RemoteWireError: the chunk is malformed.
        """
        holder: Holder = key or peer
        if key and self._connections.is_closing(peer, first):
            return
        held_back = peer in self._held_back
        if not self.busy and self._only is None and not big and len(first) <= SCANNED and not held_back:
            data = first.bytes
            message = only_header(data)
            if message is not None:
                self._only = peer, holder, message
                return
        if self._only is not None:
            before, self._only = self._only, None
            self._sort(before[0], before[1], [before[2]], before[2])
        if key and self._others.held(holder) + len(first) > HELD_BYTES and self._refuses(peer, key, first):
            return
        if big:
            raise RemoteWireError("a control message has parts")
        size = len(first) + CHUNK_BYTES
        if len(first) > SCANNED:
            self._put(holder, Chunk(peer, headers(first.buffer), size, size * BYTE_S))
            return
        data = first.bytes
        message = only_header(data)
        self._sort(peer, holder, [bytes(one) for one in headers(data)] if message is None else [message], data)

    def _sort(self, peer: bytes, holder: Holder, messages: list[bytes], data: bytes) -> None:
        """Put the messages of a chunk, whose bytes are *data*, into the queues."""
        size = len(data) + CHUNK_BYTES
        verb_of, verbs = self._verbs.verb_of, self._verbs
        first, held_back = verbs.stops, peer in self._held_back
        if held_back:
            first |= verbs.beats
        if any(verb in data for verb in first):
            stops = [message for message in messages if verb_of(message) in first and self._may_hurry(holder)]
            for message in stops:
                messages.remove(message)
                self._stops.append((peer, message))
                self.busy = True
        if not held_back and not self._others.waits(holder, peer):
            while messages and verb_of(messages[0]) in verbs.urgent and self._may_hurry(holder):
                self._urgent.append((peer, messages.pop(0)))
                self.busy = True
        if messages:
            self._put(holder, Chunk(peer, iter(messages), size, size * BYTE_S))

    def serve(self, handle: Callable[[bytes, bytes, list[Buffer]], object], warn: Callable[..., object]) -> None:
        """Call *handle* with peer, message and no parts until nothing waits or the turn is over.

        *warn* is called with a peer and the error if its chunk is malformed.
        """
        if self._only is not None:
            (peer, _, message), self._only = self._only, None
            handle(peer, message, [])
            return
        if not self.busy:
            return
        now = clock()
        end = now + TURN_S
        while now < end:
            hurried = self._stops or self._urgent
            if hurried:
                handle(*hurried.popleft(), [])
                now = clock()
                continue
            chunk = self._others.first()
            if chunk is None:
                break
            begun, share = now, min(end, now + SHARE_S)
            while True:
                message, error = chunk.take()
                handle(chunk.peer, message, [])
                if error is not None:
                    warn(chunk.peer, error)
                now = clock()
                if chunk.next is None or now >= share or chunk.peer in self._held_back:
                    break
            self._others.charge(chunk, chunk.cost + now - begun)
            chunk.cost = 0.0
        self.busy = bool(self._stops or self._urgent or self._others)

    def _release(self, peer: bytes) -> None:
        self._others.release(peer)
        if self._others and not self.busy:
            self.busy = True
            self._wake()

    def _put(self, holder: Holder, chunk: Chunk) -> None:
        if chunk.next is not None:
            self._others.put(holder, chunk)
            self.busy = True

    def _may_hurry(self, holder: Holder) -> bool:
        allowance = self._allowances.get(holder)
        if allowance is None:
            if len(self._allowances) > 8192:
                self._allowances.clear()
            allowance = self._allowances[holder] = _Allowance()
        return allowance.take(clock())

    def _refuses(self, peer: bytes, key: str, first: zmq.Frame) -> bool:
        """Close the connections that are to blame for its member's limit. Return True if *peer* is one of them.

        Its chunk is refused then. Nothing of the other connections is lost, as long as it fits.
        """
        why = f"{HELD_BYTES >> 20} MiB of its messages wait to be handled by the head, the most of one process"
        heavy = self._others.heavy(key)
        for one in heavy:
            self._others.drop(key, one)
        if peer not in heavy and self._others.held(key) + len(first) > HELD_BYTES:
            self._others.drop(key, peer)
            heavy.append(peer)
        if peer in heavy:
            with contextlib.suppress(RemoteWireError):
                for message, _ in zip(headers(first.buffer), range(REFUSED), strict=False):
                    self._verbs.refuse(peer, bytes(message), f"refused: {why}: wait for answers before you ask more")
        for one in heavy:
            self._connections.close(one, key, why)
        return peer in heavy
