"""A ZeroMQ socket on an event loop: what ZmqListener and ZmqLink share. `net.message_socket` has the rules of all.

Theory of operation. Each process has one ZeroMQ context, one listener (a ROUTER) and links (DEALERs) to the listeners
of others. libzmq moves the bytes on threads of its own. High-water marks are off, because a full ROUTER drops messages
silently.

*Receiving.* libzmq's file descriptor is edge-triggered: it reports readiness once, and any call on the socket, a send
too, may consume that edge. So after every send the socket's events are read again, and each wake-up receives until
the events, or EAGAIN, say that nothing is left. `read` is the one place that receives. It receives one chunk, or up
to DRAIN if there were more the last time, then lets others go on. What handlers send leaves before the socket is
checked for more: the check may consume the edge that announces more. Links of the control plane (no `on_any_thread`)
handle SLICE messages at most in a turn, and receive no more before all are handled. The head's listener receives all
that it can, and `net.fair_inbox` decides what is handled first: so a member that floods the head delays neither the
beats of others nor SIGTERM.

*Bad input.* If the listener's TCP side is a CURVE server (`net.socket_security` decides that), every frame is judged by
the key of its connection (`net.admission`).
"""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.admission import Admission
from rlinf_actors.net.connection_watch import Disconnector, SocketMonitor
from rlinf_actors.net.fair_inbox import FairInbox
from rlinf_actors.net.framing import pack, unpack
from rlinf_actors.net.link import OnAnyThread, OnFailed, OnMessage
from rlinf_actors.net.message_socket import Messages, MessageSocket
from rlinf_actors.net.unread import Connections

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

SLICE = 256
"""Most messages of the control plane that are handled in one turn of the loop. A chunk may have 65,536 of them."""
DRAIN = 256
"""Most chunks that are received in one turn of the loop."""
FAIR = 32
"""Most chunks that the head's listener receives in one turn: its turns are short, and it has to look at each chunk."""
TURN_BYTES = 1 << 18
"""Bytes of small messages after which no further chunk is received in one turn of the loop."""
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


class Socket(MessageSocket):
    """Base of ZmqListener and ZmqLink."""

    def __init__(
        self,
        network: ZmqNetwork,
        kind: int,
        on_message: OnMessage,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
    ) -> None:
        super().__init__(network, on_message, on_failed, on_any_thread)
        self._drain_due = False
        self._next_drain: asyncio.Handle | None = None
        self._many = False  # more was left after the last drain
        self._arrived: collections.deque[tuple[bytes, bytes, list[Buffer]]] = collections.deque()  # not handled yet
        self._fair: FairInbox | None = None  # instead of `_arrived`, for the head's listener
        self._connections: Connections | None = None
        self._by_unix = False  # the last frame came by a unix socket
        self._admission: Admission | None = None
        self._disconnector: Disconnector | None = None
        self._monitor: SocketMonitor | None = None
        self._routed = kind == zmq.ROUTER
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
        if self._on_any_thread is not None:
            self._network.reading.add(self._fd, self.read)
            self._network.reading.again(self.read)
            return
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    # --- out ---

    def _after_send(self) -> Callable[[], None] | None:
        if self._drain_due or not self._readable():
            return None
        self._drain_due = True  # our send may have consumed the edge that announced these
        return self._read_again

    def _read_again(self) -> None:
        """Have `read` called soon, although libzmq's descriptor may not announce what can be received. Any thread."""
        if self._on_any_thread is not None:
            self._network.reading.again(self.read)
        else:
            self._wake(self._drain)

    def _readable(self) -> bool:
        """Return True if a message can be received now. The caller holds the socket's lock.

        If the result is False, libzmq's descriptor becomes readable with the next message.
        """
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _flush(self) -> None:
        self._flush_due = False
        with self._lock:
            self._write_queued()
            if self._closed or self._drain_due or not self._readable():
                return
            self._drain_due = True
        self._read_again()

    def _write(self, peer: bytes, messages: Messages) -> None:
        socket, connections = self._socket, self._connections
        sent = 0
        if connections is not None and connections.refuses(peer):
            return
        try:
            while sent < len(messages):
                chunk, big, sent = pack(messages, sent)
                if connections is not None:
                    connections.sent(peer, len(chunk))
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
            self._unreachable(peer, messages)

    # --- in ---

    def _drain(self) -> None:
        if self._next_drain is not None:
            self._next_drain.cancel()  # in a flood each edge would add another call to every turn of the loop
            self._next_drain = None
        if self.read(True) and not self._drain_due:
            self._drain_due = True
            self._next_drain = self._loop.call_soon(self._drain)

    def read(self, on_loop: bool) -> bool:
        """Receive and handle messages. Return True if more can be received. Only on the thread whose turn it is.

        *on_loop*: True on the loop's thread.
        """
        thread = threading.get_ident()
        if on_loop:
            self._thread = thread
        chunks = []
        with self._lock:
            self._drain_due = False
            if self._closed:
                return False
            try:
                size = 0
                for _ in range(0 if self._arrived else 1 if not self._many else DRAIN if self._fair is None else FAIR):
                    chunks.append(self._receive())
                    size += len(chunks[-1][1])
                    if size >= TURN_BYTES and self._fair is None:
                        break
            except zmq.Again:
                pass
        self._delivering = thread
        try:
            for chunk in chunks:
                self._judge(*chunk)
            arrived = min(len(self._arrived), SLICE)
            for _ in range(arrived):
                self._handle_here(*self._arrived.popleft())
            if self._fair is not None:
                arrived = self._fair.waits
                self._fair.serve(self._handle_here, self._warn)
            if self.on_drained is not None and (chunks or arrived):
                self.on_drained()
        finally:
            self._delivering = 0
        with self._lock:
            if self._flush_due:
                self._flush_due = False
                self._write_queued()
            if self._closed:
                return False
            self._many = self._readable()
            return self._many or bool(self._arrived) or (self._fair is not None and self._fair.busy)

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

    def _judge(self, peer: bytes, first: zmq.Frame, big: list[Buffer]) -> None:
        key = ""
        if self._admission is not None:
            key = self._key_of(first)
            if not self._admission.admits(peer, key):
                if self._disconnector is not None:
                    self._disconnector.soon(peer, first)
                return
            self._admission.note(peer, _address_of, first)
        if self._on_any_thread is not None:
            self._deliver(peer, first.bytes, big)
            return
        try:
            if self._fair is not None:
                self._fair.add(peer, key, first, big)
                return
            messages = unpack(first.bytes, big)
        except RemoteWireError as error:
            self._warn(peer, error)
            return
        self._arrived.extend((peer, header, parts) for header, parts in messages)

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

    def close(self, linger_ms: int = 0) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True
            if self._on_any_thread is not None:
                self._network.reading.remove(self._fd)
            else:
                self._loop.remove_reader(self._fd)
            if self._monitor is not None:
                self._monitor.close()
            if self._disconnector is not None:
                self._disconnector.stop()
            if self._connections is not None:
                self._connections.close_all()
            self._socket.close(linger=linger_ms)
        self._network._sockets.discard(self)


def _address_of(frame: zmq.Frame) -> str:
    """Return from where a frame came, for people."""
    try:
        address = str(frame.get(_PEER_ADDRESS))
    except zmq.ZMQError:  # the sender had closed its end when libzmq asked for it
        return ""
    if not address.startswith(_UNIX):
        return address
    uid, _gid, pid = address.removeprefix(_UNIX).split(":")
    return f"uid {uid}, pid {pid}"
