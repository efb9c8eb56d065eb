"""A worker's socket to its template, and through it to its agentd."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TypeVar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire import spawn

log = logging.getLogger(__name__)

P = TypeVar("P", bound=spawn.ToWorker)

_MAX_PACKET = spawn.MAX_PACKET >> 4


class Control:
    """The socket.

    Args:
        sock: SOCK_SEQPACKET, blocking.
        on_end: called on the I/O thread when the template closes its end, or has ended.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[], None]) -> None:
        self._socket = sock
        self._on_end = on_end
        self._handlers: dict[type, Callable[[spawn.ToWorker], None]] = {}

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what the template says from now on. I/O thread."""
        loop.add_reader(self._socket.fileno(), self._readable)

    def serve(self, kind: type[P], handler: Callable[[P], None]) -> None:
        """Give packets of this kind to *handler*, on the I/O thread. Any thread."""
        self._handlers[kind] = handler  # type: ignore[assignment]

    def send(self, packet: spawn.ToAgent) -> None:
        """Tell the template. Any thread; waits only while hundreds of packets are unread there.

        To a template that has ended it does nothing: this process is about to end too.
        """
        try:
            self._socket.send(spawn.encode(packet))
        except ConnectionError:
            log.debug("the template has ended")

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_end()
            return
        try:
            packet = spawn.decode_to_worker(data)
        except RemoteWireError as error:
            log.warning("dropped what the template said: %s", error)
            return
        handler = self._handlers.get(type(packet))
        if handler is not None:
            handler(packet)
