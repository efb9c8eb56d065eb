"""A worker's socket to its template, which passes packets on to agentd and from agentd.

The I/O thread receives. Any thread sends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.loop import call_soon
from rlinf_actors.net.unix_sockets import PacketQueue
from rlinf_actors.wire import template_protocol as packets

log = logging.getLogger(__name__)

P = TypeVar("P", bound=packets.ToWorker)

_MAX_PACKET = packets.MAX_PACKET >> 4


class TemplateSocket:
    """A worker's socket to its template, which passes the packets between the worker and agentd on.

    *sock* is a blocking SOCK_SEQPACKET socket; *on_end* is called when the template has ended.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[], None]) -> None:
        self._socket = sock
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers: dict[type, Callable[[packets.ToWorker], object]] = {}
        self._lock = threading.Lock()
        self._posted = PacketQueue(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to handle packets on *loop*."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._readable)

    def try_send(self, packet: packets.ToAgent) -> bool:
        """Send a packet without waiting. Return False if the template has ended or has no room for it. Any thread."""
        try:
            self._socket.send(packets.encode(packet), socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def serve(self, kind: type[P], handler: Callable[[P], object]) -> None:
        """Call *handler* on the I/O thread for each packet of the class *kind* that arrives. Any thread."""
        self._handlers[kind] = handler  # type: ignore[assignment]

    def send(self, packet: packets.ToAgent) -> None:
        """Send a packet; wait while hundreds of packets are unread. No effect if the template has ended. Any thread."""
        try:
            self._socket.send(packets.encode(packet))
        except ConnectionError:
            log.debug("the template has ended")

    def post(self, packet: packets.ToAgent) -> None:
        """Send a packet as soon as possible, without waiting. Packets are sent in order. Any thread, after `listen`."""
        with self._lock:
            idle = not self._posted
            if not self._posted.send(packets.encode(packet)) and idle:
                assert self._loop is not None
                call_soon(self._loop, self._loop.add_writer, self.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            if self._posted.flush() and self._loop is not None:
                self._loop.remove_writer(self.fileno())

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(self._socket.fileno())
            self._on_end()
            return
        try:
            packet = packets.decode_to_worker(data)
        except RemoteWireError as error:
            log.warning("dropped a packet of the template: %s", error)
            return
        self._dispatch(packet)

    def _dispatch(self, packet: packets.ToWorker) -> None:
        handler = self._handlers.get(type(packet))
        if handler is not None:
            handler(packet)
