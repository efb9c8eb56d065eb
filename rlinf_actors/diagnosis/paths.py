"""The test of the network path between two nodes: a short transfer in both directions. Blocks; on a thread of agentd.

The far node listens at one of its addresses for one connection. Both ends prove by a challenge that they know the
secret, which the far node has made, and which the near node has from the head over its authenticated connection; no
data of users travels. Then the near node sends for a limited time and up to a limited size, and then the far node.

Packets may be lost in one direction only. Then no connection comes about, but the far node's kernel still knows the
request for one if that direction works: `Listener.heard` says so.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time

from rlinf_actors import procfs
from rlinf_actors.wire.check_values import LISTEN_S, RTT_S, PathAnswer, PathTest, Transfer

_CHALLENGE = 32
"""Bytes of a challenge, and of the proof of the secret."""
_RESULT = struct.Struct("!Qd")
"""What the far node has received: bytes and seconds."""
_BLOCK = bytes(1 << 20)
_LATE_S = 0.5
"""Seconds that a receiver waits longer than the sender sends: a slow path holds data that was sent."""
_SYN_RECEIVED = "03"
"""linux/tcp_states.h, in /proc/net/tcp: a request for a connection whose answer is not acknowledged."""


class Listener:
    """The far end of one test.

    Args:
        ip: the address of this machine at which to listen.

    Attributes:
        port: the TCP port.
        secret: what the near end must know.

    Raises:
        OSError: this machine has no such address, or nothing is left to open a socket with.
    """

    def __init__(self, ip: str) -> None:
        self.secret = secrets.token_bytes(_CHALLENGE)
        self._socket = socket.socket(_family(ip), socket.SOCK_STREAM)
        try:
            self._socket.bind((ip, 0))
            self._socket.listen(1)
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])

    def serve(self, size: int, limit_s: float) -> None:
        """Take part in one test, or return after LISTEN_S seconds. The near end reports every failure."""
        deadline = time.monotonic() + LISTEN_S
        with contextlib.suppress(OSError, ValueError):  # also closed meanwhile
            while (left_s := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(RTT_S)
                    if self._admits(connection):
                        there = _receive(connection, limit_s)
                        connection.settimeout(RTT_S)
                        connection.sendall(_RESULT.pack(there.size, there.seconds))
                        _send(connection, size, limit_s)
                        return

    def heard(self) -> bool:
        """Return True if a request for a connection has arrived whose answer did not reach the near end."""
        port = f":{self.port:04X}"
        lines = (procfs.text_of("/proc/net/tcp") + procfs.text_of("/proc/net/tcp6")).splitlines()
        rows = [line.split() for line in lines]
        return any(len(row) > 3 and row[1].endswith(port) and row[3] == _SYN_RECEIVED for row in rows)

    def close(self) -> None:
        """Stop listening; `serve` returns. May be called again. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends an accept() of another thread
        self._socket.close()

    def _admits(self, connection: socket.socket) -> bool:
        """Return True if the near end knows the secret, and prove that this end knows it."""
        ours = os.urandom(_CHALLENGE)
        try:
            connection.sendall(ours)
            theirs, proof = _exactly(connection, _CHALLENGE), _exactly(connection, _CHALLENGE)
            if not hmac.compare_digest(proof, _proof(self.secret, b"near", ours + theirs)):
                return False
            connection.sendall(_proof(self.secret, b"far", ours + theirs))
        except (OSError, EOFError):  # a stranger
            return False
        return True


def measure(test: PathTest) -> PathAnswer:
    """Connect to the far end of *test*, and return what arrived in each direction, or why nothing did."""
    source = ""
    try:
        with socket.socket(_family(test.ip), socket.SOCK_STREAM) as connection:
            connection.settimeout(RTT_S)
            if test.source:
                connection.bind((test.source, 0))
            connection.connect((test.ip, test.port))
            source = str(connection.getsockname()[0])
            connection.settimeout(2 * RTT_S)  # so long a stranger may hold the listener up
            theirs, ours = _exactly(connection, _CHALLENGE), os.urandom(_CHALLENGE)
            begun = time.monotonic()
            connection.sendall(ours + _proof(test.secret, b"near", theirs + ours))
            proof = _exactly(connection, _CHALLENGE)
            rtt_s = time.monotonic() - begun
            if not hmac.compare_digest(proof, _proof(test.secret, b"far", theirs + ours)):
                return PathAnswer(source=source, fault="another process listens there", kind="failed")
            _send(connection, test.size, test.limit_s)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(RTT_S + test.limit_s + _LATE_S)
            size, seconds = _RESULT.unpack(_exactly(connection, _RESULT.size))
            back = _receive(connection, test.limit_s)
            return PathAnswer(source=source, there=Transfer(size, seconds), back=back, rtt_s=rtt_s)
    except TimeoutError:
        text = "nothing came back on the connection" if source else f"no answer in {RTT_S:g} s"
        return PathAnswer(source=source, fault=text, kind="failed" if source else "timeout")
    except ConnectionRefusedError:
        return PathAnswer(fault="the connection was refused: a firewall rejects it", kind="refused")
    except (OSError, EOFError) as error:
        return PathAnswer(source=source, fault=f"{getattr(error, 'strerror', None) or error}", kind="failed")


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _proof(secret: bytes, end: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, end + challenges, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next *size* bytes. Raise EOFError if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the far end closed the connection")
        data += more
    return bytes(data)


def _send(connection: socket.socket, size: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while size > 0 and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            size -= connection.send(memoryview(_BLOCK)[:size])
        except TimeoutError:
            return


def _receive(connection: socket.socket, limit_s: float) -> Transfer:
    """Receive until the sender has ended, or for a little longer than it may send."""
    room, size, begun = bytearray(len(_BLOCK)), 0, 0.0
    last = deadline = time.monotonic() + RTT_S
    while (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            got = connection.recv_into(room)
        except TimeoutError:
            break
        last = time.monotonic()
        if not begun:
            begun, deadline = last, last + limit_s + _LATE_S
        size += got
        if not got:
            break
    return Transfer(size, max(last - begun, 1e-6) if begun else 0.0)
