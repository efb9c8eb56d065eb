"""Unix streams between the processes of one node: who connects to whom, by StreamListener and StreamLink.

Theory of operation. A worker listens beside the unix socket of its ZeroMQ listener (`path_of`); a process that finds
nothing there uses ZeroMQ (`net.local_network`). The kernel copies the bytes from one process to the other: no thread
stands between them. `net.stream_socket` sends and receives; a chunk is laid out by `net.stream_framing`.

*Connections.* The first chunk of a connection is the HELLO with the identity of the link. The kernel tells the user of
each end, and another user than ours (or root) is cut off. A connection whose peer does not join (`admit`) ends soon
(`net.stream_strangers`). Until then it accepts chunks of STRANGER bytes, and one descriptor. Bytes that are no chunk
end the connection. A second connection with the same identity replaces the first.

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
import socket
import stat
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.link import LinkOptions, OnAnyThread, OnFailed, OnMessage
from rlinf_actors.net.message_socket import Messages
from rlinf_actors.net.stream_connection import StreamConnection
from rlinf_actors.net.stream_socket import StreamSocket
from rlinf_actors.net.stream_strangers import HANDSHAKE_S, PENDING, Strangers
from rlinf_actors.net.unix_sockets import SUFFIX, peer_of, trusted

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork
    from rlinf_actors.wire.together import Header

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


class StreamListener(StreamSocket):
    """The listener of unix streams of a worker. `net.local_network` puts it beside the ZeroMQ listener.

    Attributes:
        peers: the connections by the identities of the peers.
    """

    def __init__(
        self,
        network: ZmqNetwork,
        on_message: OnMessage,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
    ) -> None:
        super().__init__(network, on_message, on_failed, on_any_thread)
        self._listening: list[tuple[socket.socket, str, int]] = []  # with path and inode
        self.peers: dict[bytes, StreamConnection] = {}
        self._strangers = Strangers(self._loop, self._cut_off)
        self._resume: asyncio.TimerHandle | None = None

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

    def _cut_off(self, connection: StreamConnection) -> None:
        self._warn(
            connection.identity,
            RemoteWireError(f"it had not joined after {HANDSHAKE_S:g} s, or {PENDING} further connections"),
        )
        self._close(connection)

    def admit(self, peer: bytes) -> None:
        """Accept chunks of any size from *peer* from now on, because it has joined."""
        connection = self.peers.get(peer)
        if connection is not None:
            self._strangers.joined(connection, MEMORY)

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if not now or not self._sent(self.peers.get(peer), header, parts):
            self._send(peer, header, parts, now)

    def _write(self, peer: bytes, messages: Messages) -> None:
        connection = self.peers.get(peer)
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
            if not trusted(peer_of(accepted)[1]):
                accepted.close()
                continue
            connection = StreamConnection(accepted, HELLO_BYTES)
            try:
                self._open(connection)
            except OSError as error:
                self._pause(listening, error)
                return
            self._strangers.add(connection)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment, since no descriptor is left, or none more can be watched."""
        log.warning("no connection can be accepted for %g s: %s", PAUSE_S, explain(error))
        self._loop.remove_reader(listening.fileno())
        self._resume = self._loop.call_later(
            PAUSE_S, self._loop.add_reader, listening.fileno(), self._accept, listening
        )

    def _received(self, connection: StreamConnection, records: Buffer, big: list[Buffer]) -> bool:
        if connection.identity:
            return self._deliver(connection.identity, records, big)
        said = bytes(records)
        again = said.startswith(AGAIN)
        identity = said.removeprefix(AGAIN if again else HELLO)
        if big or identity == said or not identity:
            raise RemoteWireError("the first chunk of a connection is no HELLO")
        with self._lock:
            connection.identity, connection.reader.most = identity, STRANGER
            before, self.peers[identity] = self.peers.get(identity), connection
            if again:
                with contextlib.suppress(OSError):  # broken already: its reader ends it
                    connection.send_chunk(NOTHING)
        self._leave_rest()
        if before is not None:
            if before.joined:
                self._strangers.joined(connection, MEMORY)
            self._end(before)
        return True

    def _ended(self, connection: StreamConnection) -> None:
        self._strangers.discard(connection)
        if self.peers.get(connection.identity) is connection:
            del self.peers[connection.identity]
            if self.on_ended is not None and not self._closed:
                self.on_ended(connection.identity)

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
        identity, on_message, options: as of `Network.link`.

    Attributes:
        queue: sends a message soon, together with others. Any thread.
    """

    def __init__(
        self,
        network: ZmqNetwork,
        endpoint: str,
        path: str,
        stream: socket.socket | None,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions,
    ) -> None:
        super().__init__(network, on_message, options.on_failed, options.on_any_thread)
        self._path = path
        self._endpoint = endpoint
        self._identity = identity
        self._on_rejected = options.on_rejected
        self._on_reset = options.on_reset
        self._connection: StreamConnection | None = None
        self._was_connected = False
        self._resuming = False  # connected again, and the listener has not answered
        self._waiting: Messages = []
        self.queue: Callable[[Header, Sequence[Buffer]], None] = functools.partial(self._queue, b"")
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
        if not now or not self._sent(self._connection, header, parts):
            self._send(b"", header, parts, now)

    @property
    def unsent(self) -> bool:
        """True if messages wait until the listener reads, or until it can be reached. Loop thread."""
        connection = self._connection
        return connection is None or bool(connection.unsent)

    def read(self, on: bool) -> None:
        """Stop reading what the listener sends, or begin again. Loop thread; not of a link that other threads read."""
        assert self._on_any_thread is None
        for connection in self._connections:
            if on:
                self._loop.add_reader(connection.fd, self._read, connection, True)
            else:
                self._loop.remove_reader(connection.fd)

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

    def _received(self, connection: StreamConnection, records: Buffer, big: list[Buffer]) -> bool:
        if self._resuming:
            self._resuming = False
            if self._on_reset is not None:
                self._wake(self._on_reset)
        return self._deliver(b"", records, big)

    def _connected(self, stream: socket.socket) -> None:
        if not trusted(peer_of(stream)[1]):
            stream.close()
            log.warning("a process of another user listens on %s: nothing is sent there", self._path)
            if self._on_rejected is not None:
                self._loop.call_soon(self._on_rejected, "a process of another user listens there", True)
            return
        connection = StreamConnection(stream, MEMORY)
        connection.joined = True
        try:
            self._open(connection)
        except OSError as error:
            log.warning("%s is connected later: %s", self._endpoint, explain(error))
            self._again()
            return
        with self._lock:
            # before the listener is asked: another thread may read its answer
            self._resuming, self._was_connected = self._was_connected, True
            with contextlib.suppress(OSError):  # broken already: its reader ends it
                connection.send_chunk((AGAIN if self._resuming else HELLO) + self._identity)
            self._connection, self._retry_s = connection, RETRY_S
            waiting, self._waiting = self._waiting, []
            if waiting:
                self._transmit(connection, waiting)
        self._leave_rest()
        if self.on_sent is not None and not connection.unsent:
            self.on_sent()

    def _ended(self, connection: StreamConnection) -> None:
        with self._lock:
            self._connection = None
        self._leave_rest()
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
