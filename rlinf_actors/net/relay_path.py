"""RelayPath: links of one process to workers of another node that share its link to a relay there.

Theory of operation. A relay is a process of the job on another node (`worker.relay`). A link by a relay is a link like
any other: it has an identity of its own, the worker knows the caller by it, and calls, answers, cancels and messages
travel on it in order. What differs is below: messages that the caller sends to many workers leave as one message for
the relay (`wire.relay_frames.Relayed`), with a body that is the same for several workers only once, and the relay sends
the answers that it has at one moment as one message.

*Order.* All messages pass one queue, in the order in which threads have appended them, and one link, in order.

*Bounds.* The relay returns credit for what the kernel has taken to a worker. A link has at most WINDOW bytes at the
relay; further ones wait here, so a worker that does not read costs the relay no more than that, and no other link waits
for it. In the other direction this process returns credit for what it has handled (`worker.relay` has that bound).

*Ends.* If the relay ends, its connection is lost, or it does not answer, all links of the path are reset as if their
own connections had been lost: messages may be lost, and RemoteGroup makes direct links in their place. A path that has
failed is never used again. RESET_S pass first: if the whole node has ended, the head reports that meanwhile.

*Signals.* A handler that raises in a main thread that sends must not leave the lock held: `net.held_signals`.

Any thread sends; everything else runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rlinf_actors.errors import ConnectionLostError, GroupClosedError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.net.link import PLAIN, LinkOptions, OnMessage
from rlinf_actors.net.loop import handling_failed
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

WINDOW = 8 << 20
"""Bytes of messages to one worker that may be at the relay, and beyond which one message more is sent."""
CREDIT = 256 << 10
"""Bytes that are handled before credit is returned."""
FULL = 256 << 10
"""Bytes of messages after which a frame takes no more."""
BATCH = 32
"""Queued messages that the thread which queues them sends itself (see `net.message_socket`)."""
LINGER_S = 10.0
"""Seconds for which a closed link may still deliver what was sent on it."""
RESET_S = 0.5
"""Seconds between the end of a relay and the reset of its links."""
ASK_S = 5.0
"""Seconds without a message after which a relay is asked if it answers, while this process waits for its workers."""
SILENT_S = 30.0
"""Seconds that a relay may take to answer. Longer than a lease: so long only a stopped process takes."""


class RelayPeer(Protocol):
    """The Peer of the relay (`runtime.peer.Peer`), as far as a path uses it."""

    name: str
    node: str
    received: int

    def post(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None: ...

    def soon(self, function: Callable[[], object]) -> None: ...


def size_of(header: Buffer, parts: Sequence[Buffer]) -> int:
    """Return the number of bytes of a message."""
    size = len(header)
    for part in parts:
        size += len(part) if type(part) is bytes else memoryview(part).nbytes
    return size


class RelayPath:
    """The links that go by one relay.

    The owner registers it as the pending call *number* of the relay's Peer, so it gets the relay's frames and its end.

    Args:
        peer: Peer of the relay, which is constructed.
        number: number of the path.

    Attributes:
        ended: True after the end of the path.
    """

    anywhere = False  # the loop handles what the relay sends

    def __init__(self, peer: RelayPeer, number: int) -> None:
        self.ended = False
        self._peer = peer
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._routes = itertools.count(1)
        self._links: dict[bytes, RelayLink] = {}
        self._lock = threading.Lock()  # held while messages are taken from the queue and sent
        self._out: collections.deque[tuple[RelayLink, bytes, Sequence[Buffer]]] = collections.deque()
        self._opened: list[frames.RelayedLink] = []
        self._closed: collections.deque[bytes] = collections.deque()
        self._flush_due = False
        self._handled = 0
        self._seen = -1  # messages that had come from the relay when it was last looked at
        self._silent_since = 0.0
        self._asked_at = 0.0

    # --- links ---

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> RelayLink:
        """Return a link to the worker that listens at the unix socket *endpoint*. See `net.link.Network.link`."""
        route = b"%x" % next(self._routes)
        link = RelayLink(self, route, on_message, options)
        with self._lock:
            self._links[route] = link
            self._opened.append(frames.RelayedLink(route, endpoint, identity, options.to))
        return link  # its Join follows, and takes the order to the relay

    def close_link(self, link: RelayLink) -> None:
        link.on_message, link.on_reset = _drop, None
        with self._lock:
            self._write(False)  # what is queued may find no room: then `held` has it
        self._flush_now()  # other threads may have queued messages meanwhile
        if link.held and not self.ended:
            link.closing = self._loop.call_later(LINGER_S, self._unlink, link)  # `_credited` sends these before that
        else:
            self._unlink(link)

    def _unlink(self, link: RelayLink) -> None:
        if self._links.pop(link.route, None) is not None and not self.ended:
            self._closed.append(link.route)
            self._wake()

    # --- out ---

    def send(self, link: RelayLink, header: bytes, parts: Sequence[Buffer], now: bool) -> None:
        self._out.append((link, header, parts))
        if now:
            undisturbed(self._loop, self._flush_now, True)
        elif not self._flush_due:
            undisturbed(self._loop, self._wake)
        elif len(self._out) >= BATCH:
            undisturbed(self._loop, self._flush_now)

    def _wake(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._peer.soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False  # first: what is appended from now on schedules another flush
        self._flush_now()

    def _flush_now(self, now: bool = False) -> None:
        # if another thread has the lock, it sends our message: it looks again after it has released the lock
        while (self._out or self._closed) and self._lock.acquire(blocking=False):
            try:
                self._write(now)
            finally:
                self._lock.release()

    def _write(self, now: bool) -> None:
        """Send what is queued, except messages to links without room. The caller holds the lock."""
        rows: list[tuple[int, list[bytes]]] = []
        flat: list[Buffer] = []
        last_header: bytes | None = None
        last_parts: Sequence[Buffer] | None = None
        routes: list[bytes] = []
        size = each = 0
        closed = len(self._closed)  # first: what was sent on these links is in the queue by now
        out = self._out
        for _ in range(len(out)):
            link, header, parts = out.popleft()
            if link.room <= 0:
                link.held.append((header, parts))
                continue
            if header is last_header and parts is last_parts:
                routes.append(link.route)
            else:
                if size >= FULL:
                    self._post(rows, flat, 0, now)
                    rows, flat, size = [], [], 0
                each, routes = size_of(header, parts), [link.route]
                rows.append((len(parts), routes))
                flat.append(header)
                flat.extend(parts)
                size += each
                last_header, last_parts = header, parts
            link.room -= each
        self._post(rows, flat, closed, now)

    def _post(self, rows: list[tuple[int, list[bytes]]], flat: list[Buffer], closing: int, now: bool) -> None:
        opened, self._opened = self._opened, []
        closed = [self._closed.popleft() for _ in range(closing)]
        if (rows or closed or opened) and not self.ended:
            self._peer.post(frames.encode(frames.Relayed(self._number, rows, opened, closed)), flat, now=now)

    def _credited(self, route: bytes, size: int) -> None:
        link = self._links.get(route)
        if link is None:
            return
        with self._lock:
            link.room += size
            if link.room > 0 and link.held:
                # before what was queued meanwhile
                self._out.extendleft((link, header, parts) for header, parts in reversed(link.held))
                link.held.clear()
        self._flush_now()
        if link.closing is not None and not link.held:
            link.closing.cancel()
            self._unlink(link)

    # --- in: a Pending of the relay's Peer ---

    def answer(self, frame: frames.AnyFrame, parts: Sequence[Buffer]) -> bool:
        """Hand the messages of a frame of the relay to their links. Return False: more frames will come."""
        assert isinstance(frame, frames.Relayed)
        links, start, size = self._links, 0, 0
        for count, routes in frame.rows:
            header = parts[start] if start < len(parts) else b""
            own = parts[start + 1 : start + 1 + count]
            start += 1 + count
            size += size_of(header, own)
            for route in routes:
                link = links.get(route)
                if link is not None:
                    self._deliver(link, bytes(header), list(own))
        for route, credit in frame.credit:
            self._credited(route, credit)
        for route in frame.closed:
            link = links.pop(route, None)
            if link is not None and link.on_reset is not None:
                link.on_reset()
        self._handled += size
        if self._handled >= CREDIT:
            credit, self._handled = self._handled, 0
            self._peer.post(frames.encode(frames.Relayed(self._number, credit=[(b"", credit)])))
        return False

    def _deliver(self, link: RelayLink, header: bytes, parts: list[Buffer]) -> None:
        try:
            link.on_message(b"", header, parts)
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            fail = None if link.on_failed is None else functools.partial(link.on_failed, b"")
            handling_failed(self._loop, f"handling a message by {self._peer.name}", error, fail)

    # --- the end ---

    def fail(self, error: Exception) -> None:
        """End the path: no new link goes by it, and its links are reset soon. Any thread."""
        self._peer.soon(functools.partial(self._end, error))

    def _end(self, error: Exception) -> None:
        if self.ended:
            return
        self.ended = True
        if self._links:
            level = logging.INFO if isinstance(error, GroupClosedError) else logging.WARNING
            log.log(level, "the workers on %s are called without their relay from now on: %s", self._peer.node, error)
            self._loop.call_later(RESET_S, self._reset)

    def _reset(self) -> None:
        self._out.clear()
        while self._links:
            _, link = self._links.popitem()
            link.held.clear()
            if link.on_reset is not None:
                link.on_reset()

    def tend(self, now: float, stalled_s: float) -> None:
        """Ask the relay if it answers, since this process waits for a worker behind it; end the path if it does not.

        Called about once a second while this process waits. *now* is the loop's time; this process itself stood still
        for *stalled_s* of it, in which it has read nothing.
        """
        self._silent_since += stalled_s
        self._asked_at += stalled_s if self._asked_at else 0.0
        if self._peer.received != self._seen:
            self._seen, self._silent_since, self._asked_at = self._peer.received, now, 0.0
        elif not self._asked_at and now - self._silent_since > ASK_S:
            self._asked_at = now
            self._peer.post(frames.encode(frames.Relayed(self._number)), now=True)  # the relay answers it
        elif self._asked_at and now - self._asked_at > SILENT_S:
            self._end(ConnectionLostError(f"{self._peer.name} on {self._peer.node} does not answer"))


class RelayLink:
    """A link that goes by a relay. Implements `net.link.Link`.

    Attributes:
        room: bytes that may still be sent before the relay returns credit.
        held: messages that wait for room, in order.
        closing: the timer that closes this link, which waits for room to send what it holds; else None.
    """

    __slots__ = ("_path", "closing", "held", "on_failed", "on_message", "on_reset", "room", "route")

    def __init__(
        self,
        path: RelayPath,
        route: bytes,
        on_message: OnMessage,
        options: LinkOptions,
    ) -> None:
        self._path = path
        self.route = route
        self.on_message = on_message
        self.on_reset = options.on_reset
        self.on_failed = options.on_failed
        self.room = WINDOW
        self.closing: asyncio.TimerHandle | None = None
        self.held: collections.deque[tuple[bytes, Sequence[Buffer]]] = collections.deque()

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._path.send(self, header, parts, now)

    def stands(self) -> bool:
        """Return False: the head reports the end of a worker, so no link has to be asked."""
        return False

    def close(self, linger_ms: int = 0) -> None:
        """Close the link. What was sent before is passed on, if the worker takes it within LINGER_S."""
        self._path.close_link(self)


def _drop(_peer: bytes, _header: bytes, _parts: list[Buffer]) -> None:
    """Drop a message that has arrived on a closed link."""
