"""One connection of a unix stream: the bytes that wait to be sent, and the chunk that is being received."""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import select
import socket
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.descriptors import Descriptor, descriptor_of, part_of
from rlinf_actors.net.framing import pack
from rlinf_actors.net.message_socket import Messages
from rlinf_actors.net.stream_framing import Chunk, ChunkReader, prefix

READ = 64 << 10
"""Bytes read at once."""
LARGE = 1 << 20
"""Most bytes of large frames that are received or sent at once."""
BUFFERS = 1024
"""Most buffers of one system call (IOV_MAX)."""
DESCRIPTORS = 4
"""Most descriptors that are received with one read. The kernel closes further ones."""
UNASKED = 1
"""Most descriptors that a peer that has not joined may have passed: its arena's comes right behind its Join."""

_ANCILLARY = socket.CMSG_SPACE(DESCRIPTORS * array("i").itemsize)
_SENDING = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_RECEIVING = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class StreamConnection:
    """One connection of a unix stream.

    Args:
        connection: the connected socket, which belongs to this object from now on.
        most: most bytes of a received chunk.

    Attributes:
        socket, fd: the socket and its descriptor.
        reader: finds the chunks in what arrives.
        joined: True once the peer has joined (`StreamListener.admit`).
        identity: identity of the link at the other end, b"" while unknown, and on the link itself.
        rest: chunks that arrived behind a Join which the loop has not handled yet; None if there are none.
        going_on: True while the loop is to have `rest` handled.
        more: True if the last `receive` may have left something; False if the descriptor announces what comes next.
        unsent: bytes, with descriptors, that wait until the peer has read some.
        writing: True while the loop waits until it can send the rest.
    """

    def __init__(self, connection: socket.socket, most: int) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fd = connection.fileno()
        self.reader = ChunkReader(most)
        self.identity = b""
        self.joined = False
        self.writing = False
        self.rest: Iterator[Chunk] | None = None
        self.going_on = False
        self.more = False
        self.unsent: collections.deque[tuple[memoryview, Sequence[Descriptor]]] = collections.deque()
        self._passed: collections.deque[memoryview] = collections.deque()  # descriptors that have no place yet

    # --- out; the caller holds the socket's lock ---

    def send(self, messages: Messages) -> None:
        """Send messages in as few chunks as possible, and queue what the kernel does not take.

        Raises:
            OSError: the connection is broken.
        """
        sent = 0
        while sent < len(messages):
            records, big, sent = pack(messages, sent)
            if big:
                self._send_large(records, big)
            else:
                self.send_chunk(records)

    def send_chunk(self, records: bytes) -> None:
        """Send, or queue, a chunk without big frames."""
        self.send_bytes(prefix(records, ()) + records)

    def send_bytes(self, data: bytes) -> None:
        """Send, or queue, a whole chunk."""
        size = 0
        if not self.unsent:
            try:
                size = self.socket.send(data, _SENDING)
            except BlockingIOError:
                size = 0
            if size == len(data):
                return
        self.unsent.append((memoryview(data)[size:], ()))

    def _send_large(self, records: bytes, big: Sequence[Buffer]) -> None:
        idle = not self.unsent
        views = [memoryview(part).cast("B") for part in big]
        passed = [found for found in map(descriptor_of, big) if found is not None]
        self.unsent.append((memoryview(prefix(records, views) + records), passed))
        self.unsent.extend((view, ()) for view in views if view)
        if idle:
            self.flush()

    def flush(self) -> bool:
        """Send queued bytes, up to about LARGE of them. Return True if none are left.

        Raises:
            OSError: the connection is broken.
        """
        queue, room = self.unsent, LARGE
        while queue and room > 0:
            views: list[memoryview] = []
            for view, passed in itertools.islice(queue, BUFFERS):
                if passed and views:
                    break  # descriptors go with the first byte of a system call
                views.append(view)
            try:
                size = self._send_views(views, queue[0][1])
            except BlockingIOError:
                return False
            room -= size
            while queue and size >= len(queue[0][0]):
                size -= len(queue.popleft()[0])
            if size:
                queue[0] = (queue[0][0][size:], ())
        return not queue

    def _send_views(self, views: list[memoryview], passed: Sequence[Descriptor]) -> int:
        if passed:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [found.fd for found in passed]))
            try:
                return self.socket.sendmsg(views, [rights], _SENDING)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:  # too many are under way: the peer finds an empty part
                    raise
        return self.socket.sendmsg(views, (), _SENDING)

    # --- in ---

    def receive(self) -> Iterable[Chunk] | None:
        """Read once. Return the chunks that are complete now; None if the peer has closed the connection.

        The caller holds `StreamSocket._receiving`: a closed descriptor's number may already be another file's.

        Raises:
            OSError: the connection is broken, or nothing has arrived (BlockingIOError).
        """
        place = self.reader.place
        if place is not None:
            size = self.socket.recv_into(place[:LARGE], 0, socket.MSG_DONTWAIT)
            self.more = True
            return self.reader.filled(size) if size else None
        data, ancillary, _, _ = self.socket.recvmsg(READ, _ANCILLARY, _RECEIVING)
        self.more = len(data) == READ or bool(ancillary)  # the kernel stops behind a descriptor
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array("i")
                found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
                self._passed.extend(map(part_of, found))
                if len(self._passed) > UNASKED and not self.joined:
                    raise OSError(errno.EMFILE, "a peer that has not joined passes descriptors")
        return self.reader.feed(data) if data else None

    def placed(self, big: list[Buffer]) -> list[Buffer]:
        """Return the big frames of a chunk, with each descriptor that has arrived in the place of its empty frame."""
        if not self._passed:
            return big
        return [part if len(part) or not self._passed else self._passed.popleft() for part in big]

    # --- ends ---

    def end(self) -> None:
        """End the connection at both ends, also where a forked child has a copy of it. Its readers find the end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and close this process's descriptors. Idempotent."""
        self.end()
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptors. The connection goes on if another process has a copy."""
        self.socket.close()
        self.unsent.clear()
        self._passed.clear()


def send_rest(connections: Iterable[StreamConnection], linger_ms: int) -> None:
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
