"""Calls whose large arguments come once to a node, for all ranks there: how a worker waits for them and passes them on.

A caller on another machine sends the large parts of a group call to one worker of each node (ShareParts), which passes
them on in shared memory (SharedParts). Each rank gets its own SharedCall directly from the caller, so calls keep their
numbers, their order and their callers, and a worker that passes parts on runs no call for others. Until the parts are
there, frames of the same link wait behind the SharedCall, as they would behind a call with its parts.

If the parts do not come, because the other worker has ended or stands still, this worker asks the caller for them
(WantParts), which sends them directly. Parts that come twice are dropped. Loop thread only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_actors import procfs
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.remote_peers import client_of

if TYPE_CHECKING:
    from rlinf_actors.runtime.runtime import Runtime

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""Seconds after which a worker asks the caller for the parts of a call."""
EARLY = 16
"""Most calls whose parts are kept before the call itself has arrived. The caller is asked again for others."""

Key = tuple[str, int]
_PASS = (
    frames.WhatRuns, frames.Memory, frames.Dropped, frames.Shown, frames.Opened, frames.Hidden, frames.SharedParts,
)  # fmt: skip
"""Frames that do not wait behind a SharedCall: their order does not matter."""
_Waiting = collections.deque[tuple[frames.AnyFrame, AuthenticatedParts]]


class SharedCalls:
    """The calls of a worker that wait for their large parts.

    Args:
        handle: handles a frame of a link.
        send: sends a frame to the peer at the other end of a link.

    Attributes:
        held: what waits on each link, in order; the first is a SharedCall whose parts are not there. A link is here
            until all of it is handled, so other threads leave the frames of a link that is here to the loop.
    """

    def __init__(
        self,
        handle: Callable[[bytes, frames.AnyFrame, AuthenticatedParts], object],
        send: Callable[[bytes, frames.AnyFrame], object],
    ) -> None:
        self.held: dict[bytes, _Waiting] = {}
        self._handle = handle
        self._send = send
        self._early: dict[Key, AuthenticatedParts] = {}

    def call(self, link: bytes, frame: frames.SharedCall, parts: AuthenticatedParts) -> None:
        """Run a call, now if its parts have arrived."""
        large = self._early.pop((client_of(link), frame.id), None)
        if large is not None:
            self._run(link, frame, parts, large)
            return
        self.held[link] = collections.deque([(frame, parts)])
        asyncio.get_running_loop().call_later(WAIT_S, self._want, link, frame.id)

    def defers(self, link: bytes, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Keep a frame that arrives behind a waiting call. Return False if the frame must be handled now."""
        waiting = self.held.get(link)
        if waiting is None or isinstance(frame, _PASS):
            return False
        if isinstance(frame, frames.Cancel):
            for entry in waiting:
                if isinstance(entry[0], frames.SharedCall) and entry[0].id == frame.id:
                    first = entry is waiting[0]
                    waiting.remove(entry)
                    if first:
                        self._go_on(link, waiting)
                    return True
        waiting.append((frame, parts))
        return True

    def arrived(self, link: bytes, frame: frames.SharedParts, parts: AuthenticatedParts) -> None:
        """Take the large parts of a call, from the caller itself or from a worker of this node."""
        self.take((frame.origin or client_of(link), frame.id), parts)

    def take(self, key: Key, parts: AuthenticatedParts) -> None:
        """Run the call with this caller and number if it waits for these parts; else keep them for it."""
        for link, waiting in self.held.items():
            first, _ = waiting[0]
            if isinstance(first, frames.SharedCall) and (client_of(link), first.id) == key:
                self._early[key] = parts
                self._go_on(link, waiting)
                return
        self._early[key] = parts
        if len(self._early) > EARLY:
            del self._early[next(iter(self._early))]

    def forget(self, link: bytes) -> None:
        """Forget what waits on a link whose peer is gone, and the parts that its peer has sent to others."""
        self.held.pop(link, None)
        for key in [key for key in self._early if key[0] == client_of(link)]:
            del self._early[key]

    def _run(self, link: bytes, frame: frames.SharedCall, small: AuthenticatedParts, large: AuthenticatedParts) -> None:
        call = frames.Call(frame.id, frame.method, frame.deadline_s)
        self._handle(link, call, AuthenticatedParts([*small, *large]))

    def _go_on(self, link: bytes, waiting: _Waiting) -> None:
        """Handle what waits on a link, up to the next call whose parts are not there."""
        loop = asyncio.get_running_loop()
        while waiting:
            frame, parts = waiting[0]
            try:
                if isinstance(frame, frames.SharedCall):
                    large = self._early.pop((client_of(link), frame.id), None)
                    if large is None:
                        loop.call_later(WAIT_S, self._want, link, frame.id)
                        return
                    waiting.popleft()
                    self._run(link, frame, parts, large)
                else:
                    waiting.popleft()
                    self._handle(link, frame, parts)
            except BaseException:
                loop.call_soon(self._go_on, link, waiting)  # what waits belongs to other calls
                raise
        if self.held.get(link) is waiting:
            del self.held[link]  # last: until then no other thread handles frames of this link

    def _want(self, link: bytes, id: int) -> None:
        waiting = self.held.get(link)
        if waiting is not None and getattr(waiting[0][0], "id", 0) == id:
            log.info("the arguments of call %d did not come from this node: the caller sends them", id)
            self._send(link, frames.WantParts(id))


class PartsRelay:
    """Passes the large parts of calls on to other workers of this node, in shared memory."""

    def __init__(self, runtime: Runtime, calls: SharedCalls) -> None:
        self._runtime = runtime
        self._calls = calls
        self._peers: dict[str, tuple[Peer, int]] = {}  # with pidfds, by worker id

    def handle(self, link: bytes, frame: frames.ShareParts, parts: AuthenticatedParts) -> None:
        """Pass the parts on to the workers that *frame* names, and keep them for this worker's own call."""
        origin, runtime = client_of(link), self._runtime
        message = frames.SharedParts(origin, frame.id)
        stored: list[Buffer] = []
        if frame.to:
            stored = [runtime.copy(part) for part in parts]  # once, for all
        for sibling in frame.to:
            peer = self._peer(sibling)
            if peer is not None:
                peer.send(message, stored, alone=False)
        self._calls.take((origin, frame.id), parts)

    def _peer(self, sibling: frames.Sibling) -> Peer | None:
        """Return the connection to another worker of this node, which ends with that worker's process."""
        found = self._peers.get(sibling.worker_id)
        if found is not None:
            return found[0]
        runtime = self._runtime
        try:
            fd = procfs.pidfd_of(sibling.pid)
        except OSError as error:  # it has ended, or this process has no descriptor left: the caller sends the parts
            log.debug("parts are not passed on to %s: %s", sibling.name, error)
            return None
        peer = Peer(runtime.network, runtime.identity, sibling.name, -1, "this node", me=runtime.worker_id)
        peer.worker_id = sibling.worker_id
        self._peers[sibling.worker_id] = peer, fd
        asyncio.get_running_loop().add_reader(fd, self._ended, sibling.worker_id)
        peer.connect(sibling.endpoint, runtime.host, runtime.token, lambda: None)
        return peer

    def _ended(self, worker_id: str) -> None:
        peer, fd = self._peers.pop(worker_id)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        peer.close()

    def close(self) -> None:
        """Close the connections to other workers. Loop thread; idempotent."""
        for worker_id in list(self._peers):
            with contextlib.suppress(OSError):
                self._ended(worker_id)
