"""ZAP (ZeroMQ RFC 27): whom a context's CURVE servers let in.

libzmq asks whoever listens on `ENDPOINT` of its context about each connection whose key it has verified, and waits.
pyzmq's own authenticators are not used: they let NULL into every domain, know one list for all keys, and need a thread
or zmq.asyncio's sockets. Nobody is let in by default: where this handler does not run, sockets with
ZAP_ENFORCE_DOMAIN refuse every connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from rlinf_actors.net.loop import handling_failed
from rlinf_actors.security.gate import Gate

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
