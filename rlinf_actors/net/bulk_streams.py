"""Bulk streams: authenticated TCP connections that carry pieces of transfers, and the threads that move their bytes.

Theory of operation. A process has one `BulkEngine`. Its threads start with the first stream, and wait on one epoll for
all streams. Each stream is registered one-shot: the thread that gets its event owns the stream until it arms the stream
again. So one thread at a time reads and writes a stream, and several threads serve several streams. Other threads
`kick` a stream when there is something to send, or when the place for a piece has become known.

A stream reads pieces straight into their places (into a scratch buffer if they must be decrypted), and writes straight
from the sender's buffers. No call blocks. A stream that must wait (the peer does not read; the message of a piece has
not arrived) is armed without that event, and costs nothing meanwhile.

A stream ends once, on any error, and tells its owner. It is shut down before it is closed, because a forked child may
have its descriptor too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from contextlib import AbstractContextManager
from typing import Protocol

from rlinf_actors import exhaustion
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import Cipher, PieceHeader

log = logging.getLogger(__name__)

TURN = 8 << 20
"""Bytes that a thread moves for one stream before it looks at the others."""
STREAMS = max(1, min(4, len(os.sched_getaffinity(0))))
"""Connections of a session, and threads that serve all connections of a process."""
_IN, _OUT, _ONCE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLONESHOT
_ENDED = select.EPOLLHUP | select.EPOLLERR


class Owner(Protocol):
    """The owner of streams. Its methods are called on the engine's threads, and must not block."""

    def next_piece(self, stream: BulkStream) -> tuple[PieceHeader, list[Buffer]] | None:
        """Return the next piece that *stream* must send, with its buffers; None if nothing waits."""

    def has_pieces(self) -> bool:
        """Return True if `next_piece` would return a piece."""

    def place(self, header: PieceHeader) -> AbstractContextManager[memoryview] | None:
        """Return the memory for a piece, which stays in place inside the context; None if it is not known yet.

        Raises:
            RemoteWireError: no such piece is missing.
        """

    def received(self, header: PieceHeader) -> None:
        """Note that the bytes of a piece are in their place."""

    def stream_ended(self, stream: BulkStream, why: str) -> None:
        """Note that a stream has ended by itself."""


class BulkStream:
    """One connection, after its handshake.

    Args:
        sock: the connection.
        owner: decides what is sent, and where received bytes belong.
        sealing, opening: encrypt what is sent and decrypt what arrives; None without keys.
    """

    def __init__(self, sock: socket.socket, owner: Owner, sealing: Cipher | None, opening: Cipher | None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._owner = owner
        self._sealing, self._opening = sealing, opening
        self._engine: BulkEngine | None = None
        self._lock = threading.Lock()
        self._owned = self._kicked = self._closed = False
        self._out: list[memoryview] = []
        self._head = memoryview(bytearray(framing.HEADER))
        self._head_got = 0
        self._piece: PieceHeader | None = None
        self._got = 0
        self._waits = False
        self._arrived, self._sealed = memoryview(b""), memoryview(b"")

    # --- which thread ---

    def start(self, engine: BulkEngine) -> None:
        """Let the threads of *engine* serve this stream."""
        with self._lock:
            if not self._closed:
                self._engine = engine
                engine.add(self, self._events())

    def serve(self, events: int) -> None:
        """Move what can be moved without blocking, then wait for the next event. Called by the engine."""
        with self._lock:
            if self._closed or self._owned:  # owned: the event was for an earlier stream with this descriptor
                return
            self._owned = True
        why = ""
        try:
            self._write()
            self._read()
        except (OSError, RemoteWireError) as error:
            why = str(error)
        except Exception as error:  # a bug: the stream must end all the same, and its owner must know
            log.exception("a bulk stream failed")
            why = repr(error)
        with self._lock:
            self._owned = False
            if self._closed:
                self.sock.close()
                why = ""  # it was closed on purpose
            elif not why and self._engine is not None:
                kicked, self._kicked = self._kicked, False
                # the peer has closed a connection whose last pieces wait for their message: `kick` goes on
                if kicked or not (self._waits and events & _ENDED):
                    self._engine.arm(self, _IN | _OUT if kicked else self._events())
        if why:
            self.close()
            self._owner.stream_ended(self, why)

    def kick(self) -> None:
        """Call `serve` soon on a thread of the engine, because there is more to do. Any thread."""
        with self._lock:
            self._kicked = self._owned
            if self._engine is not None and not self._owned and not self._closed:
                self._engine.arm(self, _IN | _OUT)

    def close(self) -> None:
        """Close the connection. Any thread; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._engine is not None:
                self._engine.remove(self)
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            if not self._owned:
                self.sock.close()

    def _events(self) -> int:
        return (0 if self._waits else _IN) | (_OUT if self._out or self._owner.has_pieces() else 0)

    # --- out ---

    def _write(self) -> None:
        moved = 0
        while moved < TURN:
            if not self._out:
                piece = self._owner.next_piece(self)
                if piece is None:
                    return
                self._out = self._encoded(*piece)
            try:
                sent = self.sock.sendmsg(self._out)
            except BlockingIOError:
                return
            moved += sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.pop(0))
            if sent:
                self._out[0] = self._out[0][sent:]

    def _encoded(self, header: PieceHeader, buffers: list[Buffer]) -> list[memoryview]:
        head = header.encode()
        if self._sealing is None:
            return [memoryview(head), *(memoryview(one) for one in buffers)]
        if not self._sealed:
            self._sealed = memoryview(bytearray(framing.PIECE + framing.TAG))
        sealed = self._sealed[: header.size + framing.TAG]
        self._sealing.seal(head, buffers[0] if len(buffers) == 1 else b"".join(buffers), sealed)
        return [memoryview(head), sealed]

    # --- in ---

    def _read(self) -> None:
        moved = 0
        while moved < TURN:
            if self._piece is None and not self._read_header():
                return
            assert self._piece is not None
            place = self._owner.place(self._piece)
            self._waits = place is None
            if place is None:
                return
            try:
                done = self._read_plain(place) if self._opening is None else self._read_sealed(place)
            except BlockingIOError:
                return
            del place  # the receiver of the message may have given the memory back when `received` returns
            if done:
                moved += self._piece.size
                piece, self._piece = self._piece, None
                self._got = self._head_got = 0
                self._owner.received(piece)

    def _read_header(self) -> bool:
        try:
            self._head_got += self._count(self.sock.recv_into(self._head[self._head_got :]))
        except BlockingIOError:
            return False
        if self._head_got < framing.HEADER:
            return False
        self._piece = framing.decode_header(self._head)
        return True

    def _read_plain(self, place: AbstractContextManager[memoryview]) -> bool:
        assert self._piece is not None
        with place as memory:
            self._got += self._count(self.sock.recv_into(memory[self._got :]))
        return self._got == self._piece.size

    def _read_sealed(self, place: AbstractContextManager[memoryview]) -> bool:
        assert self._piece is not None
        assert self._opening is not None
        if not self._arrived:
            self._arrived = memoryview(bytearray(framing.PIECE + framing.TAG))
        sealed = self._arrived[: self._piece.size + framing.TAG]
        self._got += self._count(self.sock.recv_into(sealed[self._got :]))
        if self._got < len(sealed):
            return False
        with place as memory:
            self._opening.open(bytes(self._head), sealed, memory)
        return True

    def _count(self, got: int) -> int:
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        return got


class BulkEngine:
    """The threads that serve the bulk streams of a process. They start with the first stream, and end with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, BulkStream] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, stream: BulkStream, events: int) -> None:
        """Serve *stream* from now on. Raises RuntimeError if no thread can be started."""
        with self._lock:
            if not self._threads:
                self._epoll = select.epoll()
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll.register(self._wake, _IN)
                for number in range(STREAMS):
                    thread = exhaustion.OwnThread(target=self._run, name=f"rlinf-actors-bulk-{number}", daemon=True)
                    exhaustion.start(thread)
                    self._threads.append(thread)
            fd = stream.sock.fileno()
            self._streams[fd] = stream
            self._epoll.register(fd, events | _ONCE)

    def arm(self, stream: BulkStream, events: int) -> None:
        self._epoll.modify(stream.sock.fileno(), events | _ONCE)

    def remove(self, stream: BulkStream) -> None:
        """Serve *stream* no more. The caller closes it afterwards."""
        fd = stream.sock.fileno()
        with self._lock:
            if self._streams.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Close all streams and end the threads. Not on a thread of the engine."""
        with self._lock:
            streams, threads, self._threads = list(self._streams.values()), self._threads, []
            first, self._closed = not self._closed, True
        for stream in streams:
            stream.close()
        if first and threads:
            os.eventfd_write(self._wake, 1)  # stays readable: it wakes all
            for thread in threads:
                thread.join()
            self._epoll.close()
            os.close(self._wake)

    def _run(self) -> None:
        while not self._closed:
            for fd, events in self._epoll.poll(maxevents=1):
                stream = self._streams.get(fd)
                if stream is not None:
                    stream.serve(events)
