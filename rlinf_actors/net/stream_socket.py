"""StreamSocket: sends and receives on connections of unix streams. Base of the listener and links of `net.unix_stream`.

Theory of operation. `net.message_socket` has the rules of all sockets.

*Sending.* A system call takes as much as the kernel's buffer has room for. The rest waits in `StreamConnection.unsent`,
and the loop writes it when the peer has read; later messages queue behind it. Nothing blocks. The buffers of a message
that waits belong to the socket until it is sent, as with ZeroMQ. A flush never waits for the socket's lock: whoever has
held the lock looks at the queue afterwards (`_leave_rest`).

*Receiving.* Each call of `_read` reads a connection once (`net.reading`). Its end is handled behind its last message.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.link import OnAnyThread, OnFailed, OnMessage
from rlinf_actors.net.message_socket import BATCH, Messages, MessageSocket
from rlinf_actors.net.stream_connection import StreamConnection, send_rest
from rlinf_actors.net.stream_framing import Chunk, small
from rlinf_actors.wire import together

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork
    from rlinf_actors.wire.together import Header


class StreamSocket(MessageSocket):
    """Base of StreamListener and StreamLink: connections on an event loop.

    Attributes:
        on_sent: if not None, called on the loop when the kernel has taken all that waited to be sent.
    """

    _joined = staticmethod(together.joined)

    def __init__(
        self,
        network: ZmqNetwork,
        on_message: OnMessage,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
    ) -> None:
        super().__init__(network, on_message, on_failed, on_any_thread)
        self._connections: set[StreamConnection] = set()
        self.on_sent: Callable[[], object] | None = None
        self._receiving = threading.Lock()  # while it is held, no descriptor is closed. Taken before the socket's lock

    # --- the owner's part ---

    def _received(self, connection: StreamConnection, records: Buffer, big: list[Buffer]) -> bool:
        """Handle a chunk. Return False if it is malformed."""
        raise NotImplementedError

    def _ended(self, connection: StreamConnection) -> None:
        """Handle the end of a connection, which was closed. Loop thread."""
        raise NotImplementedError

    # --- connections ---

    def _open(self, connection: StreamConnection) -> None:
        """Read *connection* from now on. Loop thread.

        Raises:
            OSError: the kernel watches no further descriptor. The connection is closed.
        """
        self._connections.add(connection)
        try:
            if self._on_any_thread is not None:
                self._network.reading.add(connection.fd, functools.partial(self._read, connection))
            else:
                self._loop.add_reader(connection.fd, self._read, connection, True)
        except OSError:
            self._connections.discard(connection)
            connection.close()
            raise

    def _stop_reading(self, connection: StreamConnection) -> None:
        if self._on_any_thread is not None:
            self._network.reading.remove(connection.fd)
        else:
            self._loop.remove_reader(connection.fd)

    def _end(self, connection: StreamConnection) -> None:
        """Read *connection* no more, and close it when its messages are handled. Called by the thread that reads it."""
        with self._receiving:
            if connection in self._connections:  # else its descriptor's number may be another's
                self._stop_reading(connection)
        self._for_loop.append(self._close, connection)

    def _close(self, connection: StreamConnection) -> None:
        """Close *connection* and report its end. Loop thread. Idempotent."""
        with self._receiving, self._lock:
            if connection not in self._connections:
                return
            self._connections.discard(connection)
            self._stop_reading(connection)
            if connection.writing:
                self._loop.remove_writer(connection.fd)
            connection.close()
        self._leave_rest()
        self._ended(connection)

    def note_fork(self) -> None:
        """Close the connections of this forked child, so that the parent's end where the parent closes them."""
        for connection in self._connections:
            connection.forget()

    # --- out ---

    def _queue(self, peer: bytes, header: Header, parts: Sequence[Buffer]) -> None:
        """Send a message soon, together with others, as `_send` does, which is called in all but the usual case.

        Any thread.
        """
        if fault_injection.active is not None or self._network.forked:
            self._send(peer, header, parts, False)
            return
        self._out.append((peer, header, parts))
        if not self._flush_due or len(self._out) >= BATCH:
            self._look_at_queue()

    def _sent(self, connection: StreamConnection | None, header: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a small message at once if nothing waits before it, and return True; the usual case, fast. Any thread.

        If it returns False, nothing was done.
        """
        if connection is None or self._out or fault_injection.active is not None or self._network.forked:
            return False
        chunk = small(header, parts)
        if chunk is None or self._lock.locked():
            return False
        try:
            with self._lock:  # also in a thread whose signal handlers raise
                if connection.unsent:
                    return False
                connection.send_bytes(chunk)
                if connection.unsent and not connection.writing:
                    connection.writing = True
                    self._wake(functools.partial(self._start_writing, connection))
            return True
        except OSError:  # closed or broken
            return False
        finally:
            if self._out:
                self._leave_queue()

    def _transmit(self, connection: StreamConnection, messages: Messages) -> bool:
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

    def _start_writing(self, connection: StreamConnection) -> None:
        with self._lock:
            if connection in self._connections:
                self._loop.add_writer(connection.fd, self._write_rest, connection)
        self._leave_rest()

    def _write_rest(self, connection: StreamConnection) -> None:
        with self._lock:
            try:
                done = connection.flush()
            except OSError:
                done = True
                connection.end()
            if done:
                connection.writing = False
                self._loop.remove_writer(connection.fd)
        self._leave_rest()
        if done and self.on_sent is not None:
            self.on_sent()

    def _flush(self) -> None:
        self._flush_due = False
        if self._lock.acquire(blocking=False):
            self._send_held()  # else the thread that sends now leaves the rest to a later turn

    def _leave_rest(self) -> None:
        """Have the loop send what others have queued. Call it whenever the lock was held: a flush may have found it."""
        if self._out:
            self._leave_queue()

    # --- in ---

    def _read(self, connection: StreamConnection, on_loop: bool) -> bool:
        """Read *connection* once, and handle what has arrived. Return True if more may be left. See `net.reading`."""
        thread = threading.get_ident()
        if on_loop:
            self._thread = thread
        rest, connection.rest = connection.rest, None
        if rest is not None and not connection.joined and self._for_loop.waiting:  # perhaps since `_go_on`
            self._leave(rest, connection)
            return False
        try:
            with self._receiving:
                if connection not in self._connections:
                    return False
                chunks = connection.receive() if rest is None else rest
        except BlockingIOError:
            return False
        except OSError:
            chunks = None
        if chunks is None:
            self._end(connection)
            return False
        self._delivering, well, chunks = thread, True, iter(chunks)
        try:
            for records, big in chunks:
                first = not connection.joined and not connection.identity  # the HELLO; the Join is behind it
                well = well and self._received(connection, records, connection.placed(big) if big else big)
                if not (first or connection.joined) and self._for_loop.waiting:  # the Join: longer chunks may follow
                    self._leave(chunks, connection)
                    break
            if self.on_drained is not None:
                self.on_drained()
        except (RemoteWireError, MemoryError) as error:
            self._warn(connection.identity, error)
            well = False
        finally:
            self._delivering = 0
            if self._flush_due:
                self._flush()
        if not well:
            self._end(connection)
        return well and connection.rest is None and (connection.more or rest is not None)

    def _leave(self, rest: Iterator[Chunk], connection: StreamConnection) -> None:
        """Leave *rest*, which *connection* has sent, until it has joined, or no message waits for the loop."""
        connection.rest = rest
        if not connection.going_on:
            connection.going_on = True
            self._wake(functools.partial(self._go_on, connection))

    def _go_on(self, connection: StreamConnection) -> None:
        """Have the rest of what *connection* has sent handled, as `_leave` says. Loop thread."""
        if not connection.joined and self._for_loop.waiting and connection in self._connections:
            self._loop.call_soon(self._go_on, connection)
            return
        connection.going_on = False
        if connection in self._connections:
            self._network.reading.again(functools.partial(self._read, connection))

    # --- the end ---

    def close(self, linger_ms: int = 0) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._closed = True  # from now on no other thread writes
        if linger_ms:
            send_rest(self._connections, linger_ms)
        for connection in list(self._connections):
            self._close(connection)
        self._network._sockets.discard(self)
