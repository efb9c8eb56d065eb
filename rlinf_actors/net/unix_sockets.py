"""Unix SOCK_SEQPACKET sockets between processes of one machine: the peer's credentials, and packets that wait to leave.

Used by agentd, templates, workers and their children. `agentd.keeper` imports the standard library only and has its
own copy of `peer_of`.
"""

from __future__ import annotations

import collections
import socket
import struct

_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process that connected, or listened, at the other end."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class PacketQueue:
    """Packets on their way to one peer, in order. Nothing here blocks. One thread at a time.

    The owner watches the socket for room while the queue is not empty, and then calls `flush`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._packets: collections.deque[bytes] = collections.deque()

    def __len__(self) -> int:
        return len(self._packets)

    def send(self, packet: bytes) -> bool:
        """Send a packet after those that wait. Return True if none waits any more."""
        self._packets.append(packet)
        return len(self._packets) == 1 and self.flush()

    def flush(self) -> bool:
        """Send what the peer has room for. Return True if no packet waits any more.

        Packets for a peer that has ended are dropped: its end is seen where the socket is read.
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
