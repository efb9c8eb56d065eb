"""Emulates a network between the workers of a job: delays messages in the process that sends them.

Theory of operation. `EmulatedNetwork` is put between a process and its Network. Its links and its listener are those of
the Network, in wrappers that hold each message back until `net.emulated_path` says that it arrives. So one place delays
calls, answers, messages, broadcasts and channel items, whichever way their bytes go: large parts that are lent in
shared memory and tensors that travel beside a message wait for the header, which tells their size.

A process knows its own name and node. A link names its worker when it is made. The Join, the first frame of a link,
carries the name of the process that connects, so the listener knows whom it answers.

*What is not delayed*: frames of the runtime that carry nothing of the user's (`_UNDELAYED`): how connections are made,
acknowledgements and credit, which would otherwise limit the bandwidth by the window, and questions what a worker runs.
Links to the head are not wrapped.

One thread of each process sends the messages when they are due: a timer of the event loop is late by up to 1 ms, and
the loop must not wait. Messages on one path are due in their order. Where the network is not emulated, no wrapper and
no thread exist, and a message costs nothing.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_actors import exhaustion
from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import lent
from rlinf_actors.net.emulated_path import Budgets, EmulatedPath, Topology, Transfer, endpoints
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.net.link import (
    PLAIN,
    Diagnosis,
    Link,
    LinkOptions,
    Listener,
    Network,
    OnAnyThread,
    OnFailed,
    OnMessage,
    Reachability,
    Verbs,
)
from rlinf_actors.security.members import Gate, Member
from rlinf_actors.wire import frames

if TYPE_CHECKING:
    from rlinf_actors.net.bulk_handshake import BulkTransport

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Longest time that an ending process waits for its delayed messages."""
STREAMS = 64
"""Number of broadcasts whose transfers are remembered, so that all receivers of one share its bandwidth."""

_JOIN, _MESSAGE = 0, 20
_UNDELAYED = frozenset(
    kind.__struct_config__.tag
    for kind in (
        frames.Join, frames.Memory, frames.Dropped, frames.WhatRuns, frames.Ask, frames.WhereIs, frames.LaneEnded,
    )
)  # fmt: skip
"""Frames to a worker that are not delayed. All others are: none may overtake another, such as a Cancel its call."""
_ANSWERS = frozenset(kind.__struct_config__.tag for kind in (frames.Ok, frames.Item, frames.Raised))
"""Frames of a worker to a process that has connected to it which are delayed."""


class Postman:
    """Calls functions at given times, on a thread of its own. Any thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, object, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, due: float, owner: object, deliver: Callable[[], object]) -> None:
        """Call *deliver* at the time *due* (time.monotonic). Functions with one time are called in order."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (due, next(self._numbers), owner, deliver))
            if self._thread is None:
                self._thread = exhaustion.OwnThread(target=self._run, name="rlinf-actors-net-emulation", daemon=True)
                exhaustion.start(self._thread)
            if self._due[0][3] is deliver:
                self._changed.notify_all()

    def flush(self, owner: object) -> None:
        """Call the functions of *owner* now, in their order, since it closes."""
        with self._changed:
            mine = sorted(entry for entry in self._due if entry[2] is owner)
            self._due = [entry for entry in self._due if entry[2] is not owner]
            heapq.heapify(self._due)
            for *_, deliver in mine:
                deliver()

    def drain(self, timeout_s: float) -> None:
        """Wait until all functions were called, for at most *timeout_s* seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due, timeout_s)

    def close(self) -> None:
        """Drop the functions that are not due, and end the thread."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._due:
                    self._changed.wait()
                    continue
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                # with the lock held: `flush` must not let a later message of the same owner overtake this one
                deliver = heapq.heappop(self._due)[3]
                try:
                    deliver()
                except Exception:
                    log.exception("internal error: a message of an emulated network could not be sent")
                if not self._due:
                    self._changed.notify_all()


class EmulatedNetwork:
    """A Network whose connections to and from workers are as slow as a configuration says. Implements `Network`.

    Args:
        network: the real Network.
        config: the emulated network.
        name: name of this process: ``group:rank``, or ``driver``.
        node_rank: rank of this process's node, -1 if unknown.
        node_of: returns the rank of the node of a worker ``group:rank``, -1 if unknown. Loop thread.
        budgets: makes the stages of bandwidth groups.
    """

    def __init__(
        self,
        network: Network,
        config: NetEmulationConfig,
        name: str,
        node_rank: int = -1,
        node_of: Callable[[str], int] = lambda name: -1,
        budgets: Budgets | None = None,
    ) -> None:
        self._network = network
        self._topology = Topology(config, budgets)
        self._lock = threading.Lock()
        self._postman = Postman()
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._listener: EmulatedListener | None = None
        self._node_of = node_of
        self.name = name
        self.node_rank = node_rank

    # --- Network ---

    bulk: BulkTransport | None = None  # all parts go with their messages, whose bytes the emulation counts

    @property
    def forked(self) -> bool:
        return self._network.forked

    @forked.setter
    def forked(self, value: bool) -> None:
        self._network.forked = value

    @property
    def memory(self) -> Any:
        return self._network.memory

    @memory.setter
    def memory(self, value: Any) -> None:
        self._network.memory = value

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,  # unused: an emulated listener is read by the loop alone
        verbs: Verbs | None = None,
    ) -> Listener:
        made = EmulatedListener(self, on_message)
        made.real = self._network.listener(
            made.received, max_bytes=max_bytes, gate=gate, on_failed=on_failed, verbs=verbs
        )
        self._listener = made
        return made

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        options: LinkOptions = PLAIN,
    ) -> Link:
        link = self._network.link(endpoint, identity, on_message, options)
        to = options.to
        if not to:
            return link
        return EmulatedLink(self, link, self.path(self.here, endpoints(to, self._node_of(to))))

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        return await self._network.check_reachability(endpoint, timeout_s)

    async def diagnose(self, endpoint: str) -> Diagnosis:
        return await self._network.diagnose(endpoint)

    def soon(self, function: Callable[[], object]) -> None:
        self._network.soon(function)

    def close(self) -> None:
        self._postman.close()
        self._network.close()

    # --- emulation; any thread ---

    def drain(self) -> None:
        """Wait until the delayed messages of this process are sent, for at most DRAIN_S, because the process ends."""
        self._postman.drain(DRAIN_S)

    @property
    def here(self) -> tuple[str, ...]:
        return endpoints(self.name, self.node_rank)

    def path(self, src: Sequence[str], dst: Sequence[str]) -> EmulatedPath | None:
        with self._lock:
            return self._topology.path(src, dst)

    def carried_for(self, peer: bytes, producers: Sequence[tuple[bytes, int]]) -> None:
        """Let the next answer to *peer* take the paths of the *producers* to it: (peer, bytes) of each. Loop thread.

        The host of a channel calls this before it delivers items: an item goes from its producer to its consumer, and
        the host between them is no endpoint.
        """
        if self._listener is not None:
            self._listener.carried_for(peer, producers)

    def post(
        self, legs: Sequence[tuple[EmulatedPath, int]], owner: object, key: Any, deliver: Callable[[], object]
    ) -> None:
        """Call *deliver* when messages that are sent now arrive.

        *legs* are their paths and sizes. *key* is None, or identifies a broadcast that goes to several receivers.
        """
        with self._lock:
            transfer = None
            if key is not None:
                transfer = self._transfers.setdefault(key, Transfer())
                while len(self._transfers) > STREAMS:
                    del self._transfers[next(iter(self._transfers))]
            now = time.monotonic()
            due = max(path.depart(now, size, transfer) for path, size in legs)
            self._postman.post(due, owner, deliver)

    def flush(self, owner: object) -> None:
        self._postman.flush(owner)


class EmulatedLink:
    """A link to a worker. Implements `net.link.Link`.

    *path* is None if the network on the way to the worker is not emulated. The Join has this process's name then
    too, since the network on the way back may be emulated.
    """

    def __init__(self, network: EmulatedNetwork, link: Link, path: EmulatedPath | None) -> None:
        self._network = network
        self._link = link
        self._path = path
        self._sent: dict[str, int] = {}  # number of broadcasts, by stream

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        own, shared = lent(header)
        tag = own[1]
        if tag == _JOIN:
            join = msgspec.structs.replace(_decoded(own), place=f"{self._network.name}@{self._network.node_rank}")
            self._link.send(frames.encode(join), parts, now=now)
            return
        if self._path is None or tag in _UNDELAYED:
            self._link.send(header, parts, now=now)
            return
        size, key = len(header) + shared + sum(memoryview(part).nbytes for part in parts), None
        if tag == _MESSAGE:
            message = _decoded(own)
            if message.transfer is not None:  # tensors beside the message
                size = max(size, message.size)
            if message.stream:
                count = self._sent[message.stream] = self._sent.get(message.stream, 0) + 1
                key = (message.stream, count)
        deliver = functools.partial(self._link.send, header, parts, now=True)
        self._network.post([(self._path, size)], self, key, deliver)

    def stands(self) -> bool:
        return False  # what is under way on the emulated path has not arrived

    def close(self, linger_ms: int = 0) -> None:
        if linger_ms:
            self._network.flush(self)
        self._link.close(linger_ms)


class EmulatedListener:
    """The listener of a worker. Implements `net.link.Listener`. `real` is the listener that it wraps."""

    real: Listener

    def __init__(self, network: EmulatedNetwork, on_message: OnMessage) -> None:
        self._network = network
        self._on_message = on_message
        self._peers: dict[bytes, tuple[str, int]] = {}
        self._paths: dict[bytes, EmulatedPath | None] = {}
        self._producers: dict[bytes, Sequence[tuple[bytes, int]]] = {}

    @property
    def on_unreachable(self) -> Callable[[bytes], None] | None:
        return self.real.on_unreachable

    @on_unreachable.setter
    def on_unreachable(self, callback: Callable[[bytes], None] | None) -> None:
        self.real.on_unreachable = callback

    @property
    def on_drained(self) -> Callable[[], None] | None:
        return self.real.on_drained

    @on_drained.setter
    def on_drained(self, callback: Callable[[], None] | None) -> None:
        self.real.on_drained = callback

    @property
    def on_ended(self) -> Callable[[bytes], None] | None:
        return self.real.on_ended

    @on_ended.setter
    def on_ended(self, callback: Callable[[bytes], None] | None) -> None:
        self.real.on_ended = callback

    def __contains__(self, peer: bytes) -> bool:
        return peer in self.real

    def bind(self, endpoint: str) -> str:
        return self.real.bind(endpoint)

    def admit(self, peer: bytes) -> None:
        self.real.admit(peer)

    def member_of(self, peer: bytes) -> Member | None:
        return self.real.member_of(peer)

    def address_of(self, peer: bytes) -> str:
        return self.real.address_of(peer)

    def close(self, linger_ms: int = 0) -> None:
        if linger_ms:
            self._network.flush(self)
        self.real.close(linger_ms)

    def received(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if peer not in self._peers and len(header) > 1 and header[1] == _JOIN:
            self._joined(peer, header)
        self._on_message(peer, header, parts)

    def _joined(self, peer: bytes, header: bytes) -> None:
        try:
            name, _, node = _decoded(header).place.rpartition("@")
            self._peers[peer] = (name, int(node))
        except (RemoteWireError, AttributeError, ValueError):
            return  # no Join, or of a process that does not emulate: `on_message` judges it
        self._paths[peer] = self._network.path(self._network.here, endpoints(*self._peers[peer]))

    def carried_for(self, peer: bytes, producers: Sequence[tuple[bytes, int]]) -> None:
        """See EmulatedNetwork.carried_for."""
        self._producers[peer] = producers

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        producers = self._producers.pop(peer, ()) if self._producers else ()
        path = self._paths.get(peer)
        if path is None and not producers:
            self.real.send(peer, header, parts, now=now)
            return
        own, shared = lent(header)
        if own[1] not in _ANSWERS:
            self.real.send(peer, header, parts, now=now)
            return
        legs = self._legs(peer, producers)
        if path is not None and not legs:
            legs = [(path, len(header) + shared + sum(memoryview(part).nbytes for part in parts))]
        if not legs:
            self.real.send(peer, header, parts, now=now)
            return
        self._network.post(legs, self, None, functools.partial(self.real.send, peer, header, parts, now=True))

    def _legs(self, peer: bytes, producers: Sequence[tuple[bytes, int]]) -> list[tuple[EmulatedPath, int]]:
        """Return the paths from the *producers* of channel items to their consumer *peer*, where they are emulated."""
        if peer not in self._peers:
            return []
        legs, consumer = [], endpoints(*self._peers[peer])
        for producer, size in producers:
            name, _ = self._peers.get(producer, ("", -1))
            # the item is on this host's node by now
            path = self._network.path(endpoints(name, self._network.node_rank), consumer) if name else None
            if path is not None:
                legs.append((path, size))
        return legs


def _decoded(header: bytes) -> Any:
    return frames.decode(header)
