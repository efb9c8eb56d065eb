"""One ZeroMQ socket for the links of a process to many listeners on other machines.

A ZmqLink is a DEALER of its own: an eventfd, a monitor with two more, and a reader in the event loop, for each peer. A
driver with 10,000 workers would have 40,000 descriptors, and a call to all of them would wake 10,000 readers. A ZmqHub
is a ROUTER that connects to many listeners. Each connection has a route, by which the hub addresses it, and an identity
of its own, by which the listener knows it. So a peer costs one descriptor, its TCP connection; what is sent to many
peers leaves in one flush, and what arrives from many peers is received in one turn of the loop.

The hub takes a link if its endpoint is TCP with a numeric address, because libzmq reports events by that address, and
if no other link of the hub has the endpoint, because libzmq disconnects by it. All other links are ZmqLinks.
"""

from __future__ import annotations

import ipaddress
import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from rlinf_actors.errors import InternalError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.connection_watch import AT_CLIENT, LinkEvents, SocketMonitor
from rlinf_actors.net.curve import before_connect
from rlinf_actors.net.link import OnAnyThread, OnFailed, OnMessage
from rlinf_actors.net.socket_security import Proof
from rlinf_actors.net.zmq_socket import Socket

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

TCP = "tcp://"


def hub_takes(endpoint: str) -> bool:
    """Return True if a link to *endpoint* can be one of a hub."""
    if fault_injection.active is not None or not endpoint.startswith(TCP):
        return False  # faults are injected link by link
    host = endpoint.removeprefix(TCP).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).compressed == host
    except ValueError:
        return False  # a name


def tune_connecting(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Set the options for the next connection of *socket*, to *endpoint*."""
    # milliseconds, doubled from the first to the second; libzmq adds no jitter to them, and many links that one
    # restart closes must not all come back at one moment
    socket.setsockopt(zmq.RECONNECT_IVL, random.randint(10, 30))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(500, 1500))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)  # else a SYN into a cut network is repeated for a minute
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


class ZmqHub(Socket):
    """A ROUTER with the connections of many links. Loop thread, except that any thread sends."""

    def __init__(self, network: ZmqNetwork) -> None:
        super().__init__(network, zmq.ROUTER, self._route, self._route_failure, self._route_here)
        self._routes: dict[bytes, HubLink] = {}
        self._by_endpoint: dict[str, HubLink] = {}
        self._numbers = itertools.count(1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message for a closed link raises instead of vanishing
        self._monitor = SocketMonitor(self._socket, self._loop, AT_CLIENT, self._on_event)
        self._start()

    def has(self, endpoint: str) -> bool:
        """Return True if this hub has a link to *endpoint*; a second one must be a ZmqLink."""
        return endpoint in self._by_endpoint

    def link(
        self,
        endpoint: str,
        identity: bytes,
        proof: Proof | None,
        events: LinkEvents,
        on_message: OnMessage,
        on_failed: OnFailed | None,
        on_any_thread: OnAnyThread | None,
    ) -> HubLink:
        """Connect to *endpoint*, to which this hub has no link, and return the link."""
        route = b"%d" % next(self._numbers)
        link = HubLink(self, route, endpoint, events, on_message, on_failed, on_any_thread)
        with self._lock:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, route)
            tune_connecting(self._socket, endpoint)
            if proof is not None:
                before_connect(self._socket, proof)
            self._routes[route] = self._by_endpoint[endpoint] = link
            try:
                self._socket.connect(endpoint)
            except BaseException:
                del self._routes[route], self._by_endpoint[endpoint]
                raise
        return link

    def unlink(self, link: HubLink) -> None:
        """End the connection of *link*. Messages that were not sent are dropped."""
        if self._routes.pop(link.route, None) is None:
            return
        del self._by_endpoint[link.endpoint]
        with self._lock:
            if self._closed:
                return
            self._write_queued()
            self._socket.disconnect(link.endpoint)
            if self._drain_due or not self._readable():
                return
            self._drain_due = True  # the disconnect may have consumed the edge that announced these
        self._read_again()

    def _route(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        link = self._routes.get(peer)
        if link is not None:
            link.on_message(b"", header, parts)

    def _route_here(self, peer: bytes, header: bytes, parts: list[Buffer]) -> bool:
        link = self._routes.get(peer)
        if link is None:
            return True
        return link.on_any_thread is not None and link.on_any_thread(b"", header, parts)

    def _route_failure(self, peer: bytes, error: InternalError) -> None:
        link = self._routes.get(peer)
        if link is not None and link.on_failed is not None:
            link.on_failed(b"", error)

    def _on_event(self, event: int, value: int, address: str) -> None:
        link = self._by_endpoint.get(address)
        if link is not None:
            link.events.on_event(event, value)

    def _name(self, peer: bytes) -> str:
        link = self._routes.get(peer)
        return "a closed link" if link is None else link.endpoint


class HubLink:
    """A link of a ZmqHub to one listener. Implements `net.link.Link`."""

    __slots__ = ("_hub", "endpoint", "events", "on_any_thread", "on_failed", "on_message", "route")

    def __init__(
        self,
        hub: ZmqHub,
        route: bytes,
        endpoint: str,
        events: LinkEvents,
        on_message: OnMessage,
        on_failed: OnFailed | None,
        on_any_thread: OnAnyThread | None,
    ) -> None:
        self._hub = hub
        self.route = route
        self.endpoint = endpoint
        self.on_message = on_message
        self.events = events
        self.on_failed = on_failed
        self.on_any_thread = on_any_thread

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._hub._send(self.route, header, parts, now)

    def stands(self) -> bool:
        """Return False: the head reports the end of a worker, so no link has to be asked."""
        return False

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. The hub never lingers: links to workers are closed when no answer is awaited."""
        self._hub.unlink(self)
