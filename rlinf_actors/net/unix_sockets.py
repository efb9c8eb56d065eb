"""Unix sockets: who may have made one, the peer's credentials, and a queue of packets (SOCK_SEQPACKET)."""

from __future__ import annotations

import collections
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable
from typing import NoReturn

from rlinf_actors.errors import ConfigError

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a unix socket's connection."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def trusted(uid: int) -> bool:
    """Return True if *uid* is this process's user or root: this process trusts what they own and run."""
    return uid in (os.geteuid(), 0)


def check_place(path: str) -> None:
    """Check that only this user and root can have made the socket at *path*, or can make it.

    What speaks there is then the head of this user, or of root. libzmq connects by itself, and connects again to what
    it finds there then; so the place is checked, and not one connection.

    Raises:
        ConfigError: the socket or its directory belongs to another user, or others may write to the directory.
    """
    place = os.path.dirname(path)
    while (found := _status(os.stat, place)) is None:  # what is not there yet is made by whoever may write above it
        place = os.path.dirname(place)
    if not trusted(found.st_uid):
        _refuse(path, f"its directory {place} belongs to {user_name(found.st_uid)}")
    there = _status(os.lstat, path)
    if there is not None and not trusted(there.st_uid):
        _refuse(path, f"it belongs to {user_name(there.st_uid)}")
    kept = there is not None and found.st_mode & stat.S_ISVTX  # others cannot rename or remove it there
    if found.st_mode & 0o022 and not kept:
        _refuse(path, f"other users may write to {place}")


def _status(look: Callable[[str], os.stat_result], path: str) -> os.stat_result | None:
    try:
        return look(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _refuse(path: str, why: str) -> NoReturn:
    raise ConfigError(
        f"refusing to connect to the head at {path}: {why}, so another user's program could pose as the head. Name a "
        "head of your own, or of root"
    )


def user_name(uid: int) -> str:
    """Return a user for people: the name, or the number of a user without one."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


SUFFIX = "_u"
"""End of the path of a worker's stream socket, which is beside the socket of its ZeroMQ listener. agentd removes what
begins with a worker's id and "_"."""


class PacketQueue:
    """Outgoing packets of one unix socket, in order. No method blocks. Not thread-safe.

    While packets are queued, the caller must call `flush` whenever the socket becomes writable.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._packets: collections.deque[bytes] = collections.deque()

    def __len__(self) -> int:
        return len(self._packets)

    def send(self, packet: bytes) -> bool:
        """Send a packet after those that are queued; if the socket is full, queue the packet.

        Returns:
            True if no packet is queued afterwards. If False, the caller must call `flush` when the socket becomes
            writable.
        """
        self._packets.append(packet)
        return len(self._packets) == 1 and self.flush()

    def flush(self) -> bool:
        """Send queued packets as long as the socket takes them. Return True if the queue is empty afterwards.

        If the peer has closed the connection, drop the packets. The code that reads the socket notices that.
        """
        try:
            while self._packets:
                self._socket.send(self._packets[0], socket.MSG_DONTWAIT)
                self._packets.popleft()
        except BlockingIOError:
            return False
        except ConnectionError:
            self._packets.clear()
        return True
