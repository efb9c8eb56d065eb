"""ZAP (ZeroMQ RFC 27): whom a context's CURVE servers let in.

libzmq asks whoever listens on `ENDPOINT` of its context about each connection whose key it has verified, and waits.
pyzmq's own authenticators are not used: they let NULL into every domain, know one list for all keys, and need a thread
or zmq.asyncio's sockets. Nobody is let in by default: where this handler does not run, sockets with
ZAP_ENFORCE_DOMAIN refuse every connection.

Handshakes of ZeroMQ, those that failed above all, as libzmq tells of them on a socket's monitor.

It names neither the peer nor its key (that is in a draft of libzmq), only what went wrong.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import itertools
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from rlinf_actors.net.loop import handling_failed
from rlinf_actors.security.members import Gate, fingerprint

if TYPE_CHECKING:
    import asyncio

    from rlinf_actors.security.members import Gate

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
BATCH = 32
"""Requests that are answered before other callbacks of the loop get a turn: strangers can make any number of them."""
_FRAMES = 6
"""Of a request, before its credentials: version, request id, domain, address, routing id of the server, mechanism."""


@dataclass(frozen=True)
class Verdict:
    """The answer to one request.

    Attributes:
        reply: its frames.
        gate: of the domain, None where there is none.
        key: the public key that was turned away, "" if there was none or it was let in.
        address: of the peer.
        why: it was turned away; "" if the gate said so.
    """

    reply: list[bytes]
    gate: Gate | None = None
    key: str = ""
    address: str = ""
    why: str = ""


def judge(request: Sequence[bytes], gates: Mapping[str, Gate]) -> Verdict:
    """Decide about one connection. Pure.

    Args:
        request: the frames of a ZAP request.
        gates: by domain; only these exact ones are served.
    """
    if len(request) < _FRAMES or request[0] != VERSION:
        number = request[1] if len(request) > 1 else b""
        return Verdict(_answer(number, b"500", b"not a request of ZAP 1.0"), why="a malformed request")
    _, number, domain, address, _, mechanism = request[:_FRAMES]
    credentials = request[_FRAMES:]
    where = address.decode(errors="replace")
    gate = gates.get(domain.decode(errors="replace"))
    if gate is None:
        return Verdict(_answer(number, b"400", b"unknown domain"), None, "", where, f"unknown domain {domain!r}")
    if mechanism != b"CURVE":
        return Verdict(_answer(number, b"400", b"a key is needed"), gate, "", where, f"mechanism {mechanism!r}")
    if len(credentials) != 1 or len(credentials[0]) != 32:
        return Verdict(_answer(number, b"400", b"malformed credentials"), gate, "", where, "malformed credentials")
    key: str = z85.encode(credentials[0]).decode()
    if gate.admit(key) is None:
        return Verdict(_answer(number, b"400", b"this key is not admitted"), gate, key, where)
    return Verdict(_answer(number, b"200", b"", key.encode()), gate, "", where)


def _answer(number: bytes, code: bytes, text: bytes, user_id: bytes = b"") -> list[bytes]:
    return [VERSION, number, code, text, user_id, b""]


class ZapHandler:
    """Answers the requests of one context on one event loop. Loop thread only.

    Args:
        context: whose sockets ask; there is one handler in each.
        loop: the loop that answers.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gates: dict[str, Gate] = {}
        self._again: asyncio.Handle | None = None
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(ENDPOINT)
            self._fd = int(self._socket.getsockopt(zmq.FD))
            loop.add_reader(self._fd, self._drain)
        except BaseException:
            self._socket.close()
            raise

    def serve(self, domain: str, gate: Gate) -> None:
        """Ask *gate* about connections to this domain from now on; before the first socket of it is bound."""
        self._gates[domain] = gate

    def leave(self, domain: str) -> None:
        """Let nobody into this domain any more. Unknown ones are ignored."""
        self._gates.pop(domain, None)

    def close(self) -> None:
        """Answer nobody any more: new connections are refused. Twice is fine."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _drain(self) -> None:
        """Answer all who wait: the socket's FD is edge-triggered, and the next word of it comes after EAGAIN."""
        if self._again is not None:  # or each word of the FD in a flood would add another one to every turn
            self._again.cancel()
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._reply(request))
        self._again = self._loop.call_soon(self._drain)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        try:
            verdict = judge(request, self._gates)
            if verdict.reply[2] != b"200":
                self._turned_away(verdict)
            return verdict.reply
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            # where this process goes on, who asked waits for an answer, and is not let in
            handling_failed(self._loop, "deciding about a connection", error, None)
            return _answer(request[1] if len(request) > 1 else b"", b"500", b"internal error")

    def _turned_away(self, verdict: Verdict) -> None:
        if verdict.gate is None:
            log.warning("refused a connection from %s: %s", verdict.address or "an unknown peer", verdict.why)
        else:
            verdict.gate.refused(verdict.key, verdict.address, verdict.why)


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
HANDSHAKES_BATCH = 64
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
        for _ in range(HANDSHAKES_BATCH):
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
