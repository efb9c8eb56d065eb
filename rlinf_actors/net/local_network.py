"""The network of a driver or worker: ZeroMQ, and unix streams to and from the processes of its node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.link import (
    PLAIN,
    Link,
    LinkOptions,
    Listener,
    OnAnyThread,
    OnFailed,
    OnMessage,
    Verbs,
)
from rlinf_actors.net.unix_stream import StreamLink, StreamListener, connected, path_of
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.members import LOCAL, Gate, Member

if TYPE_CHECKING:
    from rlinf_actors.wire.together import Header

log = logging.getLogger(__name__)


class LocalNetwork(ZmqNetwork):
    """ZmqNetwork with unix streams between workers and drivers of one node. Implements `net.link.Network`."""

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
        zmq_listener = super().listener(
            on_message, max_bytes=max_bytes, gate=gate, on_failed=on_failed, on_any_thread=on_any_thread, verbs=verbs
        )
        return LocalListener(zmq_listener, StreamListener(self, on_message, on_failed, on_any_thread))

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> Link:
        """See `net.link.Network`. A worker that listens on no unix stream is reached by ZeroMQ."""
        if options.to and endpoint.startswith("ipc://"):
            path = path_of(endpoint)
            try:
                stream = connected(path)
            except (BlockingIOError, ConnectionRefusedError):
                stream = None
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    log.info("%s is reached by ZeroMQ, since its unix stream at %s is not: %s", options.to, path, error)
                path = ""
            if path:
                return StreamLink(self, endpoint, path, stream, identity, on_message, options)
        return super().link(endpoint, identity, on_message, options)


class LocalListener:
    """A worker's listeners of ZeroMQ and of unix streams, as one. Implements `net.link.Listener`.

    Attributes:
        queue: sends a message soon, together with others, to a peer that has a stream. Any thread.
    """

    def __init__(self, zmq_listener: Listener, streams: StreamListener) -> None:
        self._zmq = zmq_listener
        self._streams = streams
        self.queue: Callable[[bytes, Header, Sequence[Buffer]], None] = streams._queue

    @property
    def on_unreachable(self) -> Callable[[bytes], None] | None:
        return self._zmq.on_unreachable

    @on_unreachable.setter
    def on_unreachable(self, callback: Callable[[bytes], None] | None) -> None:
        self._zmq.on_unreachable = self._streams.on_unreachable = callback

    @property
    def on_drained(self) -> Callable[[], None] | None:
        return self._zmq.on_drained

    @on_drained.setter
    def on_drained(self, callback: Callable[[], None] | None) -> None:
        self._zmq.on_drained = self._streams.on_drained = callback

    @property
    def on_ended(self) -> Callable[[bytes], None] | None:
        return self._streams.on_ended

    @on_ended.setter
    def on_ended(self, callback: Callable[[bytes], None] | None) -> None:
        self._streams.on_ended = callback

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._streams.peers

    def bind(self, endpoint: str) -> str:
        actual = self._zmq.bind(endpoint)
        if actual.startswith("ipc://"):
            path = path_of(actual)
            try:
                self._streams.bind(path)
            except OSError as error:
                log.warning("processes of this node reach this one by ZeroMQ: it cannot listen on %s: %s", path, error)
        return actual

    def admit(self, peer: bytes) -> None:
        self._streams.admit(peer)

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        (self._streams if peer in self._streams.peers else self._zmq).send(peer, header, parts, now=now)

    def member_of(self, peer: bytes) -> Member | None:
        return LOCAL if peer in self._streams.peers else self._zmq.member_of(peer)

    def address_of(self, peer: bytes) -> str:
        return self._zmq.address_of(peer)

    def close(self, linger_ms: int = 0) -> None:
        self._streams.close(linger_ms)
        self._zmq.close(linger_ms)
