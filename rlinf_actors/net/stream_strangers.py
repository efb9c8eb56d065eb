"""The connections of a StreamListener whose peers have not joined: few at a time, and each for a short time only.

Any process of this user may connect. One that never says HELLO, or never joins, must not hold descriptors of a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlinf_actors.net.stream_connection import StreamConnection

HANDSHAKE_S = 5.0
"""Seconds that a peer has to join."""
STANDSTILL_S = 0.5
"""If the loop looks so many seconds late, it or the process has stood still, and all have HANDSHAKE_S again."""
PENDING = 256
"""Most connections whose peers have not joined. A further one replaces the oldest."""


class Strangers:
    """Ends connections whose peers do not join. Loop thread; `joined` and `discard` any thread.

    *end* closes a connection; it calls `discard`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[StreamConnection], object]) -> None:
        self._loop = loop
        self._end = end
        self._deadlines: dict[StreamConnection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: StreamConnection) -> None:
        self._deadlines[connection] = self._loop.time() + HANDSHAKE_S
        if len(self._deadlines) > PENDING:
            self._end(next(iter(list(self._deadlines))))
        if self._timer is None:
            self._timer = self._loop.call_later(HANDSHAKE_S, self._look)

    def joined(self, connection: StreamConnection, most: int) -> None:
        """Let *connection* stay, and accept chunks of *most* bytes."""
        connection.joined, connection.reader.most = True, most
        self.discard(connection)

    def discard(self, connection: StreamConnection) -> None:
        self._deadlines.pop(connection, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """End the connections whose deadline has passed, and come back for the others."""
        self._timer, now = None, self._loop.time()
        waiting = [row for row in list(self._deadlines.items()) if not row[0].joined]
        if waiting and now - waiting[0][1] > STANDSTILL_S:  # a Join may have come meanwhile
            waiting = [(connection, now + HANDSHAKE_S) for connection, _ in waiting]
        self._deadlines = dict(waiting)
        for connection, deadline in waiting:
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._look)
                return
            self._end(connection)
