"""ZeroMQ as the network of a process: one context, its listeners and its links. See net.sockets for the rules.

The socket options that make up what net.security has decided.

libzmq copies a socket's options when it binds or connects: whatever is set here counts for what is bound next, and one
socket can listen on a unix socket and then, with CURVE, on TCP. Not the other way round: what has a domain keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from rlinf_actors import forks
from rlinf_actors.errors import ConfigError
from rlinf_actors.exhaustion import check_threads, explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import authentication, fault_injection
from rlinf_actors.net.admission import Admission
from rlinf_actors.net.authentication import ZapHandler
from rlinf_actors.net.connection_watch import AT_SERVER, Arrivals, HangUps, end_loop
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.link import Diagnosis, OnFailed, OnMessage, OnReset, OnTurnedAway, Reachability
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.net.reachability import diagnose, look_at
from rlinf_actors.net.shared_memory import Arena
from rlinf_actors.net.socket_security import Mechanism, Proof, Security
from rlinf_actors.net.zmq_socket import Socket
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import LOCAL, Gate, Member

HANDSHAKE_S = 5
"""How long a new connection may take until it has proved itself (libzmq's default is 30 s): a stranger who says
nothing holds a descriptor that long, and one who says much holds memory. libzmq has no limit of connections; see
docs/explanation/security.md."""


def before_bind(socket: zmq.Socket[bytes], mechanism: Mechanism, pair: KeyPair | None, domain: str) -> None:
    """Protect the endpoint that is bound next.

    Args:
        socket: the listener.
        mechanism: how.
        pair: of the listener, for CURVE.
        domain: of ZAP, where a handler decides about every connection.
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if mechanism is Mechanism.IPC:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # beside the directory's mode
        socket.setsockopt(zmq.IPC_FILTER_UID, 0)  # root's emergency stop reaches the clusters of every user
    if mechanism is Mechanism.CURVE:
        assert pair is not None
        # first, and fatal where it cannot be set: a domain that nobody enforces lets everybody in without a handler
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    elif socket.getsockopt(zmq.ZAP_DOMAIN):
        raise ValueError("bind unix sockets before TCP ones: this one would ask for keys too")


def before_connect(socket: zmq.Socket[bytes], proof: Proof) -> None:
    """Have the next connection prove who it is, and insist on its server's key."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.CURVE_SERVERKEY, proof.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, proof.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, proof.pair.secret.encode())


T = TypeVar("T")

ZMQ_THREADS = 2
"""Of a context: one for its sockets, one that closes them."""


def start_shared_thread() -> None:
    """Start the thread that pyzmq keeps for the life of a process to free large buffers that were sent.

    It starts by itself with the first of them; who compares threads before and after wants it there before.
    """
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)


class ZmqNetwork:
    """ZeroMQ sockets on one event loop.

    Args:
        loop: the loop whose thread receives.
        security: which endpoints may be used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, security: Security | None = None) -> None:
        self._loop = loop
        self._security = security or Security()
        check_threads(ZMQ_THREADS)  # libzmq aborts the process where it cannot start one
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(65536, self._context.get(zmq.SOCKET_LIMIT)))
        self._context.socket(zmq.PAIR).close()  # the first one starts its threads
        self._sockets: set[Socket] = set()
        self._zap: ZapHandler | None = None
        self.memory: Arena | None = None
        self.forked = False
        forks.watch(self)

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
    ) -> ZmqListener:
        return _open(lambda: ZmqListener(self, on_message, max_bytes, gate, on_failed))

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        *,
        token: str = "",
        on_turned_away: OnTurnedAway | None = None,
        on_reset: OnReset | None = None,
        on_failed: OnFailed | None = None,
    ) -> ZmqLink:
        proof = self._security.proof(endpoint, token)
        return _open(lambda: ZmqLink(self, endpoint, identity, on_message, proof, on_turned_away, on_reset, on_failed))

    def _ask_for(self, domain: str, gate: Gate) -> None:
        """Have *gate* decide about connections to this domain, before anything listens there."""
        if self._zap is None:
            self._zap = _open(lambda: ZapHandler(self._context, self._loop))
        self._zap.serve(domain, gate)

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        return await look_at(endpoint, timeout_s)

    async def diagnose(self, endpoint: str) -> Diagnosis:
        return await diagnose(endpoint)

    def soon(self, function: Callable[[], object]) -> None:
        if not self.forked:
            call_threadsafe(self._loop, function)

    def note_fork(self) -> None:
        """The sockets and their thread are the parent's, and using them would spin or corrupt."""
        self.forked = True

    def close(self) -> None:
        for socket in list(self._sockets):
            socket.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()


def _open(make: Callable[[], T]) -> T:
    try:
        return make()
    except zmq.ZMQError as error:
        found = OSError(error.errno, error.strerror or str(error))
        raise OSError(error.errno, f"cannot open a socket: {explain(found)}") from None


_domains = itertools.count(1)


class ZmqListener(Socket):
    """A ROUTER."""

    def __init__(
        self,
        network: ZmqNetwork,
        on_message: OnMessage,
        max_bytes: int,
        gate: Gate | None,
        on_failed: OnFailed | None = None,
    ) -> None:
        super().__init__(network, zmq.ROUTER, on_message, on_failed)
        self._paths: list[tuple[str, int]] = []
        self._gate = gate
        self._arrivals: Arrivals | None = None
        self._domain = f"rlinf-actors.{next(_domains)}"
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer raises instead of vanishing
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its half-dead connection
        if max_bytes >= 0:
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        # the default of 100 refuses a burst of agents, and a head that is stopped needs room for all who look at it
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._start()

    def bind(self, endpoint: str) -> str:
        security = self._network._security
        mechanism = security.mechanism(endpoint, "listen on")
        if mechanism is Mechanism.CURVE:
            self._guard(endpoint)
        try:
            with self._lock:
                before_bind(self._socket, mechanism, security.pair, self._domain)
                self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))  # off: else IPv4 ports read ::ffff:a.b.c.d
                self._socket.bind(endpoint)
                actual = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            found = OSError(error.errno, os.strerror(error.errno or 0))
            text = explain(found) if endpoint.endswith(":0") else found.strerror  # it asked for any port
            raise OSError(error.errno, f"cannot listen on {endpoint}: {text}") from None
        if actual.startswith("ipc://"):
            path = actual.removeprefix("ipc://")
            self._paths.append((path, os.stat(path).st_ino))
        elif self._hang_ups is not None:
            self._hang_ups.ports.add(int(actual.rpartition(":")[2]))
        return actual

    def _guard(self, endpoint: str) -> None:
        """From now on the gate decides about connections over TCP, and about every frame. Before the first bind."""
        gate = self._gate
        if gate is None:
            raise ConfigError(f"refusing to listen on {endpoint}: nobody knows whose keys may come in there")
        if self._admission is not None:
            return
        self._network._ask_for(self._domain, gate)
        self._admission, self._hang_ups = Admission(gate), HangUps(self._loop)
        self._arrivals = Arrivals(self._loop, self._hang_ups.ports, HANDSHAKE_S, gate)
        self._handshakes = authentication.Handshakes(self._socket, self._loop, AT_SERVER, self._arrivals.happened)

    def member_of(self, peer: bytes) -> Member | None:
        return LOCAL if self._admission is None else self._admission.member_of(peer)

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        if self._arrivals is not None:
            self._arrivals.close()
        for path, inode in self._paths:  # libzmq closes on a thread of its own, and a process that ends first leaves it
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # not that of a successor
                    os.unlink(path)
        self._paths.clear()

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if fault_injection.active is None:
            self._send(peer, header, parts, now)
        else:
            self._send_with_faults(peer, header, parts, now)


class ZmqLink(Socket):
    """A DEALER connected to one ROUTER."""

    def __init__(
        self,
        network: ZmqNetwork,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        proof: Proof | None,
        on_turned_away: OnTurnedAway | None,
        on_reset: OnReset | None,
        on_failed: OnFailed | None = None,
    ) -> None:
        super().__init__(network, zmq.DEALER, on_message, on_failed)
        self._endpoint = endpoint
        self._on_turned_away = on_turned_away
        self._on_reset = on_reset
        self._key = proof.pair.public if proof is not None else ""
        self._connected = False
        self._shaken = False  # whether the handshake of this connection has ended
        try:
            self._connect(identity, proof)
        except BaseException:
            self.close()  # no descriptor is left, perhaps: the next try must not find fewer
            raise

    def _connect(self, identity: bytes, proof: Proof | None) -> None:
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        # milliseconds; doubles from the one to the other, and libzmq adds no chance then: many links that one restart
        # closes at one moment must not all come back at one moment
        self._socket.setsockopt(zmq.RECONNECT_IVL, random.randint(10, 30))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(500, 1500))
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # else a SYN into a cut is repeated after up to a minute
        self._socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        if proof is not None:
            before_connect(self._socket, proof)
        if self._endpoint.startswith("tcp://") and (self._on_turned_away is not None or self._on_reset is not None):
            events = (
                authentication.CONNECTED
                | authentication.FAILED
                | authentication.SUCCEEDED
                | authentication.DISCONNECTED
            )
            self._handshakes = authentication.Handshakes(self._socket, self._loop, events, self._shook_hands)
        faults = fault_injection.active
        if faults is not None:
            faults.connecting(self, self._endpoint, self._loop)
        self._start()
        self._socket.connect(self._endpoint)

    def _name(self, peer: bytes) -> str:
        return self._endpoint

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        if fault_injection.active is None:
            self._send(b"", header, parts, now)
        else:
            self._send_with_faults(b"", header, parts, now)

    def _shook_hands(self, event: int, value: int) -> None:
        if event == authentication.CONNECTED:
            end_loop(value)
            return
        if event == authentication.DISCONNECTED:
            if not self._shaken and self._on_turned_away is not None:
                self._on_turned_away(authentication.NO_ZEROMQ, False)
            self._shaken = False
            return
        self._shaken = True
        if event != authentication.SUCCEEDED:
            if self._on_turned_away is not None and not authentication.unanswered(event, value):
                self._on_turned_away(*authentication.at_client(event, value, self._key))
        elif not self._connected:
            self._connected = True
        elif self._on_reset is not None:
            self._on_reset()
