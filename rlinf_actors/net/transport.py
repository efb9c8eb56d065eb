"""ZeroMQ: the only module that imports zmq.

House rules:
* A socket is guarded by one lock, so that any thread may send; only the loop's thread receives.
  Queueing takes no lock: deque.append is atomic, and the flush clears its flag before it looks.
* The socket's FD is edge-triggered, and any call on the socket may eat the edge: after every send
  the events are read again, and every wake-up receives until they, or EAGAIN, say that there is nothing
  left. `_drain` is the one place.
* High-water marks are off (a full ROUTER drops without a word); memory is bounded above, by credits.
* What is queued for a peer leaves as one chunk (`net.chunks`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import zmq

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import faultpoints
from rlinf_actors.net.arena import Arena
from rlinf_actors.net.chunks import pack, unpack
from rlinf_actors.net.link import OnMessage, Sight
from rlinf_actors.net.look import look_at
from rlinf_actors.net.security import Security
from rlinf_actors.net.silence import LOOK_TIMEOUT_S
from rlinf_actors.scarce import explain

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN = 256
"""Messages taken from a socket before other callbacks of the loop get a turn."""

# plain ints: pyzmq's enums cost as much as the calls they are given to
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def start_shared_thread() -> None:
    """Start the thread that pyzmq keeps for the life of a process to free large buffers that were sent.

    It starts by itself with the first of them; who compares threads before and after wants it there before.
    """
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)


class ZmqNetwork:
    """ZeroMQ sockets on one event loop.

    Args:
        loop: the loop whose thread receives.
        security: which endpoints may be used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, security: Security | None = None) -> None:
        self._loop = loop
        self._security = security or Security()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(65536, self._context.get(zmq.SOCKET_LIMIT)))
        self._sockets: set[_Socket] = set()
        self.memory: Arena | None = None
        self.forked = False
        _networks.add(self)

    def listener(self, on_message: OnMessage, *, max_bytes: int = -1) -> ZmqListener:
        return _open(lambda: ZmqListener(self, on_message, max_bytes))

    def link(self, endpoint: str, identity: bytes, on_message: OnMessage) -> ZmqLink:
        self._security.check(endpoint, "connect to")
        return _open(lambda: ZmqLink(self, endpoint, identity, on_message))

    async def look(self, endpoint: str, timeout_s: float = LOOK_TIMEOUT_S) -> Sight:
        return await look_at(endpoint, timeout_s)

    def soon(self, function: Callable[[], object]) -> None:
        try:
            if not self.forked:
                self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop: the process is ending, and nobody listens
                raise

    def close(self) -> None:
        for socket in list(self._sockets):
            socket.close()
        self._context.term()


def _open(make: Callable[[], T]) -> T:
    try:
        return make()
    except zmq.ZMQError as error:
        found = OSError(error.errno, error.strerror or str(error))
        raise OSError(error.errno, f"cannot open a socket: {explain(found)}") from None


_networks: weakref.WeakSet[ZmqNetwork] = weakref.WeakSet()


def _note_fork() -> None:
    """In a child by os.fork: the sockets and their thread are the parent's, and using them would spin or corrupt."""
    for network in _networks:
        network.forked = True


os.register_at_fork(after_in_child=_note_fork)  # once: what is registered stays for the life of the process


class _Socket:
    """What a listener and a link share: the lock, the outgoing queues, the drain."""

    def __init__(self, network: ZmqNetwork, kind: int, on_message: OnMessage) -> None:
        self._network = network
        self._loop = network._loop
        self._on_message = on_message
        self._lock = threading.Lock()
        self._out: collections.deque[tuple[bytes, bytes, Sequence[Buffer]]] = collections.deque()
        self._flush_due = False
        self._drain_due = False
        self._delivering = False
        self._closed = False
        self.on_unreachable: Callable[[bytes], None] | None = None
        self._routed = kind == zmq.ROUTER
        self._thread = 0
        self._socket: zmq.Socket[bytes] = network._context.socket(kind)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER drops without a word; we bound above
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
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
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop: the process is ending, and nobody listens
                raise

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
        """Send one chunk. Called with the lock held."""
        chunk, big = pack(records)
        socket = self._socket
        try:
            if self._routed:
                socket.send(peer, _MORE)
            if not big:
                socket.send(chunk, _NOBLOCK)
                return
            socket.send(chunk, _MORE)
            last = len(big) - 1
            for n, part in enumerate(big):
                socket.send(part, _MORE if n < last else _NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.debug("dropped %d messages to %r, which is not connected", len(records), peer)
            if self.on_unreachable is not None:
                self._loop.call_soon_threadsafe(self.on_unreachable, peer)

    # --- in ---

    def _drain(self) -> None:
        """Receive until there is nothing left, or give the loop a turn after DRAIN chunks.

        Delivers after the last receive: whoever is woken by a message and answers at once finds the lock free.
        What is sent while that goes on leaves at its end, in one chunk for each peer.
        """
        self._thread = threading.get_ident()
        chunks = []
        more = False
        with self._lock:
            self._drain_due = False
            if self._closed:
                return
            try:
                for n in range(DRAIN):
                    chunk = self._receive()
                    if chunk is not None:
                        chunks.append(chunk)
                    if n == 0 and not self._readable():  # cheaper than the exception that ends a longer run
                        break
                else:
                    more = self._drain_due = True
            except zmq.Again:
                pass
        if more:
            self._loop.call_soon(self._drain)
        if not chunks:
            return
        self._delivering = True
        try:
            for chunk in chunks:
                self._deliver(*chunk)
        finally:
            self._delivering = False
        if self._flush_due:
            self._flush_due = False
            with self._lock:
                self._write_queued()
                again = not self._closed and not self._drain_due and self._readable()
                self._drain_due |= again
            if again:
                self._loop.call_soon(self._drain)  # our send ate the edge that announced these

    def _receive(self) -> tuple[bytes, bytes, list[Buffer]] | None:
        receive = self._socket.recv
        peer = b""
        frame = receive(_NOBLOCK, copy=False)
        if self._routed:
            if not frame.more:
                return None
            peer = frame.bytes
            frame = receive(_NOBLOCK, copy=False)
        chunk = frame.bytes
        big: list[Buffer] = []
        while frame.more:
            frame = receive(_NOBLOCK, copy=False)
            big.append(frame.buffer)
        return peer, chunk, big

    def _deliver(self, peer: bytes, chunk: bytes, big: list[Buffer]) -> None:
        for header, parts in unpack(peer, chunk, big):
            faults = faultpoints.active
            if faults is not None:
                one = functools.partial(self._hand_over, peer, header, parts)
                faults.carry("transport.receive", self, peer, self._name(peer), one, self._loop)
                continue
            try:
                self._on_message(peer, header, parts)
            except Exception:
                # a bug of ours; the messages behind this one belong to others and must not be lost with it
                log.exception("handling a message from %r failed", peer)

    # --- with faults ---

    def _send_with_faults(self, peer: bytes, header: bytes, parts: Sequence[Buffer], now: bool) -> None:
        one = functools.partial(self._send, peer, header, parts, now)
        faults = faultpoints.active
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
        except Exception:
            log.exception("handling a message from %r failed", peer)

    def _name(self, peer: bytes) -> str:
        """What rules of fault points call the other end."""
        return peer.decode(errors="replace")

    def close(self, linger_ms: int = 0) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)
        self._network._sockets.discard(self)


def _all(queue: collections.deque[T]) -> Iterator[T]:
    """Take everything that is in *queue* now; others may append meanwhile."""
    for _ in range(len(queue)):
        yield queue.popleft()


class ZmqListener(_Socket):
    """A ROUTER."""

    def __init__(self, network: ZmqNetwork, on_message: OnMessage, max_bytes: int) -> None:
        super().__init__(network, zmq.ROUTER, on_message)
        self._paths: list[tuple[str, int]] = []
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer raises instead of vanishing
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its half-dead connection
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        # the default of 100 refuses a burst of agents, and a head that is stopped needs room for all who look at it
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._start()

    def bind(self, endpoint: str) -> str:
        self._network._security.check(endpoint, "listen on")
        try:
            with self._lock:
                self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))  # off: else IPv4 ports read ::ffff:a.b.c.d
                self._socket.bind(endpoint)
                actual = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            found = OSError(error.errno, os.strerror(error.errno or 0))
            text = explain(found) if endpoint.endswith(":0") else found.strerror  # it asked for any port
            raise OSError(error.errno, f"cannot listen on {endpoint}: {text}") from None
        if actual.startswith("ipc://"):
            path = actual.removeprefix("ipc://")
            self._paths.append((path, os.stat(path).st_ino))
        return actual

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        for path, inode in self._paths:  # libzmq closes on a thread of its own, and a process that ends first leaves it
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # not that of a successor
                    os.unlink(path)
        self._paths.clear()

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if faultpoints.active is None:
            self._send(peer, header, parts, now)
        else:
            self._send_with_faults(peer, header, parts, now)


class ZmqLink(_Socket):
    """A DEALER connected to one ROUTER."""

    def __init__(self, network: ZmqNetwork, endpoint: str, identity: bytes, on_message: OnMessage) -> None:
        super().__init__(network, zmq.DEALER, on_message)
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        # milliseconds; doubles from the one to the other, and libzmq adds no chance then: many links that one restart
        # closes at one moment must not all come back at one moment
        self._socket.setsockopt(zmq.RECONNECT_IVL, random.randint(10, 30))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(500, 1500))
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # else a SYN into a cut is repeated after up to a minute
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._endpoint = endpoint
        faults = faultpoints.active
        if faults is not None:
            faults.connecting(self, endpoint, self._loop)
        self._start()
        self._socket.connect(endpoint)

    def _name(self, peer: bytes) -> str:
        return self._endpoint

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if faultpoints.active is None:
            self._send(b"", header, parts, now)
        else:
            self._send_with_faults(b"", header, parts, now)
