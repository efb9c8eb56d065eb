"""Connections to several heads at once, without an event loop: for `rlinf-actors estop`.

asyncio takes longer to import than an emergency stop may take, so this is a second, small client of the head beside
`net.rpc`. It blocks, on one thread, and polls all sockets together, so a head that does not answer delays no other. A
head may have several routes (a unix socket, TCP). All of them are opened, and a request is sent on the first route
whose handshake succeeds. So every route must lead to a process that may speak for that head. libzmq reconnects after a
connection is lost; `BlockingClient` reports the loss, and sends requests without an answer again. Names are resolved,
and key files read, on daemon threads, because a name service or file system that does not answer would delay all heads
and the end of the process.

This module must never raise because of one head, since the other heads would then not be asked. It must never import
asyncio, click or rich.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Union

import msgspec
import zmq

from rlinf_actors.errors import ConfigError, RemoteWireError, RlinfActorsError
from rlinf_actors.net.curve import (
    CONNECTED,
    DISCONNECTED,
    FAILED,
    NO_ZEROMQ,
    SUCCEEDED,
    before_connect,
    read_event,
    unanswered,
    why_refused,
)
from rlinf_actors.net.framing import pack, unpack
from rlinf_actors.net.host import has_name, split_address
from rlinf_actors.net.socket_security import Security, is_tcp
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.control_codec import Body, Failed, Notice, Reply, Request

CONNECT_S = 2.0
"""Seconds after which a machine that has not answered a connection attempt counts as silent. The kernel repeats a lost
SYN after 1 s."""
MAX_SOCKETS = 16384
"""Most ZeroMQ sockets of a client. Each route needs three; libzmq's default of 1,023 is too low for many heads."""
MAX_ANSWER = 4 << 20
"""Most bytes of a message, so that another user's head cannot fill the memory. An answer about 10,000 robot workers
has 1 MiB."""
READ_S = 0.02
"""Seconds for which one step reads messages before it returns to connections that have just been made."""
HANDSHAKE_MS = 30_000
"""Milliseconds that libzmq allows for a handshake: long, because the caller decides how long to wait for a head."""
_RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
_EVENTS = FAILED | SUCCEEDED | DISCONNECTED | _RETRIED | CONNECTED


class HeadUp(msgspec.Struct, frozen=True):
    """Event of `BlockingClient.step`: a connection to the head is established."""

    head: RemoteHead


class HeadDown(msgspec.Struct, frozen=True):
    """Event of `BlockingClient.step`: no route to the head works now. `why` names the failure of each route, for
    people.
    """

    head: RemoteHead
    why: str


class HeadAnswered(msgspec.Struct, frozen=True):
    """Event of `BlockingClient.step`: the head answered a request. `body` is a Failed if the head
    refused the request.
    """

    head: RemoteHead
    body: Union[Body, Failed]


Event = Union[HeadUp, HeadDown, HeadAnswered]
Route = tuple[str, Union[Security, Callable[[], Security]]]
"""An endpoint and the keys for it. A function in place of the keys loads them, and is called on a thread of its own,
because it may block."""


class RemoteHead:
    """One head that a BlockingClient connects to, and the state of the connection.

    Args:
        ways: the routes to the head. The caller may append routes; the next `BlockingClient.add` uses them.
        fault: why some routes are missing, for people; "" if none are.

    Attributes:
        ways: as given.
        up: True while a connection to the head is established.
        added: when `BlockingClient.add` was last called for the head, in seconds of CLOCK_MONOTONIC.
        heard: when the head's last message arrived or its connection was established, in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, ways: Sequence[Route], fault: str = "") -> None:
        self.ways = ways
        self.fault = fault
        self.up = False
        self.added = self.heard = 0.0
        self._lines: list[_Line] = []
        self._resolving = 0
        self._faults: list[str] = []
        self._unanswered: dict[int, bytes] = {}
        self._on: _Line | None = None


class _Line(msgspec.Struct):
    """One open route to a head: a DEALER socket and the socket that reports its events.

    Attributes:
        endpoint: the head's endpoint.
        key: this process's public key, "" without keys.
        socket: sends requests and receives answers.
        monitor: receives the events of `socket`.
        began: when the route was opened, in seconds of CLOCK_MONOTONIC.
        read_at: when the last message was read.
        shaken: True after the handshake of the present connection has succeeded or was rejected.
        why: why the route does not work, "" if it works or is still being tried.
    """

    endpoint: str
    key: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    began: float
    read_at: float = 0.0
    shaken: bool = False
    why: str = ""


class _Name(msgspec.Struct):
    """A route to a head that is not open yet: a thread resolves the host's name and loads the keys.

    The thread replaces `endpoint` and `security` by its results. If it fails, `why` is the reason, otherwise "".
    """

    head: RemoteHead
    endpoint: str
    security: Security | Callable[[], Security]
    why: str = ""


class BlockingClient:
    """Sends requests to several heads and collects their answers, for `rlinf-actors estop`. One thread only."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._poller = zmq.Poller()
        self._heads: list[RemoteHead] = []
        self._by_socket: dict[object, tuple[RemoteHead, _Line]] = {}
        self._events: list[Event] = []
        self._asked = 0
        self._names: dict[int, _Name] = {}

    # --- heads ---

    def add(self, head: RemoteHead) -> None:
        """Start to connect to a head by all its routes, without waiting for a connection."""
        self._heads.append(head)
        head.added = time.monotonic()
        head._faults = [head.fault] if head.fault else []
        for endpoint, security in head.ways:
            if isinstance(security, Security) and not has_name(endpoint):
                self._open(head, endpoint, security)
                continue
            try:
                self._resolve(head, endpoint, security)
            except (OSError, RuntimeError) as error:  # too many descriptors, or threads
                head._faults.append(f"{endpoint}: {error}")
        self._judge(head)

    def drop(self, head: RemoteHead) -> None:
        """Close all connections to a head. Idempotent."""
        if head in self._heads:
            self._heads.remove(head)
            for line in head._lines:
                self._close(line)
            head._lines.clear()
            head._faults.clear()
            head.up, head._on, head._resolving = False, None, 0

    def watch(self, fd: int, events: int) -> None:
        """Make `step` also wait for *events* (a mask of poll(2)) of the descriptor *fd*."""
        self._poller.register(fd, events)

    def close(self) -> None:
        """Close the connections to all heads at once. Requests without an answer are dropped. Idempotent."""
        for head in list(self._heads):
            self.drop(head)
        self._context.destroy(linger=0)
        for fd in self._names:
            os.close(fd)
        self._names.clear()

    # --- asking ---

    def ask(self, head: RemoteHead, body: Body) -> None:
        """Send a request to a head, now or as soon as a connection is established, and again by each later connection
        until it is answered. `step` later returns the HeadAnswered.
        """
        self._asked += 1
        head._unanswered[self._asked] = control_codec.encode(Request(self._asked, body))
        self._send(head, [head._unanswered[self._asked]])

    def tell(self, head: RemoteHead, body: Body) -> None:
        """Send a notice to a head. If no connection to the head is established, the notice is dropped."""
        self._send(head, [control_codec.encode(Notice(body))])

    def step(self, timeout_s: float | None) -> tuple[list[Event], dict[int, int]]:
        """Wait until a head has an event or a descriptor of `watch` is ready, but at most *timeout_s* seconds.

        None as *timeout_s* means no limit.

        Returns:
            The events of heads, and the ready descriptors with their masks of poll(2). Both are empty after a timeout.
        """
        ready: dict[int, int] = {}
        said: list[tuple[RemoteHead, _Line]] = []
        if self._events:
            timeout_s = 0.0
        for source, mask in self._poller.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)):
            if source in self._names:
                self._take_resolved(source)
                continue
            if isinstance(source, int):
                ready[source] = mask
                continue
            if source not in self._by_socket:
                continue  # its head was dropped by an event before this one
            head, line = self._by_socket[source]
            if source is line.monitor:
                self._read_monitor(head, line)
            else:
                said.append((head, line))
        until = time.monotonic() + READ_S
        for head, line in sorted(said, key=lambda one: one[1].read_at):
            self._read(head, line)
            if line.read_at > until:
                break
        events, self._events = self._events, []
        return events, ready

    # --- inside ---

    def _resolve(self, head: RemoteHead, endpoint: str, security: Security | Callable[[], Security]) -> None:
        """Start a thread that resolves the host name in *endpoint* and loads the keys of this route.

        When the thread is done it closes a pipe, which wakes `step`. Raises OSError if no pipe can be opened, and
        RuntimeError if the thread cannot start.
        """
        name = _Name(head, endpoint, security)
        done, tell = os.pipe()
        try:
            threading.Thread(target=_find_out, args=(name, tell), daemon=True).start()
        except RuntimeError:
            os.close(done)
            os.close(tell)
            raise
        self._names[done] = name
        self._poller.register(done, zmq.POLLIN)
        head._resolving += 1

    def _take_resolved(self, fd: int) -> None:
        self._poller.unregister(fd)
        os.close(fd)
        name = self._names.pop(fd)
        head = name.head
        if head not in self._heads or not head._resolving:
            return
        head._resolving -= 1
        if isinstance(name.security, Security) and not name.why:
            self._open(head, name.endpoint, name.security)
        else:
            head._faults.append(name.why or f"{name.endpoint}: nobody could find out how to come there")
        self._judge(head)

    def _open(self, head: RemoteHead, endpoint: str, security: Security) -> None:
        """Connect to a head by one route. If that fails, keep the reason for the text of HeadDown; raise nothing."""
        try:
            self._connect(head, endpoint, security)
        except (RlinfActorsError, OSError, ValueError, zmq.ZMQError) as error:
            head._faults.append(f"{endpoint}: {error}")

    def _connect(self, head: RemoteHead, endpoint: str, security: Security) -> None:
        proof = security.proof(endpoint, observes=True)
        made = self._context.socket(zmq.DEALER)
        try:
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER)
            made.setsockopt(zmq.RCVHWM, 2)
            made.setsockopt(zmq.SNDHWM, 0)  # a few bytes each; a button must not block where a head stands still
            made.setsockopt(zmq.ROUTING_ID, f"observer:{os.urandom(16).hex()}".encode())
            made.setsockopt(zmq.RECONNECT_IVL, 50)
            made.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            made.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
            made.setsockopt(zmq.IPV6, int("[" in endpoint))
            if proof is not None:
                before_connect(made, proof)
            made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            name = f"inproc://estop-{os.urandom(8).hex()}"
            made.monitor(name, _EVENTS)
            monitor = self._context.socket(zmq.PAIR)
            monitor.setsockopt(zmq.LINGER, 0)
            monitor.connect(name)
            made.connect(endpoint)
        except BaseException:
            made.close(linger=0)
            raise
        line = _Line(endpoint, proof.pair.public if proof is not None else "", made, monitor, time.monotonic())
        head._lines.append(line)
        for one in (made, monitor):
            self._poller.register(one, zmq.POLLIN)
            self._by_socket[one] = head, line

    def _close(self, line: _Line) -> None:
        for one in (line.socket, line.monitor):
            self._poller.unregister(one)
            del self._by_socket[one]
        line.socket.monitor(None, 0)
        line.monitor.close(linger=0)
        line.socket.close(linger=0)

    def _send(self, head: RemoteHead, messages: Iterable[bytes]) -> None:
        if head._on is None:
            return
        for message in messages:
            with contextlib.suppress(zmq.Again):  # it was lost just now: the next connection takes what is not answered
                head._on.socket.send(pack([(message, ())])[0], zmq.NOBLOCK)

    def _read_monitor(self, head: RemoteHead, line: _Line) -> None:
        while not line.monitor.closed:
            try:
                event, value = read_event(line.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event == CONNECTED:
                line.shaken = False
            elif event == SUCCEEDED:
                line.shaken, line.why = True, ""
                self._is_up(head, line)
            elif event & FAILED:
                if not unanswered(event, value):
                    line.shaken = True
                    self._is_down(head, line, why_refused(event, value, line.key)[0])
            elif event == DISCONNECTED:
                self._is_down(head, line, "the connection was lost" if line.shaken else line.why or NO_ZEROMQ)
            else:
                self._is_down(head, line, line.why or _why_not(line))

    def _is_up(self, head: RemoteHead, line: _Line) -> None:
        if head._on is not None:
            return
        head.up, head._on, head.heard = True, line, time.monotonic()
        self._events.append(HeadUp(head))
        self._send(head, head._unanswered.values())

    def _is_down(self, head: RemoteHead, line: _Line, why: str) -> None:
        line.why = why
        if head._on is line:
            head._on = next((other for other in head._lines if other.shaken and not other.why), None)
            head.up = head._on is not None
            self._send(head, head._unanswered.values())
        self._judge(head)

    def _judge(self, head: RemoteHead) -> None:
        """Report HeadDown if no route to the head works and none is still being tried."""
        if head._on is None and not head._resolving and all(line.why for line in head._lines):
            ways = dict.fromkeys(f"{line.endpoint}: {line.why}" for line in head._lines)
            self._events.append(HeadDown(head, "; ".join([*ways, *head._faults]) or "nobody knows where it listens"))

    def _read(self, head: RemoteHead, line: _Line) -> None:
        try:
            first, *big = line.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        head.heard = line.read_at = time.monotonic()
        try:
            envelopes = [control_codec.decode(header) for header, _ in unpack(first, big)]
        except RemoteWireError as error:
            self._is_down(head, line, f"what it says cannot be understood: {error}")
            return
        for envelope in envelopes:
            if isinstance(envelope, (Reply, Failed)) and head._unanswered.pop(envelope.id, b""):
                self._events.append(HeadAnswered(head, envelope.body if isinstance(envelope, Reply) else envelope))


def _find_out(name: _Name, tell: int) -> None:
    """Load the keys of a route and replace the host's name in its endpoint by an address. Then close the descriptor
    *tell*.

    Runs on a thread of its own, because a file system or name service may not answer. Closing *tell*, the end of a
    pipe, wakes the main thread.
    """
    try:
        if not isinstance(name.security, Security):
            name.security = name.security()
        if has_name(name.endpoint):
            name.endpoint = _address_of(name.endpoint)
    except (RlinfActorsError, OSError, ValueError) as error:
        name.why = str(error)
    finally:
        os.close(tell)


def _address_of(endpoint: str) -> str:
    """Return a TCP endpoint with the host's name replaced by its IP address. Blocks. Raises ConfigError if the name has
    no address.
    """
    host, port = split_address(endpoint, "")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"its name {host!r} cannot be resolved ({why})") from None
    return f"tcp://[{address[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{address[0]}:{port}"


def _why_not(line: _Line) -> str:
    """Return, for people, why a connection attempt to a head failed.

    libzmq does not report the reason. So this function tries to connect once more and judges by what the kernel reports
    at once.
    """
    if time.monotonic() - line.began >= CONNECT_S:
        return "its machine does not answer"
    tcp = is_tcp(line.endpoint)
    try:
        host, port = split_address(line.endpoint, "") if tcp else ("", 0)
        family = socket.AF_UNIX if not tcp else socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect((host, port) if tcp else line.endpoint.removeprefix("ipc://"))
    except BlockingIOError:
        return "its port refuses connections, or its machine is out of reach"
    except (OSError, ConfigError) as error:
        return f"nobody listens there ({error.strerror if isinstance(error, OSError) else error})"
    return "its port refused the connection"
