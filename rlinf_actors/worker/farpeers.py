"""Ends of peers that no pidfd of ours can watch, on other machines or in other containers: the head tells them.

House rule: only who is served a stream, or has many peers, costs a session with the head; most workers never need one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.loop import Tasks

log = logging.getLogger(__name__)

Watch = Callable[[str, Callable[[], None]], Callable[[], None]]
"""runtime.watched.watch: calls back when that client has ended; returns what ends the watch."""
MANY = 64
"""Clients that have joined and whose ends no session tells: beyond these there may be dead ones, so one is made."""


class FarPeers:
    """Those whose ends we want to hear of. I/O thread.

    Args:
        watch: has the head tell us of an end, as long as there is a session with it.
        connected: makes the session; raises RlinfActorsError when the head does not answer.
        on_gone: called with each link of a client that has ended.
    """

    def __init__(
        self, watch: Watch, connected: Callable[[], Awaitable[object]], on_gone: Callable[[bytes], None]
    ) -> None:
        self._watch = watch
        self._connected = connected
        self._on_gone = on_gone
        self._links: dict[str, set[bytes]] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._tasks = Tasks()
        self._connecting: asyncio.Task[None] | None = None
        self._in_session = False

    def met(self, peer: bytes) -> None:
        """This peer has joined. Its end is told if there is a session with the head, or once there is one."""
        client = client_of(peer)
        links = self._links.setdefault(client, set())
        if not links:
            self._unwatch[client] = self._watch(client, lambda: self._gone(client))
        links.add(peer)
        if len(self._links) > MANY:
            self._need_session()

    def serve(self, peer: bytes) -> None:
        """This peer is served a stream, which would wait for its credit for ever."""
        self.met(peer)
        self._need_session()

    def ended(self, peer: bytes) -> None:
        """This peer has ended, or its link has, as something else than the head told."""
        client = client_of(peer)
        links = self._links.get(client)
        if links is None:
            return
        links.discard(peer)
        if not links:
            del self._links[client]
            self._unwatch.pop(client)()

    def _need_session(self) -> None:
        if not self._in_session and (self._connecting is None or self._connecting.done()):
            self._connecting = self._tasks.start(self._connect(), "watching peers on other machines")

    async def _connect(self) -> None:
        try:
            await self._connected()
            self._in_session = True
        except RlinfActorsError as error:
            log.warning("ends of peers on other machines are not noticed: %s", error)

    def _gone(self, client: str) -> None:
        self._unwatch.pop(client, None)
        for peer in self._links.pop(client, ()):
            self._on_gone(peer)


def client_of(peer: bytes) -> str:
    """The incarnation of the client that a link is from: ``role:incarnation#link``."""
    return peer.decode(errors="replace").partition("#")[0].rpartition(":")[2]
