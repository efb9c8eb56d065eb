"""Handshakes of ZeroMQ, those that failed above all, as libzmq tells of them on a socket's monitor.

It names neither the peer nor its key (that is in a draft of libzmq), only what went wrong.
"""

from __future__ import annotations

import collections
import errno
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from rlinf_actors.security.publickey import fingerprint

if TYPE_CHECKING:  # `rlinf-actors estop` imports this module, and has no time for asyncio
    import asyncio

    from rlinf_actors.security.gate import Gate

FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
CONNECTED = int(zmq.EVENT_CONNECTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
NO_ZEROMQ = "what listens there does not speak as a head does"
"""Then libzmq closes the connection, tells of no handshake, and does not try again."""
_EVENT = struct.Struct("=Hi")
"""Of a monitor's first frame, in the machine's byte order: the event, and its value."""
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_REASONS = {
    _MISMATCH: "it came without a key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it expected a server with another key than this one's",
}
_names = itertools.count(1)
BATCH = 64
"""Events that are taken before other callbacks of the loop get a turn: strangers can make any number of them."""


class Handshakes:
    """Listens to one socket's monitor. Loop thread only.

    Args:
        socket: whose handshakes are watched.
        loop: the loop that tells.
        events: of libzmq.
        on_event: called with each event and its value.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        events: int,
        on_event: Callable[[int, int], None],
    ) -> None:
        self._watched = socket
        self._loop = loop
        self._on_event = on_event
        name = f"inproc://monitor-{next(_names)}"  # no id: libzmq may still have that of one that was just closed
        socket.monitor(name, events)
        self._socket: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # else the I/O thread of libzmq waits for us in a flood
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(name)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)  # an edge before the reader was there

    def close(self) -> None:
        """Stop. Before the watched socket is closed; twice is fine."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._watched.monitor(None, 0)
        self._socket.close()

    def _drain(self) -> None:
        if self._again is not None:  # as in net.zap
            self._again.cancel()
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(*read_event(frames))
        self._again = self._loop.call_soon(self._drain)  # the FD says nothing of what is there already


class GateTally:
    """Tells a gate of connections that came to nothing: each kind once in a turn of the loop, with their number.

    Args:
        gate: is told.
        loop: whose turns they are.
    """

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def note(self, address: str, why: str) -> None:
        """Another one, from this address ("" if unknown)."""
        if not self._counts:
            self._loop.call_soon(self._tell)
        self._counts[address, why] += 1

    def _tell(self) -> None:
        counts, self._counts = self._counts, collections.Counter()
        for (address, why), times in counts.items():
            self._gate.refused("", address, why, times)


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """Return the event and its value that a monitor's message tells of."""
    event, value = _EVENT.unpack(frames[0])
    return int(event), int(value)


def at_server(value: int) -> str:
    """What the value of HANDSHAKE_FAILED_PROTOCOL means at a CURVE server, of whoever came."""
    return _REASONS.get(value, "its handshake was malformed")


def unanswered(event: int, value: int) -> bool:
    """Whether a handshake failed only because nobody answered in time: a process that stands still refuses nobody."""
    return event == int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) and value not in (errno.EPIPE, errno.ECONNRESET)


def at_client(event: int, value: int, key: str) -> tuple[str, bool]:
    """What went wrong, for whoever connects, and whether it is for good: libzmq does not try again then.

    Args:
        event, value: of the monitor.
        key: the public one that we came with, "" without.
    """
    if event == int(zmq.EVENT_HANDSHAKE_FAILED_AUTH):
        return (
            f"this process's key ({fingerprint(key)}) is not admitted there: it is not listed, or revoked, or has "
            "expired (`rlinf-actors keys list --all` on the head's machine)",
            True,
        )
    mismatch = event == int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) and value == _MISMATCH
    if not key:  # either end may see it first, and close
        return "what listens there wants a key, and this process has none (`rlinf-actors keys enroll`)", mismatch
    if mismatch:
        return "what listens there takes no keys, and this process insists on them", True
    return (
        "what listens there does not have the key that is expected of it: it is the head of another user or cluster, "
        "or has a new key (`rlinf-actors keys trust`). (On loopback this user's own key is expected, unless head.key "
        "is beside it or RLINF_ACTORS_KEYS names another directory of keys. Or it has too many connections, see "
        "`rlinf-actors events --kind refused`)",
        False,
    )
