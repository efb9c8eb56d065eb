"""The ZAP handler (ZeroMQ RFC 27): answers libzmq's requests to admit or reject a connection to a CURVE server.

pyzmq's own authenticators are not used: they admit NULL connections to every domain, keep one list of keys for all
domains, and need a thread or zmq.asyncio's sockets. Without this handler libzmq admits no connection, since listeners
set ZAP_ENFORCE_DOMAIN. Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec
import zmq
from zmq.utils import z85

from rlinf_actors.net.loop import handling_failed
from rlinf_actors.security.members import Gate

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
BATCH = 32
"""Most requests that are answered in one turn of the loop. Any peer can cause many of them."""
_FRAMES = 6  # of a request before its credentials: version, id, domain, address, routing id of the server, mechanism


class Verdict(msgspec.Struct, frozen=True):
    """The answer to one ZAP request of libzmq, and what the log says about a rejection.

    Attributes:
        reply: the frames of the answer.
        gate: the gate that decides about connections to the requested ZAP domain, None if that domain has no gate.
        key: the public key that the gate rejected; "" if it rejected none.
        address: the IP address of the peer.
        why: the reason if a connection was rejected before the gate saw a key, otherwise "".
    """

    reply: list[bytes]
    gate: Gate | None = None
    key: str = ""
    address: str = ""
    why: str = ""


def judge(request: Sequence[bytes], gates: Mapping[str, Gate]) -> Verdict:
    """Decide whether a connection is admitted.

    Args:
        request: the frames of libzmq's ZAP request. They name the domain of the listener and the peer's public key.
        gates: the gate of each ZAP domain. A gate knows which keys are admitted.
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
    # the user id comes back with every frame of the connection: Socket reads the key from there
    return Verdict(_answer(number, b"200", b"", key.encode()), gate, "", where)


def _answer(number: bytes, code: bytes, text: bytes, user_id: bytes = b"") -> list[bytes]:
    return [VERSION, number, code, text, user_id, b""]


class ZapHandler:
    """Answers libzmq's requests to admit or reject connections, for all listeners of one ZeroMQ
    context. Loop thread.
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
        """Let *gate* decide about connections to listeners of the ZAP domain *domain*.

        The caller does this before a socket of that domain binds, because connections to an unknown domain are
        rejected.
        """
        self._gates[domain] = gate

    def close(self) -> None:
        """Stop answering libzmq's requests. libzmq then refuses new CURVE connections. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _drain(self) -> None:
        # the socket's FD is edge-triggered: it reports nothing new before a receive has ended with EAGAIN
        if self._again is not None:
            self._again.cancel()  # in a flood each edge would add another call to every turn of the loop
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
            if verdict.reply[2] == b"200":
                return verdict.reply
            if verdict.gate is None:
                log.warning("refused a connection from %s: %s", verdict.address or "an unknown peer", verdict.why)
            else:
                verdict.gate.refused(verdict.key, verdict.address, verdict.why)
            return verdict.reply
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            # a process that survives this must still answer: the peer waits, and is not admitted
            handling_failed(self._loop, "deciding about a connection", error, None)
            return _answer(request[1] if len(request) > 1 else b"", b"500", b"internal error")
