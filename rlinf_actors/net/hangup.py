"""Ending the connection of one peer, which libzmq has no call for: its socket is shut down below it.

A frame names the descriptor that it was read from; see net.borrowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import zmq

from rlinf_actors.net.borrowed import borrow

GRACE_S = 1.0
"""How long a peer may still read what was sent to it: why it is thrown out, above all."""
_SOURCE = int(zmq.SRCFD)


class HangUps:
    """The connections of one listener that are about to end. Loop thread only.

    Args:
        loop: the loop that waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[bytes, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self.ports: set[int] = set()

    def soon(self, peer: bytes, frame: zmq.Frame) -> None:
        """End the connection that this frame came by, GRACE_S seconds from now.

        Args:
            peer: its identity; one connection of each waits at a time.
            frame: the frame.
        """
        if peer not in self._waiting:
            connection = self._connection(frame)
            if connection is not None:
                self._waiting[peer] = connection, self._loop.call_later(GRACE_S, self._now, peer)

    def close(self) -> None:
        """Leave the rest to the listener's end. Twice is fine."""
        while self._waiting:
            connection, timer = self._waiting.popitem()[1]
            timer.cancel()
            connection.close()

    def _connection(self, frame: zmq.Frame) -> socket.socket | None:
        borrowed = borrow(int(frame.get(_SOURCE)), self.ports)  # every frame of a connection has one
        if borrowed is None:
            return None
        connection, (host, _) = borrowed
        if host == str(frame.get("Peer-Address")):
            return connection
        connection.close()
        return None

    def _now(self, peer: bytes) -> None:
        connection, _ = self._waiting.pop(peer)
        with connection, contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)
