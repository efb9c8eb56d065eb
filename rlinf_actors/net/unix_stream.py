"""Unix streams between the processes of one node: StreamListener, StreamLink and the connection that both have.

Theory of operation. A worker listens beside the unix socket of its ZeroMQ listener (`path_of`); a process that finds
nothing there uses ZeroMQ (`net.local_network`). The kernel copies the bytes from one process to the other: no thread
stands between them. `net.message_socket` has the rules of all sockets; a chunk is laid out by `net.stream_framing`.

*Connections.* The first chunk of a connection is the HELLO with the identity of the link. The kernel tells the user of
each end, and another user than ours (or root) is cut off. A connection whose peer does not join (`admit`) ends soon
(`net.stream_strangers`). Until then it accepts chunks of STRANGER bytes, and one descriptor. Bytes that are no chunk
end the connection. A second connection with the same identity replaces the first.

*Sending.* A system call takes as much as the kernel's buffer has room for. The rest waits in `_unsent`, and the loop
writes it when the peer has read; later messages queue behind it. Nothing blocks. The buffers of a message that waits
belong to the socket until it is sent, as with ZeroMQ.

*Ends.* A connection that ends says nothing about the process at its other end: the head and the pidfd decide who is
gone. The listener forgets the peer. A link connects again, and reports that messages may be lost (`on_reset`); what it
had not sent is dropped. A forked child closes its copies and never writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import select
import socket
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.link import OnFailed, OnMessage, OnRejected, OnReset
from rlinf_actors.net.message_socket import Messages, MessageSocket
from rlinf_actors.net.stream_connection import Connection
from rlinf_actors.net.stream_strangers import Strangers
from rlinf_actors.net.unix_sockets import SUFFIX, peer_of

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

log = logging.getLogger(__name__)

HELLO = b"rlinf-actors/1 "
"""Begins the first chunk of each connection, before the identity."""
AGAIN = b"rlinf-actors/1, again "
"""Begins it instead of HELLO if the link was connected before: the listener then answers with NOTHING. Only a listener
that lives answers; the kernel also connects to one whose process is ending."""
NOTHING = b"\x90"
"""Records of a chunk without messages."""
HELLO_BYTES = 512
STRANGER = 64 << 10
"""Most bytes of a chunk of a peer that has not joined."""
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Most bytes of a chunk of a peer that has joined: the memory of this machine."""
BACKLOG = 4096
ACCEPTS = 64
"""Most connections that are accepted in one turn of the loop."""
PAUSE_S = 0.5
"""Seconds without accepting after descriptors have run out."""
RETRY_S, RETRY_MOST_S = 0.02, 1.0
"""Seconds until a link connects again, doubled from the first to the second. Half of each is random: many links that
one end closes must not all come back at one moment."""


def path_of(endpoint: str) -> str:
    """Return the path of the stream socket that belongs to a ZeroMQ endpoint ``ipc://PATH``."""
    return endpoint.removeprefix("ipc://") + SUFFIX


def trusted(connection: socket.socket) -> bool:
    """Return True if the process at the other end is of this user, or root."""
    return peer_of(connection)[1] in (os.geteuid(), 0)


class StreamSocket(MessageSocket):
    """Base of StreamListener and StreamLink: connections on an event loop."""

    def __init__(self, network: ZmqNetwork, on_message: OnMessage, on_failed: OnFailed | None = None) -> None:
        super().__init__(network, on_message, on_failed)
        self._connections: set[Connection] = set()

    # --- the owner's part ---

    def _received(self, connection: Connection, records: Buffer, big: list[Buffer]) -> bool:
        """Handle a chunk. Return False if it is malformed."""
        raise NotImplementedError

    def _ended(self, connection: Connection) -> None:
        """Handle the end of a connection, which was closed. Loop thread."""
        raise NotImplementedError

    # --- connections ---

    def _open(self, connection: Connection) -> None:
        """Read *connection* from now on. Loop thread."""
        self._connections.add(connection)
        self._loop.add_reader(connection.fd, self._read, connection)

    def _end(self, connection: Connection) -> None:
        """Read *connection* no more, and close it soon. Loop thread."""
        self._loop.remove_reader(connection.fd)
        self._wake(functools.partial(self._close, connection))

    def _close(self, connection: Connection) -> None:
        """Close *connection* and report its end. Loop thread. Idempotent."""
        with self._lock:
            if connection not in self._connections:
                return
            self._connections.discard(connection)
            self._loop.remove_reader(connection.fd)
            if connection.writing:
                self._loop.remove_writer(connection.fd)
            connection.close()
        self._ended(connection)

    def note_fork(self) -> None:
        """Close the connections of this forked child, so that the parent's end where the parent closes them."""
        for connection in self._connections:
            connection.forget()

    # --- out ---

    def _transmit(self, connection: Connection, messages: Messages) -> bool:
        """Send messages. Return False if the connection is broken; its reader ends it. The caller holds the lock."""
        try:
            connection.send(messages)
        except OSError:
            connection.end()  # what follows would come after a gap; of ENOBUFS the reader would not hear
            return False
        if connection.unsent and not connection.writing:
            connection.writing = True
            self._wake(functools.partial(self._start_writing, connection))
        return True

    def _start_writing(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._connections:
                self._loop.add_writer(connection.fd, self._write_rest, connection)

    def _write_rest(self, connection: Connection) -> None:
        with self._lock:
            try:
                done = connection.flush()
            except OSError:
                done = True
                connection.end()
            if done:
                connection.writing = False
                self._loop.remove_writer(connection.fd)

    def _flush(self) -> None:
        with self._lock:
            self._flush_due = False
            self._write_queued()

    # --- in ---

    def _read(self, connection: Connection) -> None:
        """Read *connection* once, and handle what has arrived."""
        self._thread = threading.get_ident()
        try:
            with self._lock:
                chunks = connection.receive() if connection in self._connections else iter(())
        except BlockingIOError:
            return
        except OSError:
            chunks = None
        if chunks is None:
            self._end(connection)
            return
        self._delivering = well = True
        try:
            for records, big in chunks:
                well = well and self._received(connection, records, connection.placed(big) if big else big)
            if self.on_drained is not None:
                self.on_drained()
        except (RemoteWireError, MemoryError) as error:
            self._warn(connection.identity, error)
            well = False
        finally:
            self._delivering = False
        if self._flush_due:
            self._flush()
        if not well:
            self._end(connection)

    # --- the end ---

    def close(self, linger_ms: int = 0) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True
            if linger_ms:
                _send_rest(self._connections, linger_ms)
        for connection in list(self._connections):
            self._close(connection)
        self._network._sockets.discard(self)


def _send_rest(connections: Iterable[Connection], linger_ms: int) -> None:
    """Send what waits in *connections*, as far as their peers read it within *linger_ms* milliseconds."""
    waiting = {connection.fd: connection for connection in connections if connection.unsent}
    limit, poll = time.monotonic() + linger_ms / 1e3, select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLOUT)
    while waiting:
        ready = poll.poll(max(0.0, (limit - time.monotonic()) * 1e3))
        if not ready:
            return
        for fd, _ in ready:
            try:
                done = waiting[fd].flush()
            except OSError:
                done = True
            if done:
                poll.unregister(fd)
                del waiting[fd]


class StreamListener(StreamSocket):
    """The listener of unix streams of a worker. `net.local_network` puts it beside the ZeroMQ listener."""

    def __init__(self, network: ZmqNetwork, on_message: OnMessage, on_failed: OnFailed | None = None) -> None:
        super().__init__(network, on_message, on_failed)
        self._listening: list[tuple[socket.socket, str, int]] = []  # with path and inode
        self._peers: dict[bytes, Connection] = {}
        self._strangers = Strangers(self._loop, self._close)
        self._resume: asyncio.TimerHandle | None = None

    def __contains__(self, peer: bytes) -> bool:
        """Return True if *peer* is connected to this listener. Any thread."""
        return peer in self._peers

    def bind(self, path: str) -> None:
        """Listen on *path*. A socket that an ended process left there is replaced.

        Raises:
            OSError: it is not possible.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    os.unlink(path)
            listening.bind(path)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        self._network._sockets.add(self)
        self._listening.append((listening, path, os.stat(path).st_ino))
        self._loop.add_reader(listening.fileno(), self._accept, listening)

    def admit(self, peer: bytes) -> None:
        """Accept chunks of any size from *peer* from now on, because it has joined."""
        connection = self._peers.get(peer)
        if connection is not None:
            self._strangers.joined(connection, MEMORY)

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._send(peer, header, parts, now)

    def _write(self, peer: bytes, messages: Messages) -> None:
        connection = self._peers.get(peer)
        if connection is None or not self._transmit(connection, messages):
            self._unreachable(peer, messages)

    # --- new connections ---

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._pause(listening, error)
                return
            if not trusted(accepted):
                accepted.close()
                continue
            connection = Connection(accepted, HELLO_BYTES)
            self._open(connection)
            self._strangers.add(connection)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment, since no descriptor is left: the loop would be called again at once."""
        log.warning("no connection can be accepted for %g s: %s", PAUSE_S, explain(error))
        self._loop.remove_reader(listening.fileno())
        self._resume = self._loop.call_later(
            PAUSE_S, self._loop.add_reader, listening.fileno(), self._accept, listening
        )

    def _received(self, connection: Connection, records: Buffer, big: list[Buffer]) -> bool:
        if connection.identity:
            return self._deliver(connection.identity, records, big)
        said = bytes(records)
        again = said.startswith(AGAIN)
        identity = said.removeprefix(AGAIN if again else HELLO)
        if big or identity == said or not identity:
            raise RemoteWireError("the first chunk of a connection is no HELLO")
        with self._lock:
            connection.identity, connection.reader.most = identity, STRANGER
            before, self._peers[identity] = self._peers.get(identity), connection
            if again:
                with contextlib.suppress(OSError):  # broken already: its reader ends it
                    connection.send_chunk(NOTHING)
        if before is not None:
            if before.joined:
                self._strangers.joined(connection, MEMORY)
            self._end(before)
        return True

    def _ended(self, connection: Connection) -> None:
        self._strangers.discard(connection)
        if self._peers.get(connection.identity) is connection:
            del self._peers[connection.identity]

    def note_fork(self) -> None:
        super().note_fork()
        for listening, _, _ in self._listening:
            listening.close()

    def close(self, linger_ms: int = 0) -> None:
        self._strangers.close()
        if self._resume is not None:
            self._resume.cancel()
        for listening, path, inode in self._listening:
            self._loop.remove_reader(listening.fileno())
            listening.close()
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # not a successor's
                    os.unlink(path)
        self._listening.clear()
        super().close(linger_ms)


def connected(path: str) -> socket.socket:
    """Return a socket that is connected to *path*.

    Raises:
        OSError: nothing listens there (FileNotFoundError, ConnectionRefusedError), or it does not accept now
            (BlockingIOError).
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        stream.connect(path)
    except BaseException:
        stream.close()
        raise
    return stream


class StreamLink(StreamSocket):
    """A connection of this process to a StreamListener. Implements `net.link.Link`.

    Args:
        endpoint: the ZeroMQ endpoint beside which the listener is.
        path: path of the listener's socket.
        stream: a socket that is connected to *path*; None to connect later, since nothing accepts there now.
        identity, on_message, on_rejected, on_reset, on_failed: as of `Network.link`.
    """

    def __init__(
        self,
        network: ZmqNetwork,
        endpoint: str,
        path: str,
        stream: socket.socket | None,
        identity: bytes,
        on_message: OnMessage,
        on_rejected: OnRejected | None,
        on_reset: OnReset | None,
        on_failed: OnFailed | None,
    ) -> None:
        super().__init__(network, on_message, on_failed)
        self._path = path
        self._endpoint = endpoint
        self._identity = identity
        self._on_rejected = on_rejected
        self._on_reset = on_reset
        self._connection: Connection | None = None
        self._was_connected = False
        self._resuming = False  # connected again, and the listener has not answered
        self._waiting: Messages = []
        self._retry_s = RETRY_S
        self._retry: asyncio.TimerHandle | None = None
        network._sockets.add(self)
        faults = fault_injection.active
        if faults is not None:
            faults.connecting(self, endpoint, self._loop)
        if stream is None:
            self._again()
        else:
            self._connected(stream)

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._send(b"", header, parts, now)

    def close(self, linger_ms: int = 0) -> None:
        if self._retry is not None:
            self._retry.cancel()
        super().close(linger_ms)
        self._waiting.clear()

    def _name(self, peer: bytes) -> str:
        return self._endpoint

    def _write(self, peer: bytes, messages: Messages) -> None:
        if self._connection is None:
            self._waiting.extend(messages)
        else:
            self._transmit(self._connection, messages)  # if it is broken they are lost, which `on_reset` reports

    def _received(self, connection: Connection, records: Buffer, big: list[Buffer]) -> bool:
        if self._resuming:
            self._resuming = False
            if self._on_reset is not None:
                self._wake(self._on_reset)
        return self._deliver(b"", records, big)

    def _connected(self, stream: socket.socket) -> None:
        if not trusted(stream):
            stream.close()
            log.warning("a process of another user listens on %s: nothing is sent there", self._path)
            if self._on_rejected is not None:
                self._loop.call_soon(self._on_rejected, "a process of another user listens there", True)
            return
        connection = Connection(stream, MEMORY)
        connection.joined = True
        self._open(connection)
        with self._lock:
            with contextlib.suppress(OSError):  # broken already: its reader ends it
                connection.send_chunk((AGAIN if self._was_connected else HELLO) + self._identity)
            self._connection, self._retry_s = connection, RETRY_S
            waiting, self._waiting = self._waiting, []
            if waiting:
                self._transmit(connection, waiting)
            self._resuming, self._was_connected = self._was_connected, True

    def _ended(self, connection: Connection) -> None:
        with self._lock:
            self._connection = None
        if not self._closed:
            self._again()

    def _again(self) -> None:
        wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_MOST_S)
        self._retry = self._loop.call_later(wait_s * random.uniform(0.5, 1.5), self._connect)

    def _connect(self) -> None:
        try:
            stream = connected(self._path)
        except OSError:
            self._again()
        else:
            self._connected(stream)
