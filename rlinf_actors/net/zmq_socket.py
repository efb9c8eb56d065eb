"""A ZeroMQ socket on an event loop: what listeners and links share.

Theory of operation. Each process has one ZeroMQ context, one listener (a ROUTER) and links (DEALERs) to the listeners
of others. libzmq moves the bytes on threads of its own. A socket of ours belongs to one event loop, whose thread alone
receives; any thread may send. A lock guards the libzmq socket. Queueing a message takes no lock: deque.append is
atomic, and a flush clears its flag before it empties the queue, so a message that is appended meanwhile is either sent
by this flush or schedules another.

*Sending.* A message is a header and parts. Messages that are queued for a peer while the loop is busy leave as one
chunk (`net.framing`): a small message costs a tenth of a ZeroMQ message of its own. `now=True` sends on the calling
thread if nothing is queued before it, which saves the wake-up of the loop's thread for a caller that waits for the
answer. High-water marks are off, because a full ROUTER drops messages silently; the layers above bound memory by
credits. A peer that is not connected is reported (`on_unreachable`), not an error: the head decides who is gone.

*Receiving.* libzmq's file descriptor is edge-triggered: it reports readiness once, and any call on the socket, a send
too, may consume that edge. So after every send the socket's events are read again, and each wake-up receives until
the events, or EAGAIN, say that nothing is left. `_drain` is the one place that receives. It receives one chunk, or up
to DRAIN if there were more the last time, then lets other callbacks of the loop run. It handles messages after it has
released the lock, so a handler may send at once. What handlers send leaves when they have all returned, in one chunk
for each peer, and only then the socket is checked for more: a caller waits for that answer, and the check may consume
the edge that announces more.

*Bad input.* Bytes that are no chunk are dropped, with a throttled warning. If the listener's TCP side is a CURVE
server (`net.socket_security` decides that), every frame is judged by the key of its connection (`net.admission`). A
handler that raises is a bug of ours, which `net.loop.handling_failed` turns over to the process's policy; the messages
behind it in the chunk belong to others and are still handled.

A socket must never be used in a forked child: its threads are the parent's.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import zmq

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.admission import Admission
from rlinf_actors.net.connection_watch import Disconnector, SocketMonitor
from rlinf_actors.net.framing import pack, unpack
from rlinf_actors.net.link import LogThrottle, OnFailed, OnMessage, peer_name
from rlinf_actors.net.loop import call_threadsafe, handling_failed

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN = 256
"""Most chunks that are received in one turn of the loop."""
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Most bytes of a frame: the memory of this machine. A tensor is one frame, so the limit cannot be lower."""

# plain ints: pyzmq's enums cost as much as the calls they are passed to
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_USER_ID = b"User-Id"
_PEER_ADDRESS = b"Peer-Address"
_UNIX = "localhost:"  # libzmq's address of a peer at a unix socket begins so, before uid, gid and pid


class Socket:
    """Base of ZmqListener and ZmqLink: a ZeroMQ socket with a lock and a queue of outgoing messages."""

    def __init__(
        self, network: ZmqNetwork, kind: int, on_message: OnMessage, on_failed: OnFailed | None = None
    ) -> None:
        self._network = network
        self._loop = network._loop
        self._on_message = on_message
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._out: collections.deque[tuple[bytes, bytes, Sequence[Buffer]]] = collections.deque()
        self._flush_due = False
        self._drain_due = False
        self._many = False  # more was left after the last drain
        self._by_unix = False  # the last frame came by a unix socket
        self._delivering = False
        self._closed = False
        self._malformed = LogThrottle()
        self.on_unreachable: Callable[[bytes], None] | None = None
        self._admission: Admission | None = None
        self._disconnector: Disconnector | None = None
        self._monitor: SocketMonitor | None = None
        self._routed = kind == zmq.ROUTER
        self._thread = 0
        self._socket: zmq.Socket[bytes] = network._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER drops silently; memory is bounded by credits above
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MEMORY)  # a longer frame ends its connection
        # A machine that vanishes leaves a connection that stays open for ever. But no heartbeats of ZeroMQ and no
        # TCP_USER_TIMEOUT: those also end the connection of a stopped process, and lose what is in flight.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)  # seconds
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        network._sockets.add(self)

    def _start(self) -> None:
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    # --- out ---

    def _send(self, peer: bytes, header: bytes, parts: Sequence[Buffer], now: bool, faulty: bool = True) -> None:
        faults = fault_injection.active
        if faulty and faults is not None:
            send = functools.partial(self._send, peer, header, parts, now, faulty=False)
            faults.carry("transport.send", self, peer, self._name(peer), send, self._loop)
            return
        if self._network.forked:
            return
        if now and not self._out and self._lock.acquire(blocking=False):
            try:
                if self._closed:
                    return
                self._write(peer, [(header, parts)])
                if self._drain_due or not self._readable():
                    return
                self._drain_due = True  # our send may have consumed the edge that announced these
            finally:
                self._lock.release()
            self._wake(self._drain)
            return
        self._out.append((peer, header, parts))
        if not self._flush_due:
            self._flush_due = True
            if not (self._delivering and threading.get_ident() == self._thread):  # else `_drain` flushes
                self._wake(self._flush)

    def _readable(self) -> bool:
        """Return True if a message can be received now. The caller holds the socket's lock.

        If the result is False, libzmq's descriptor becomes readable with the next message.
        """
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _wake(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_soon(callback)
        else:
            call_threadsafe(self._loop, callback)

    def _flush(self) -> None:
        self._flush_due = False
        with self._lock:
            self._write_queued()
            if self._closed or self._drain_due or not self._readable():
                return
        self._drain()

    def _write_queued(self) -> None:
        """Send all queued messages: those for one peer in one chunk. The caller holds the socket's lock."""
        out = self._out
        if self._closed or not out:
            return
        if not self._routed:
            self._write(b"", [(header, parts) for _, header, parts in _take_all(out)])
            return
        queues: dict[bytes, list[tuple[bytes, Sequence[Buffer]]]] = {}
        for peer, header, parts in _take_all(out):
            queues.setdefault(peer, []).append((header, parts))
        for peer, messages in queues.items():
            self._write(peer, messages)

    def _write(self, peer: bytes, messages: list[tuple[bytes, Sequence[Buffer]]]) -> None:
        """Send messages to one peer in as few chunks as possible. The caller holds the socket's lock.

        If the peer is not connected, drop the messages and call `on_unreachable`.
        """
        socket = self._socket
        sent = 0
        try:
            while sent < len(messages):
                chunk, big, sent = pack(messages, sent)
                if self._routed:
                    socket.send(peer, _MORE)
                if not big:
                    socket.send(chunk, _NOBLOCK)
                    continue
                socket.send(chunk, _MORE)
                last = len(big) - 1
                for n, part in enumerate(big):
                    socket.send(part, _MORE if n < last else _NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.debug("dropped %d messages to %r, which is not connected", len(messages), peer_name(peer))
            if self.on_unreachable is not None:
                self._loop.call_soon_threadsafe(self.on_unreachable, peer)

    # --- in ---

    def _drain(self) -> None:
        self._thread = threading.get_ident()
        chunks = []
        with self._lock:
            self._drain_due = False
            if self._closed:
                return
            try:
                for _ in range(DRAIN if self._many else 1):
                    chunks.append(self._receive())
            except zmq.Again:
                pass
        self._delivering = True
        try:
            for chunk in chunks:
                self._deliver(*chunk)
        finally:
            self._delivering = False
        with self._lock:
            if self._flush_due:
                self._flush_due = False
                self._write_queued()
            if self._closed:
                return
            self._many = self._readable()
            if not self._many or self._drain_due:
                return
            self._drain_due = True
        self._loop.call_soon(self._drain)

    def _receive(self) -> tuple[bytes, zmq.Frame, list[Buffer]]:
        receive = self._socket.recv
        peer = receive(_NOBLOCK) if self._routed else b""  # a ROUTER puts the identity before every message
        frame = receive(_NOBLOCK, copy=False)
        first = frame
        big: list[Buffer] = []
        while frame.more:
            frame = receive(_NOBLOCK, copy=False)
            big.append(frame.buffer)
        return peer, first, big

    def _deliver(self, peer: bytes, first: zmq.Frame, big: list[Buffer]) -> None:
        if self._admission is not None and not self._admission.admits(peer, self._key_of(first)):
            if self._disconnector is not None:
                self._disconnector.soon(peer, first)
            return
        try:
            messages = unpack(first.bytes, big)
        except RemoteWireError as error:
            if self._malformed.note():
                log.warning(
                    "dropped what %.40r sent (%d times by now): %s", peer_name(peer), self._malformed.count, error
                )
            return
        for header, parts in messages:
            faults = fault_injection.active
            if faults is None:
                try:
                    self._on_message(peer, header, parts)
                except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
                    self._failed(peer, error)
            else:
                deliver = functools.partial(self._deliver_late, peer, header, parts)
                faults.carry("transport.receive", self, peer, self._name(peer), deliver, self._loop)

    def _deliver_late(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if self._closed:
            return
        try:
            self._on_message(peer, header, parts)
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            self._failed(peer, error)

    def _failed(self, peer: bytes, error: Exception) -> None:
        fail = None if self._on_failed is None else functools.partial(self._on_failed, peer)
        handling_failed(self._loop, f"handling a message from {peer_name(peer) or self._name(peer)}", error, fail)

    def _key_of(self, frame: zmq.Frame) -> str:
        """Return the public key that a received frame's connection has proved, "" for a unix socket.

        Every connection to a CURVE server has a key: our ZAP handler returns it when it admits the connection. To read
        the key of a frame that has none raises an exception, which doubles the cost of handling the frame. So after a
        frame from a unix socket, the address of the next frame is read before its key.
        """
        if self._by_unix:
            try:
                if frame.get(_PEER_ADDRESS).startswith(_UNIX):
                    return ""
            except zmq.ZMQError:
                pass  # no address: the sender had closed its end when libzmq asked for it
        try:
            key = frame.get(_USER_ID)
        except zmq.ZMQError:
            key = ""
        self._by_unix = not key
        return key

    def _name(self, peer: bytes) -> str:
        return peer.decode(errors="replace")

    def close(self, linger_ms: int = 0) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True
            self._loop.remove_reader(self._fd)
            if self._monitor is not None:
                self._monitor.close()
            if self._disconnector is not None:
                self._disconnector.close()
            self._socket.close(linger=linger_ms)
        self._network._sockets.discard(self)


def _take_all(queue: collections.deque[T]) -> Iterator[T]:
    # as many as there are now: other threads may append meanwhile
    for _ in range(len(queue)):
        yield queue.popleft()
