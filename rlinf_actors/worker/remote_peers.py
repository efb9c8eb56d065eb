"""Notices the ends of a worker's clients on other machines, which the head reports. Everything on the I/O thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net.loop import Tasks

log = logging.getLogger(__name__)

Watch = Callable[[str, Callable[[], None]], Callable[[], None]]
"""Type of WatchedClients.watch: call a function when a client ends. Returns a function that stops watching."""

MANY = 64
"""Most remote clients without a session with the head. With more, some are probably dead: a session is opened."""


class RemotePeers:
    """Notices the ends of clients on other machines or in other containers, which the head reports.

    Args:
        watch: asks the head to report the end of a client; has an effect only during a session with the head.
        connected: opens a session with the head; raises RlinfActorsError if the head does not answer.
        on_gone: called with the identity of each link of a client that has ended.
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

    def add(self, peer: bytes, *, now: bool = False) -> None:
        """Watch the client at the other end of the link *peer*. Its end is noticed only during a session with the head.

        *now*: True to open a session with the head at once, for a stream to the client: if the client died unnoticed,
        the stream would wait for its credit for ever.
        """
        client = client_of(peer)
        links = self._links.setdefault(client, set())
        if not links:
            self._unwatch[client] = self._watch(client, lambda: self._gone(client))
        links.add(peer)
        needed = now or len(self._links) > MANY
        if needed and not self._in_session and (self._connecting is None or self._connecting.done()):
            self._connecting = self._tasks.start(self._connect(), "watching peers on other machines")

    def remove(self, peer: bytes) -> None:
        """Forget the link *peer*. Stop watching its client, unless the client has other links to this worker."""
        client = client_of(peer)
        links = self._links.get(client)
        if links is None:
            return
        links.discard(peer)
        if not links:
            del self._links[client]
            self._unwatch.pop(client)()

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
    """Return the incarnation of the client that opened the link *peer*.

    The identity of a link has the form ``role:incarnation#link``.
    """
    return peer.decode(errors="replace").partition("#")[0].rpartition(":")[2]
