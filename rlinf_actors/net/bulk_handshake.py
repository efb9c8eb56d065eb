"""The bulk streams of one process: its bulk port, the handshakes, the engine and the memory for what arrives.

A connection to the bulk port is closed unless it proves within HANDSHAKE_S that it belongs to a session, whose id and
secret the other process has sent by its link. Before that, only a Hello of fixed size is read, into memory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import secrets
import socket
from collections.abc import Callable
from functools import partial

from rlinf_actors import forks
from rlinf_actors.errors import InternalError, RemoteWireError
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk import KEYED_FROM, PLAIN_FROM, BulkLink
from rlinf_actors.net.bulk_framing import BulkHandshake, Cipher
from rlinf_actors.net.bulk_streams import STREAMS, BulkEngine, BulkStream
from rlinf_actors.net.link import LogThrottle
from rlinf_actors.net.loop import Tasks, call_threadsafe, handling_failed
from rlinf_actors.net.receive_memory import ReceiveMemory

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds in which a connection must be authenticated, and in which a session must get its first connections."""
WAITING = 256
"""Most connections that are not authenticated. The oldest makes room for a new one."""
IDLE_S = 10.0
"""Seconds without a receive after which the memory that is kept for receives is given back."""


class BulkTransport:
    """The bulk streams of one process. On the loop's thread, unless a method says otherwise.

    Args:
        loop: the loop of the process's I/O thread.
        keyed: True if TCP connections of this process need keys; bulk streams are then encrypted.

    Attributes:
        port: the bulk port, 0 if this process does not listen.
        bulk_from: bytes of a message from which its large parts travel by bulk streams.
        engine, memory: move the bytes, and hold what arrives.
        closed: True after `close`, and in a forked child.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, keyed: bool) -> None:
        self.keyed = keyed
        self.bulk_from = KEYED_FROM if keyed else PLAIN_FROM
        self.port = 0
        self.closed = False
        self.engine = BulkEngine()
        self.memory = ReceiveMemory()
        self._loop = loop
        self._tasks = Tasks(loop)
        self._listener: socket.socket | None = None
        self._expected: dict[bytes, asyncio.Future[tuple[BulkLink, bytes]]] = {}
        self._waiting: dict[socket.socket, asyncio.Task[bool]] = {}
        self._refused = LogThrottle()
        self._trimming = False
        forks.watch(self)

    @functools.cached_property
    def available(self) -> bool:
        """True if this process can have bulk streams: with keys they need the package cryptography.

        It is loaded with the first stream, because that takes as long as the rest of a worker's start. If it does not
        load then, this becomes False.
        """
        return not self.keyed or importlib.util.find_spec("cryptography") is not None

    # --- for links ---

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop. Any thread."""
        if not self.closed:
            call_threadsafe(self._loop, function)

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run *function* on the loop after *seconds*. Any thread."""
        self.soon(partial(self._loop.call_later, seconds, function))

    def deliver(self, name: str, handle: Callable[[], None], failed: Callable[[InternalError], object]) -> None:
        """Call *handle*, which handles a message of *name*. An unexpected exception goes to the process's policy."""
        self._trim_later()
        try:
            handle()
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            handling_failed(self._loop, f"handling a message from {name}", error, failed)

    def connect(self, link: BulkLink, address: tuple[str, int], session: bytes, secret: bytes) -> None:
        """Connect the streams of a new session of *link*. Any thread. If that fails, the session ends."""

        def start() -> None:
            for _ in range(STREAMS):
                self._tasks.start(self._connect(link, address, session, secret), f"bulk streams with {link.name}")

        self.soon(start)

    def expect(self, link: BulkLink, session: bytes, secret: bytes) -> None:
        """Admit connections of this session to *link*."""
        known = self._session(session)
        if not known.done():
            known.set_result((link, secret))

    def forget(self, session: bytes) -> None:
        """Admit no further connections of this session. Any thread."""
        if session:
            self.soon(lambda: self._expected.pop(session, None))

    # --- handshakes ---

    def listen(self, ip: str) -> int:
        """Listen on *ip*, and return the port, which the kernel chooses. 0 if encryption is needed and not available.

        Raises:
            OSError: the system refuses the socket.
        """
        if not self.available:
            log.info("no bulk streams, so large parts are slow: the package cryptography is missing")
            return 0
        self._listener = socket.create_server((ip, 0), family=_family(ip), backlog=WAITING)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._tasks.start(self._accept(self._listener), "accepting bulk streams")
        return self.port

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _address = await self._loop.sock_accept(listener)
            except OSError as error:
                if self.closed:
                    return
                log.warning("cannot accept bulk streams: %s", explain(error))
                await asyncio.sleep(AGAIN_S)
                continue
            if len(self._waiting) >= WAITING:
                self._waiting.pop(next(iter(self._waiting))).cancel()
            task = self._waiting[sock] = self._tasks.start(self._admit(sock), "a handshake of a bulk stream")
            task.add_done_callback(partial(self._greeted, sock))  # also if it was cancelled before it began

    async def _admit(self, sock: socket.socket) -> bool:
        """Carry out a handshake. Return True if a stream has the connection now."""
        try:
            link, session, stream = await asyncio.wait_for(self._greet(sock), HANDSHAKE_S)
        except (OSError, RemoteWireError, asyncio.TimeoutError) as error:
            if self._refused.note():
                why = str(error) or f"it proved nothing within {HANDSHAKE_S:g} s"
                log.warning("refused a bulk stream (%d so far): %s", self._refused.count, why)
            return False
        link.ready(stream, session)
        return True

    def _greeted(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        self._waiting.pop(sock, None)
        if task.cancelled() or task.exception() is not None or not task.result():
            sock.close()

    async def _greet(self, sock: socket.socket) -> tuple[BulkLink, bytes, BulkStream]:
        """Carry out the handshake at the listening end."""
        _set_up(sock)
        nonce = secrets.token_bytes(framing.NONCE)
        await self._loop.sock_sendall(sock, nonce)
        hello = await self._read(sock, framing.HELLO)
        session = framing.session_of(hello)
        try:
            link, secret = await asyncio.shield(self._session(session))
        except asyncio.CancelledError:
            self._expected.pop(session, None)
            raise
        handshake = framing.accept(hello, secret, nonce)
        await self._loop.sock_sendall(sock, handshake.proof())
        theirs, ours = handshake.keys()
        return link, session, self._stream(sock, link, ours, theirs)

    async def _connect(self, link: BulkLink, address: tuple[str, int], session: bytes, secret: bytes) -> None:
        sock = socket.socket(_family(address[0]), socket.SOCK_STREAM)
        try:
            stream = await asyncio.wait_for(self._introduce(sock, link, address, session, secret), HANDSHAKE_S)
        except (OSError, RemoteWireError, asyncio.TimeoutError) as error:
            sock.close()
            why = str(error) or f"no answer within {HANDSHAKE_S:g} s; is the port closed by a firewall?"
            link.end(f"{address[0]}:{address[1]}: {why}", session)
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            link.ready(stream, session)

    async def _introduce(
        self, sock: socket.socket, link: BulkLink, address: tuple[str, int], session: bytes, secret: bytes
    ) -> BulkStream:
        """Carry out the handshake at the connecting end."""
        _set_up(sock)
        await self._loop.sock_connect(sock, address)
        nonce = await self._read(sock, framing.NONCE)
        handshake = BulkHandshake(session, secret, nonce, secrets.token_bytes(framing.NONCE))
        await self._loop.sock_sendall(sock, handshake.hello())
        if not secrets.compare_digest(await self._read(sock, framing.PROOF), handshake.proof()):
            raise RemoteWireError("the process there does not know the secret of the session")
        ours, theirs = handshake.keys()
        return self._stream(sock, link, ours, theirs)

    def _stream(self, sock: socket.socket, link: BulkLink, ours: bytes, theirs: bytes) -> BulkStream:
        if not self.keyed:
            return BulkStream(sock, link, None, None)
        try:
            return BulkStream(sock, link, Cipher(ours), Cipher(theirs))
        except Exception as error:  # a broken package raises what it likes
            self.available = False
            raise OSError(f"the package cryptography does not load here, so large parts are slow: {error!r}") from error

    async def _read(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = await self._loop.sock_recv(sock, size - len(data))
            if not got:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            data += got
        return data

    def _session(self, session: bytes) -> asyncio.Future[tuple[BulkLink, bytes]]:
        """Return the future that has the link and the secret of a session, once its Open has arrived."""
        return self._expected.setdefault(session, self._loop.create_future())

    # --- memory, and the end ---

    def _trim_later(self) -> None:
        """Give memory back when nothing has been received for IDLE_S. No timer runs while the process is idle."""
        if not self._trimming:
            self._trimming = True
            self._loop.call_later(IDLE_S, self._trim, self.memory.takes)

    def _trim(self, seen: int) -> None:
        self._trimming = False
        if self.memory.takes != seen:
            self._trim_later()
        else:
            self.memory.trim()

    def note_fork(self) -> None:
        """Send nothing in a forked child, where the threads do not exist."""
        self.closed = True

    async def close(self) -> None:
        """Close the port and all streams, and end the threads."""
        self.closed = True
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # also if a forked child has the descriptor
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()
        self.engine.close()


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _set_up(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanishes leaves a connection for ever
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
