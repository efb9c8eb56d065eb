"""ZeroMQ as the network of a process: one context with its listeners and links. `net.zmq_socket` has the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import zmq

from rlinf_actors import forks
from rlinf_actors.errors import ConfigError
from rlinf_actors.exhaustion import check_threads, explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import reachability
from rlinf_actors.net.admission import Admission
from rlinf_actors.net.authentication import ZapHandler
from rlinf_actors.net.connection_guard import AT_SERVER, ConnectionGuard
from rlinf_actors.net.connection_watch import Disconnector, LinkEvents, SocketMonitor
from rlinf_actors.net.curve import HANDSHAKE_S, before_bind
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.fair_inbox import FairInbox
from rlinf_actors.net.host import has_name
from rlinf_actors.net.link import (
    PLAIN,
    Diagnosis,
    Link,
    LinkOptions,
    Listener,
    OnAnyThread,
    OnFailed,
    OnMessage,
    Reachability,
    Verbs,
)
from rlinf_actors.net.loop import call_soon, call_threadsafe
from rlinf_actors.net.message_socket import MessageSocket
from rlinf_actors.net.reading import Reading
from rlinf_actors.net.shared_memory import Arena
from rlinf_actors.net.socket_security import Mechanism, Security
from rlinf_actors.net.unread import Connections
from rlinf_actors.net.zmq_hub import ZmqHub, hub_takes
from rlinf_actors.net.zmq_link import NamedLink, ZmqLink
from rlinf_actors.net.zmq_socket import Socket
from rlinf_actors.security.members import LOCAL, Gate, Member

if TYPE_CHECKING:
    from rlinf_actors.net.bulk_handshake import BulkTransport

T = TypeVar("T")

ZMQ_THREADS = 2
"""Threads of a ZeroMQ context: one for its sockets, one that closes them."""
RECEIVED = 64
"""Most chunks of one connection to the head that wait in libzmq. The peer's own libzmq keeps the rest."""
_domains = itertools.count(1)


def start_shared_thread() -> None:
    """Start the thread with which pyzmq frees large buffers after sending. The thread runs until the process ends.

    pyzmq would start it with the first such buffer. A check for threads that a test leaves behind starts it
    before the test, so that it is not reported.
    """
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), copy=False)


class ZmqNetwork:
    """Makes the ZeroMQ listeners and links of one process. They receive on the thread of one event loop.

    Implements `net.link.Network`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, security: Security | None = None) -> None:
        self._loop = loop
        self._security = security or Security()
        check_threads(ZMQ_THREADS)  # libzmq aborts the process if it cannot start one
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(65536, self._context.get(zmq.SOCKET_LIMIT)))
        self._context.socket(zmq.PAIR).close()  # the first socket starts the threads
        self._sockets: set[MessageSocket] = set()
        self._hubs: dict[bool, ZmqHub] = {}
        self._zap: ZapHandler | None = None
        self.memory: Arena | None = None
        self.bulk: BulkTransport | None = None
        self.forked = False
        self._reading: Reading | None = None
        forks.watch(self)

    @property
    def reading(self) -> Reading:
        """Who reads the sockets whose messages any thread may handle. Made when it is first used, on the loop."""
        if self._reading is None:
            self._reading = Reading(self._loop)
        return self._reading

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
        verbs: Verbs | None = None,
    ) -> Listener:
        return _open(lambda: ZmqListener(self, on_message, max_bytes, gate, on_failed, on_any_thread, verbs))

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> Link:
        proof = self._security.proof(endpoint, options.token)
        events = LinkEvents(proof.pair.public if proof is not None else "", options.on_rejected, options.on_reset)
        handlers = on_message, options.on_failed, options.on_any_thread
        if options.to and hub_takes(endpoint):
            keyed = proof is not None  # options of CURVE cannot be unset, so each kind has a hub
            hub = self._hubs.get(keyed) or _open(lambda: ZmqHub(self))
            self._hubs[keyed] = hub
            if not hub.has(endpoint):
                return _open(lambda: hub.link(endpoint, identity, proof, events, *handlers))
        kind = NamedLink if has_name(endpoint) else ZmqLink
        return _open(lambda: kind(self, endpoint, identity, proof, events, *handlers))

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        return await reachability.check(endpoint, timeout_s)

    async def diagnose(self, endpoint: str) -> Diagnosis:
        return await reachability.diagnose(endpoint)

    def soon(self, function: Callable[[], object]) -> None:
        if not self.forked:
            call_threadsafe(self._loop, function)

    def note_fork(self) -> None:
        """Stop all sending of this process, because it is a forked child: the sockets and their threads are the
        parent's.

        `forks` calls this after a fork by user code.
        """
        self.forked = True
        for socket in self._sockets:
            socket.note_fork()

    def close(self) -> None:
        for socket in list(self._sockets):
            socket.close()
        if self._reading is not None:
            self._reading.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()


def _open(make: Callable[[], T]) -> T:
    try:
        return make()
    except zmq.ZMQError as error:
        found = OSError(error.errno, error.strerror or str(error))
        raise OSError(error.errno, f"cannot open a socket: {explain(found)}") from None


class ZmqListener(Socket):
    """A socket that peers connect to: a ROUTER of ZeroMQ. Implements `net.link.Listener`."""

    def __init__(
        self,
        network: ZmqNetwork,
        on_message: OnMessage,
        max_bytes: int,
        gate: Gate | None,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
        verbs: Verbs | None = None,
    ) -> None:
        super().__init__(network, zmq.ROUTER, on_message, on_failed, on_any_thread)
        if verbs is not None:
            self._disconnector = Disconnector(self._loop)
            self._connections = Connections(self._disconnector, self._closing, self._forgotten)
            self._fair = FairInbox(verbs, self._connections, lambda: call_soon(self._loop, self._drain))
            self._socket.setsockopt(zmq.RCVHWM, RECEIVED)
        self._paths: list[tuple[str, int]] = []  # of unix sockets, with their inodes
        self._gate = gate
        self._guard: ConnectionGuard | None = None
        self._domain = f"rlinf-actors.{next(_domains)}"
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer raises instead of vanishing
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its half-dead connection
        if max_bytes >= 0:
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        # the default of 100 refuses a burst of agents, and a stopped head needs room for all reachability checks
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._start()

    def bind(self, endpoint: str) -> str:
        security = self._network._security
        mechanism = security.mechanism(endpoint, "listen on")
        if mechanism is Mechanism.CURVE:
            self._guard_connections(endpoint)
        try:
            with self._lock:
                before_bind(self._socket, mechanism, security.pair, self._domain)
                self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))  # off: else IPv4 ports read ::ffff:a.b.c.d
                self._socket.bind(endpoint)
                actual = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            from rlinf_actors.net import holders  # few processes need it

            found = OSError(error.errno, os.strerror(error.errno or 0))
            text = explain(found) if endpoint.endswith(":0") else found.strerror  # port 0: any port would do
            text = f"cannot listen on {endpoint}: {text}{holders.in_use(endpoint, found)}"
            raise OSError(error.errno, text) from None
        if actual.startswith("ipc://"):
            path = actual.removeprefix("ipc://")
            self._paths.append((path, os.stat(path).st_ino))
        elif self._disconnector is not None:
            self._disconnector.ports.add(int(actual.rpartition(":")[2]))
        return actual

    def _guard_connections(self, endpoint: str) -> None:
        """From now on, check the key of each new TCP connection and of each frame, and limit the connections.

        The caller does this before it binds the first TCP endpoint that needs keys.

        Raises:
            ConfigError: this listener has no gate, so nothing decides which keys are admitted.
        """
        gate = self._gate
        if gate is None:
            raise ConfigError(f"refusing to listen on {endpoint}: nobody knows whose keys may come in there")
        if self._admission is not None:
            return
        network = self._network
        if network._zap is None:
            network._zap = _open(lambda: ZapHandler(network._context, self._loop))
        network._zap.serve(self._domain, gate)
        self._admission = Admission(gate)
        self._disconnector = self._disconnector or Disconnector(self._loop)
        self._guard = ConnectionGuard(self._loop, self._disconnector.ports, HANDSHAKE_S, gate)
        self._monitor = SocketMonitor(self._socket, self._loop, AT_SERVER, self._guard.on_event)

    def _closing(self, key: str, address: str, why: str) -> None:
        """Record why a connection is closed, later: messages may be sent at any point of an event."""
        if self._gate is not None:
            member = self._gate.admit(key)
            call_soon(self._loop, self._gate.refused, key, address, f"{member or 'a process of the cluster'}: {why}")

    def _forgotten(self, peer: bytes) -> None:
        if self._admission is not None:
            self._admission.forget(peer)

    def member_of(self, peer: bytes) -> Member | None:
        return LOCAL if self._admission is None else self._admission.member_of(peer)

    def address_of(self, peer: bytes) -> str:
        return self._admission.address_of(peer) if self._admission is not None else ""

    def admit(self, peer: bytes) -> None:
        """Do nothing: libzmq accepts frames of any size from all peers."""

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        if self._guard is not None:
            self._guard.close()
        for path, inode in self._paths:  # libzmq unlinks on a thread of its own: a process that ends first leaves them
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # not a successor's
                    os.unlink(path)
        self._paths.clear()

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._send(peer, header, parts, now)
