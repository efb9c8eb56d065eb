"""A worker's socket to its template, and through it to its agentd."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.unix_sockets import PacketQueue
from rlinf_actors.wire import template_protocol

log = logging.getLogger(__name__)

P = TypeVar("P", bound=template_protocol.ToWorker)

_MAX_PACKET = template_protocol.MAX_PACKET >> 4


class TemplateSocket:
    """The socket.

    Args:
        sock: SOCK_SEQPACKET, blocking.
        on_end: called on the I/O thread when the template closes its end, or has ended.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[], None]) -> None:
        self._socket = sock
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers: dict[type, Callable[[template_protocol.ToWorker], object]] = {}
        self._lock = threading.Lock()
        self._posted = PacketQueue(sock)

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def listen(self, loop: asyncio.AbstractEventLoop, *, guarded: bool = False) -> None:
        """Take what the template says from now on. I/O thread.

        Args:
            loop: of the I/O thread.
            guarded: a robot worker's guard receives, and hands over what is not for it.
        """
        self._loop = loop
        if not guarded:
            loop.add_reader(self._socket.fileno(), self._readable)

    def receive(self) -> template_protocol.ToWorker | None:
        """Wait for a packet; None when the template has ended. The guard's thread.

        Raises:
            RemoteWireError: it is none.
        """
        try:
            data = self._socket.recv(_MAX_PACKET)
        except OSError:
            data = b""
        return template_protocol.decode_to_worker(data) if data else None

    def hand_over(self, packet: template_protocol.ToWorker) -> None:
        """A packet that is not for the guard. Its thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._dispatch, packet)

    def try_send(self, packet: template_protocol.ToAgent) -> bool:
        """Tell the template, unless it has ended or does not read; False then. Any thread; does not wait."""
        try:
            self._socket.send(template_protocol.encode(packet), socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def serve(self, kind: type[P], handler: Callable[[P], object]) -> None:
        """Give packets of this kind to *handler*, on the I/O thread. Any thread."""
        self._handlers[kind] = handler  # type: ignore[assignment]

    def send(self, packet: template_protocol.ToAgent) -> None:
        """Tell the template. Any thread; waits only while hundreds of packets are unread there.

        To a template that has ended it does nothing: this process is about to end too.
        """
        try:
            self._socket.send(template_protocol.encode(packet))
        except ConnectionError:
            log.debug("the template has ended")

    def post(self, packet: template_protocol.ToAgent) -> None:
        """Tell the template, after what was posted before. Any thread, an event loop's too; does not wait.

        What the template does not read now is sent by the I/O thread when it does. After `listen`.
        """
        with self._lock:
            idle = not self._posted
            if not self._posted.send(template_protocol.encode(packet)) and idle:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._loop.add_writer, self.fileno(), self._writable)

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
            self._on_end()
            return
        try:
            packet = template_protocol.decode_to_worker(data)
        except RemoteWireError as error:
            log.warning("dropped what the template said: %s", error)
            return
        self._dispatch(packet)

    def _dispatch(self, packet: template_protocol.ToWorker) -> None:
        handler = self._handlers.get(type(packet))
        if handler is not None:
            handler(packet)
