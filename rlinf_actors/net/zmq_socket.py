"""What ZeroMQ listeners and links share: a socket on an event loop.

House rules:
* A socket is guarded by one lock, so that any thread may send; only the loop's thread receives.
  Queueing takes no lock: deque.append is atomic, and the flush clears its flag before it looks.
* The socket's FD is edge-triggered, and any call on the socket may eat the edge: after every send
  the events are read again, and every wake-up receives until they, or EAGAIN, say that there is nothing
  left. `_drain` is the one place.
* High-water marks are off (a full ROUTER drops without a word); memory is bounded above, by credits.
* What is queued for a peer leaves as one chunk (`net.framing`).
* Where a listener's TCP side is a CURVE server (`net.socket_security` decides), each frame is judged by its key.
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
from rlinf_actors.net.authentication import Handshakes
from rlinf_actors.net.connection_watch import HangUps
from rlinf_actors.net.framing import pack, unpack
from rlinf_actors.net.link import OnFailed, OnMessage, peer_name
from rlinf_actors.net.log_throttle import LogThrottle
from rlinf_actors.net.loop import call_threadsafe, handling_failed

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN = 256
"""Messages taken from a socket before other callbacks of the loop get a turn."""

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of this machine's memory: no frame can be longer. A tensor is one frame, so there is no lower limit."""

# plain ints: pyzmq's enums cost as much as the calls they are given to
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_USER_ID = b"User-Id"
_PEER_ADDRESS = b"Peer-Address"
_UNIX = "localhost:"
"""How libzmq's address of a peer at a unix socket begins, before its uid, gid and pid; of others it is a number."""


class Socket:
    """What a listener and a link share: the lock, the outgoing queues, the drain."""

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
        self._many = False
        self._by_unix = False
        self._delivering = False
        self._closed = False
        self._malformed = LogThrottle()
        self.on_unreachable: Callable[[bytes], None] | None = None
        self._admission: Admission | None = None
        self._hang_ups: HangUps | None = None
        self._handshakes: Handshakes | None = None
        self._routed = kind == zmq.ROUTER
        self._thread = 0
        self._socket: zmq.Socket[bytes] = network._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER drops without a word; we bound above
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MEMORY)  # what says that it is longer ends the connection
        # A machine that vanished without a word leaves a connection that is open for ever. But no heartbeats of ZeroMQ
        # and no TCP_USER_TIMEOUT: those end the connection of a process that is stopped, and lose what was under way.
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

    def _send(self, peer: bytes, header: bytes, parts: Sequence[Buffer], now: bool) -> None:
        if self._network.forked:
            return  # the sockets are the parent's
        if now and not self._out and self._lock.acquire(blocking=False):
            try:
                if self._closed:
                    return
                self._write(peer, [(header, parts)])
                if self._drain_due or not self._readable():
                    return
                self._drain_due = True  # our send may have eaten the edge that announced these
            finally:
                self._lock.release()
            self._wake(self._drain)
            return
        self._out.append((peer, header, parts))
        if not self._flush_due:
            self._flush_due = True
            if not (self._delivering and threading.get_ident() == self._thread):
                self._wake(self._flush)

    def _readable(self) -> bool:
        """Whether there is something to receive; if not, the socket's FD will say when there is. With the lock held."""
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
        """Send what is queued, one chunk per peer. Called with the lock held."""
        out = self._out
        if self._closed or not out:
            return
        if not self._routed:
            self._write(b"", [(header, parts) for _, header, parts in _all(out)])
            return
        queues: dict[bytes, list[tuple[bytes, Sequence[Buffer]]]] = {}
        for peer, header, parts in _all(out):
            queues.setdefault(peer, []).append((header, parts))
        for peer, records in queues.items():
            self._write(peer, records)

    def _write(self, peer: bytes, records: list[tuple[bytes, Sequence[Buffer]]]) -> None:
        """Send one chunk, or as many as it takes. Called with the lock held."""
        socket = self._socket
        sent = 0
        try:
            while sent < len(records):
                chunk, big, sent = pack(records, sent)
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
            log.debug("dropped %d messages to %r, which is not connected", len(records), peer_name(peer))
            if self.on_unreachable is not None:
                self._loop.call_soon_threadsafe(self.on_unreachable, peer)

    # --- in ---

    def _drain(self) -> None:
        """Receive one chunk, or if there were more the last time, up to DRAIN; then others get a turn.

        Delivers after the last receive: whoever is woken by a message and answers at once finds the lock free.
        What is sent while that goes on leaves at its end, in one chunk for each peer. Only then is looked what else
        there is: whoever asked waits for the answer, and the look may eat the edge that announces more.
        """
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
        peer = receive(_NOBLOCK) if self._routed else b""  # a ROUTER puts it before every message
        frame = receive(_NOBLOCK, copy=False)
        first = frame
        big: list[Buffer] = []
        while frame.more:
            frame = receive(_NOBLOCK, copy=False)
            big.append(frame.buffer)
        return peer, first, big

    def _deliver(self, peer: bytes, first: zmq.Frame, big: list[Buffer]) -> None:
        if self._admission is not None and not self._admission.admits(peer, self._key_of(first)):
            if self._hang_ups is not None:
                self._hang_ups.soon(peer, first)
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
            if faults is not None:
                one = functools.partial(self._hand_over, peer, header, parts)
                faults.carry("transport.receive", self, peer, self._name(peer), one, self._loop)
                continue
            try:
                self._on_message(peer, header, parts)
            except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
                self._failed(peer, error)  # where this process goes on, the messages behind this one belong to others

    def _failed(self, peer: bytes, error: Exception) -> None:
        fail = None if self._on_failed is None else functools.partial(self._on_failed, peer)
        handling_failed(self._loop, f"handling a message from {peer_name(peer) or self._name(peer)}", error, fail)

    def _key_of(self, frame: zmq.Frame) -> str:
        """The public key that the connection of this frame proved to have, "" on a unix socket.

        On a CURVE server's connections it is always there: our ZAP handler gives it back with each that it lets in.
        To ask for it where it is not is an exception, as slow as the rest: so after one the address is asked first.
        """
        if self._by_unix:
            try:
                if frame.get(_PEER_ADDRESS).startswith(_UNIX):
                    return ""
            except zmq.ZMQError:
                pass  # whoever sent it had closed its end when libzmq asked for its address: it has none
        try:
            key = frame.get(_USER_ID)
        except zmq.ZMQError:
            key = ""
        self._by_unix = not key
        return key

    # --- with faults ---

    def _send_with_faults(self, peer: bytes, header: bytes, parts: Sequence[Buffer], now: bool) -> None:
        one = functools.partial(self._send, peer, header, parts, now)
        faults = fault_injection.active
        if faults is None:
            one()  # another thread has just ended the last of them
        else:
            faults.carry("transport.send", self, peer, self._name(peer), one, self._loop)

    def _hand_over(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        """What may come late is no part of a loop over messages."""
        if self._closed:
            return
        try:
            self._on_message(peer, header, parts)
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            self._failed(peer, error)

    def _name(self, peer: bytes) -> str:
        """What rules of fault points call the other end."""
        return peer.decode(errors="replace")

    def close(self, linger_ms: int = 0) -> None:
        """See net.link."""
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True
            self._loop.remove_reader(self._fd)
            if self._handshakes is not None:
                self._handshakes.close()
            if self._hang_ups is not None:
                self._hang_ups.close()
            self._socket.close(linger=linger_ms)
        self._network._sockets.discard(self)


def _all(queue: collections.deque[T]) -> Iterator[T]:
    """Take everything that is in *queue* now; others may append meanwhile."""
    for _ in range(len(queue)):
        yield queue.popleft()
