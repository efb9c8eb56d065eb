"""Relay: passes messages between processes on other machines and the workers of its node, unread.

Theory of operation. A caller (`net.relay_path`) sends one frame with messages for many workers. For each link that it
opens, the relay connects to the worker's unix stream with the identity of the caller's link. So the worker sees the
caller itself: it accepts the caller's Join, and knows nothing of the relay. What the workers send is collected for one
turn of the loop, and leaves as one frame.

The relay decodes no header of a message that it passes on, and no user code runs in its process. It connects only to
sockets in the directory of its own.

*Bounds.* For what a worker has taken, the caller gets credit; `net.relay_path` has the window. A caller has at most
WINDOW bytes of answers on their way; beyond that, the relay reads no more from the workers for this caller until the
caller has returned credit, and the workers keep what they have to say.

Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.link import Link, LinkOptions, Network
from rlinf_actors.net.relay_path import CREDIT, LINGER_S, size_of
from rlinf_actors.net.unix_stream import StreamLink
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

WINDOW = 32 << 20
"""Bytes of answers that may be on their way to one caller."""
EQUAL = 4096
"""Bytes below which an answer is compared with the one before it."""

Send = Callable[[bytes, frames.AnyFrame, Sequence[Buffer]], object]


class Relay:
    """The callers of this relay.

    Args:
        network: makes the links to workers.
        folder: directory of the unix sockets of the node's workers.
        send: sends a frame to a caller.
    """

    def __init__(self, network: Network, folder: str, send: Send) -> None:
        self._network = network
        self._folder = folder
        self._send = send
        self._callers: dict[bytes, _Caller] = {}

    def handle(self, peer: bytes, frame: frames.Relayed, parts: Sequence[Buffer]) -> None:
        """Pass on the messages of a caller's frame. An empty frame asks if this relay answers."""
        caller = self._callers.get(peer)
        if caller is None or caller.id != frame.id:
            self.forget(peer)
            caller = self._callers[peer] = _Caller(frame.id, partial(self._send, peer))
        for opened in frame.opened:
            caller.open(opened.route, partial(self._link, opened))
        caller.pass_on(frame, parts)

    def _link(self, opened: frames.RelayedLink, caller: _Caller) -> Link:
        scheme, _, path = opened.endpoint.partition("://")
        if scheme != "ipc" or os.path.dirname(path) != self._folder:
            raise RlinfActorsError(f"{opened.endpoint} is not a socket of this node's workers")
        route, interrupted = opened.route, partial(caller.interrupted, opened.route)
        return self._network.link(
            opened.endpoint, opened.identity, lambda _, header, parts: caller.arrived(route, header, parts),
            LinkOptions(to=opened.to, on_reset=interrupted, on_rejected=lambda *_: interrupted()),
        )  # fmt: skip

    def forget(self, peer: bytes, _worker: str = "") -> None:
        """Close the links of a caller that is gone, or whose connection was lost."""
        caller = self._callers.pop(peer, None)
        if caller is not None:
            caller.close()


class _Caller:
    """The links of one caller, by route."""

    def __init__(self, id: int, send: Callable[[frames.AnyFrame, Sequence[Buffer]], object]) -> None:
        self.id = id
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._links: dict[bytes, Link] = {}
        self._owed: dict[bytes, int] = {}  # bytes for which the caller has got no credit, by route
        self._rows: list[tuple[int, list[bytes]]] = []
        self._parts: list[Buffer] = []
        self._last = 0  # where the last message begins in `_parts`
        self._interrupted: list[bytes] = []
        self._credit: list[tuple[bytes, int]] = []
        self._size = 0
        self._under_way = 0
        self._paused = False
        self._flush_due = False

    # --- to the workers ---

    def open(self, route: bytes, make: Callable[[_Caller], Link]) -> None:
        try:
            link = make(self)
        except (OSError, RlinfActorsError) as error:
            log.warning("a link is not opened: %s", error)
            self.interrupted(route)
            return
        self._links[route], self._owed[route] = link, 0
        if isinstance(link, StreamLink):
            link.on_sent = partial(self._sent, route)
            if self._paused:
                link.read(False)

    def pass_on(self, frame: frames.Relayed, parts: Sequence[Buffer]) -> None:
        start = 0
        for count, routes in frame.rows:
            header = bytes(parts[start]) if start < len(parts) else b""
            own = parts[start + 1 : start + 1 + count]
            start += 1 + count
            size = size_of(header, own)
            for route in routes:
                link = self._links.get(route)
                if link is not None:
                    link.send(header, own, now=True)
                    self._owed[route] += size
                    if self._owed[route] >= CREDIT:
                        self._sent(route)
        for route in frame.closed:
            self._drop(route)
        for _, size in frame.credit:
            self._under_way -= size
        if self._paused and self._under_way < WINDOW:
            self._pause(False)
        if not (frame.rows or frame.opened or frame.closed or frame.credit):
            self._soon()  # the caller asks if this relay answers

    def _sent(self, route: bytes) -> None:
        """Return credit for what a worker has taken."""
        link = self._links.get(route)
        owed = self._owed.get(route, 0)
        if link is not None and owed and not (isinstance(link, StreamLink) and link.unsent):
            self._owed[route] = 0
            self._credit.append((route, owed))
            self._soon()

    # --- to the caller ---

    def arrived(self, route: bytes, header: bytes, parts: list[Buffer]) -> None:
        size = size_of(header, parts)
        if self._rows and size < EQUAL and len(parts) < 2 and [header, *parts] == self._parts[self._last :]:
            self._rows[-1][1].append(route)  # the same answer, such as None: once in the frame. It has no buffers
            return
        self._last = len(self._parts)
        self._rows.append((len(parts), [route]))
        self._parts.append(header)
        self._parts.extend(parts)
        self._size += size
        self._soon()

    def interrupted(self, route: bytes) -> None:
        """Tell the caller that messages of a link may be lost, and drop the link."""
        self._drop(route)
        self._interrupted.append(route)
        self._soon()

    def _soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        frame = frames.Relayed(self.id, self._rows, [], self._interrupted, self._credit)
        parts, self._parts, self._rows, self._interrupted, self._credit = self._parts, [], [], [], []
        self._under_way += self._size
        self._size = 0
        self._send(frame, parts)
        if self._under_way >= WINDOW and not self._paused:
            self._pause(True)

    def _pause(self, on: bool) -> None:
        self._paused = on
        for link in self._links.values():
            if isinstance(link, StreamLink):
                link.read(not on)

    # --- ends ---

    def _drop(self, route: bytes) -> None:
        link = self._links.pop(route, None)
        self._owed.pop(route, None)
        if link is not None:
            self._close_when_taken(link)

    def _close_when_taken(self, link: Link) -> None:
        """Close a link when its worker has taken what was sent before, or has not within LINGER_S."""
        if not isinstance(link, StreamLink):
            link.close(int(LINGER_S * 1e3))
        elif not link.unsent:
            link.close()
        else:
            link.read(False)
            late = self._loop.call_later(LINGER_S, link.close)

            def sent() -> None:
                late.cancel()
                link.close()

            link.on_sent = sent

    def close(self) -> None:
        for route in list(self._links):
            self._drop(route)
        self._flush_due = True  # and no more is sent
