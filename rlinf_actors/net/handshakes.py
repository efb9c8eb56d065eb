"""Handshakes of ZeroMQ, those that failed above all, as libzmq tells of them on a socket's monitor.

It names neither the peer nor its key (that is in a draft of libzmq), only what went wrong.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlinf_actors.security.gate import Gate

FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_REASONS = {
    _MISMATCH: "it came without a key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it expected a server with another key than this one's",
}


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
        name = f"inproc://monitor-{id(socket)}"
        socket.monitor(name, events)
        self._socket: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # else the I/O thread of libzmq waits for us in a flood
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(name)
        self._fd = int(self._socket.getsockopt(zmq.FD))
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
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                message = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._on_event(int(message["event"]), int(message["value"]))
        self._loop.call_soon(self._drain)  # the FD says nothing of what is there already


class Tally:
    """Tells a gate of handshakes that failed at a server: each kind once in a turn of the loop, with their number.

    Args:
        gate: is told.
        loop: whose turns they are.
    """

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop
        self._counts: collections.Counter[str] = collections.Counter()

    def failed(self, event: int, value: int) -> None:
        """For Handshakes."""
        if not self._counts:
            self._loop.call_soon(self._tell)
        self._counts[at_server(value)] += 1

    def _tell(self) -> None:
        counts, self._counts = self._counts, collections.Counter()
        for why, times in counts.items():
            self._gate.refused("", "", why, times)


def at_server(value: int) -> str:
    """What the value of HANDSHAKE_FAILED_PROTOCOL means at a CURVE server, of whoever came."""
    return _REASONS.get(value, "its handshake was malformed")


def at_client(event: int, value: int, keyed: bool) -> tuple[str, bool]:
    """What went wrong, for whoever connects, and whether it is for good: libzmq does not try again then.

    Args:
        event, value: of the monitor.
        keyed: whether we came with a key.
    """
    if event == int(zmq.EVENT_HANDSHAKE_FAILED_AUTH):
        return "this process's key is not admitted there: it is not listed, or revoked (`rlinf-actors keys list`)", True
    mismatch = event == int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) and value == _MISMATCH
    if not keyed:  # either end may see it first, and close
        return "what listens there wants a key, and this process has none (`rlinf-actors keys enroll`)", mismatch
    if mismatch:
        return "what listens there takes no keys, and this process insists on them", True
    return (
        "what listens there does not have the key that is expected of it: it is the head of another user or cluster",
        False,
    )
