"""Unix SOCK_SEQPACKET sockets of agentd, templates and workers: the peer's credentials and a queue of packets."""

from __future__ import annotations

import collections
import socket
import struct

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a unix socket's connection."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


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
