"""The links of ZeroMQ that have a socket of their own. `net.zmq_hub` has those that share one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection, host_names
from rlinf_actors.net.connection_watch import AT_CLIENT, LinkEvents, SocketMonitor
from rlinf_actors.net.curve import CONNECTED, DISCONNECTED, before_connect
from rlinf_actors.net.host import split_address
from rlinf_actors.net.link import OnAnyThread, OnFailed, OnMessage
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.net.message_socket import Messages
from rlinf_actors.net.socket_security import Proof
from rlinf_actors.net.zmq_hub import tune_connecting
from rlinf_actors.net.zmq_socket import Socket

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
_HOST = re.compile(r"[A-Za-z0-9._-]+")
"""What libzmq takes for a host's name."""
LOOK_AGAIN_S = 0.5, 1.5
"""A random time between these passes before a name is looked up again: thousands of links may have lost one head."""


class ZmqLink(Socket):
    """A connection of this process to one listener: a DEALER of ZeroMQ. Implements `net.link.Link`."""

    def __init__(
        self,
        network: ZmqNetwork,
        endpoint: str,
        identity: bytes,
        proof: Proof | None,
        events: LinkEvents,
        on_message: OnMessage,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
    ) -> None:
        super().__init__(network, zmq.DEALER, on_message, on_failed, on_any_thread)
        self._endpoint = endpoint
        self._events = events
        try:
            self._connect(identity, proof, events)
        except BaseException:
            self.close()  # perhaps no descriptor is left: the next attempt must not find fewer
            raise

    def _connect(self, identity: bytes, proof: Proof | None, events: LinkEvents) -> None:
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        tune_connecting(self._socket, self._endpoint)
        if proof is not None:
            before_connect(self._socket, proof)
        self._watch()
        faults = fault_injection.active
        if faults is not None:
            faults.connecting(self, self._endpoint, self._loop)
        self._start()
        self._begin()

    def _watch(self) -> None:
        """Watch libzmq's connection, if somebody wants to hear of it."""
        if self._endpoint.startswith("tcp://") and self._events.wanted:
            self._monitor = SocketMonitor(self._socket, self._loop, AT_CLIENT, self._events.on_event)

    def _begin(self) -> None:
        self._socket.connect(self._endpoint)

    def _name(self, peer: bytes) -> str:
        return self._endpoint

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        self._send(b"", header, parts, now)

    def stands(self) -> bool:
        # messages that libzmq or a fault still holds back are not the kernel's yet
        return fault_injection.active is None and not self._out and self._events.stands(self._endpoint)


class NamedLink(ZmqLink):
    """A link to a listener whose host has a name.

    libzmq gets an address (`net.host_names` says why). The name is looked up again after each failed attempt to
    connect: a head may come back with another address. If there are several addresses, the next one is tried.
    """

    def _connect(self, identity: bytes, proof: Proof | None, events: LinkEvents) -> None:
        self._at = ""  # the endpoint with an address that libzmq has
        self._kept: Messages = []  # sent before there was one
        self._looking = self._connected = False
        self._later: asyncio.TimerHandle | None = None
        super()._connect(identity, proof, events)

    def _watch(self) -> None:
        self._monitor = SocketMonitor(self._socket, self._loop, AT_CLIENT | RETRIED, self._on_event)

    def _begin(self) -> None:
        if not _HOST.fullmatch(split_address(self._endpoint, "endpoint")[0]):
            raise zmq.ZMQError(errno.EINVAL)
        self._look_up()

    def _on_event(self, event: int, value: int, address: str) -> None:
        if event == RETRIED:
            self._look_up_later()
            return
        if event in (CONNECTED, DISCONNECTED) and address == self._at:  # not of an address that was left
            self._connected = event == CONNECTED
        self._events.on_event(event, value, address)

    def _look_up_later(self) -> None:
        if self._later is None and not self._looking and not self._closed:
            self._later = self._loop.call_later(random.uniform(*LOOK_AGAIN_S), self._look_up)

    def _look_up(self) -> None:
        self._later = None
        if not self._connected:
            self._looking = True
            host, port = split_address(self._endpoint, "endpoint")
            host_names.look_up(host, port, functools.partial(call_threadsafe, self._loop, self._found))

    def _found(self, found: list[host_names.Address] | OSError) -> None:
        self._looking = False
        if self._closed or self._connected:
            return
        known = [] if isinstance(found, OSError) else [host_names.endpoint(address) for address in found]
        if known:
            self._move(known[(known.index(self._at) + 1) % len(known)] if self._at in known else known[0])
        elif not self._at:
            self._look_up_later()

    def _move(self, endpoint: str) -> None:
        """Have libzmq connect to *endpoint*, and no longer to an earlier one. What was sent to that one is dropped."""
        if endpoint == self._at:
            return
        with self._lock:
            if self._at:
                with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up already
                    self._socket.disconnect(self._at)
                self._events.dropped()
            tune_connecting(self._socket, endpoint)
            self._socket.connect(endpoint)
            self._at = endpoint
            kept, self._kept = self._kept, []
            super()._write(b"", kept)
            self._drain_due = True  # these calls may have consumed the edge that announces messages
        self._read_again()

    def _write(self, peer: bytes, messages: Messages) -> None:
        if self._at:
            super()._write(peer, messages)
        else:
            self._kept += messages

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        if self._later is not None:
            self._later.cancel()
