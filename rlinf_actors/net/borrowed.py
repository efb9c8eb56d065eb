"""Connections that libzmq has, borrowed for a moment: looked at or shut down below it.

It tells of descriptors by their numbers, and closes them on a thread of its own: a number may be another's by now. So
what is looked at is a copy, which was seen to be a connection to a port of ours; who compares the other end's address
with the one that it had knows that it is the same one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator

_INFO = struct.Struct("=128x Q 64x QQ")
"""Of struct tcp_info in linux/tcp.h, in the machine's byte order: tcpi_bytes_received, tcpi_bytes_sent,
tcpi_bytes_retrans; since Linux 4.19.
"""


class Lens:
    """One descriptor in which connections are looked at, one after the other: it works also where none is left.

    Attributes:
        connection: what `on` has found.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # any family will do: no call that is made on it depends on it
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def close(self) -> None:
        """Twice is fine."""
        if self._nothing >= 0:
            os.close(self._nothing)
            self._nothing = -1
            self.connection.close()

    @contextlib.contextmanager
    def on(self, fd: int, ports: Collection[int]) -> Iterator[tuple[str, int] | None]:
        """Have a copy of a descriptor in `connection`: until the end of the block the connection stays open.

        Yields the other end's address and port, if it is a connection to one of these ports; None: it has ended, or is
        something else.
        """
        place = self.connection.fileno()
        try:
            os.dup2(fd, place, inheritable=False)
        except OSError:  # closed already
            yield None
            return
        try:
            yield _other_end(self.connection, ports)
        finally:
            os.dup2(self._nothing, place, inheritable=False)


def borrow(fd: int, ports: Collection[int]) -> tuple[socket.socket, tuple[str, int]] | None:
    """A copy of a descriptor to keep, and the other end's address and port; as Lens.on. Who gets it closes it."""
    connection = _copy(fd)
    if connection is None:
        return None
    peer = _other_end(connection, ports)
    if peer is None:
        connection.close()
        return None
    return connection, peer


def end_loop(fd: int) -> None:
    """Shut a connection down if TCP has made it of a socket with itself, and leave any other alone.

    Where nobody listens at a port that the kernel gives to outgoing connections, one that tries again and again gets
    this very number at last: it hears what it says, and keeps the port from whoever is to listen there.
    """
    connection = _copy(fd)
    if connection is None:
        return
    with connection, contextlib.suppress(OSError):  # not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours == connection.getpeername():
            connection.shutdown(socket.SHUT_RDWR)


def _copy(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:  # closed already, or no descriptor is left
        return None
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, copy)
    except OSError:  # a file's by now
        os.close(copy)
        return None


def _other_end(connection: socket.socket, ports: Collection[int]) -> tuple[str, int] | None:
    with contextlib.suppress(OSError):  # no socket, or not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours[1] in ports:
            host, port = connection.getpeername()[:2]
            return host, port
    return None


def moved(connection: socket.socket) -> tuple[int, int]:
    """Bytes that this end has sent, and that it has received.

    Where the kernel does not say, nothing: (0, 0).
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return 0, 0
    received, sent, again = _INFO.unpack(info)
    return sent - again, received
