"""RequestSender: sends the requests of this process to one host of a channel.

Requests that are made while others are under way wait for the next turn of the I/O thread. Those of one turn then leave
in few frames: one for all acknowledgements, and one for all puts or gets of a key that follow one another. A request
that is made while nothing is under way, and a large put, is sent at once by its own thread. All requests of a thread
keep their order.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

from rlinf_actors import counters
from rlinf_actors.channel.request_spans import trace_sent
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.framing import BIG
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.net.shared_memory import SHARED_FROM
from rlinf_actors.wire import frames

if TYPE_CHECKING:
    from rlinf_actors.channel.put_window import Put
    from rlinf_actors.runtime.peer import Peer

MOST = 1024
"""Most requests in one frame."""
FULL = 256 << 10
"""Bytes of items after which a frame takes no further put."""

Waiting = Union[tuple[bytes, int], tuple[bytes, int, float, Buffer]]
"""A get (key, number) or a put (key, number, weight, item)."""


class RequestSender:
    """Sends requests to the host at the other end of *peer*. Any thread.

    Args:
        peer: the connection to the host.
        soon: runs a function on the I/O thread.
        lock: the lock of the process's PutWindow for the channel. One lock for both, since each of the two calls the
            other: a put is sent with the window locked, and a send that fails ends puts.

    Attributes:
        arrived: numbers of gets whose items have come in frames of many, and that user code has not taken yet.
    """

    def __init__(self, peer: Peer, soon: Callable[..., object], lock: threading.RLock) -> None:
        self.peer = peer
        self.arrived: set[int] = set()
        self._soon = soon
        self._lock = lock
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._acknowledged: collections.deque[int] = collections.deque()
        self._due = False

    def put(self, put: Put) -> None:
        """Send a put, and register it for the host's answer."""
        peer, parts = self.peer, put.parts
        alone = not peer.pending
        put._by_loop = not alone  # as of a get
        put.call = peer.open(put)
        if put.span:
            trace_sent(put)
        if put._finished:
            return  # the host is gone
        counts = counters.mine.sent["inline"]  # not counters.sent(): each small item comes here
        counts[0] += 1
        counts[1] += put.nbytes
        for part in parts[1:]:  # large ones are counted where their path is chosen
            size = memoryview(part).nbytes
            counts[1] -= size if size >= SHARED_FROM else 0
        if put.nowait or len(parts) != 1 or put.nbytes >= BIG:
            frame = frames.ChannelPut(put.call, put.key, put.weight, put.nowait)
            # the copy of a large item takes longer than the system call, and than to wake the I/O thread
            self.send(frame, parts, now=alone or put.nbytes >= SHARED_FROM, give=True)
        else:
            self.add((put.key, put.call, put.weight, parts[0]), alone)

    def acknowledge(self, call: int) -> None:
        """Tell the host that user code has the item that it delivered for request number *call*.

        If more items are about to be taken, their acknowledgements share a frame, which the I/O thread sends.
        """
        pending, arrived = self.peer.pending, self.arrived
        arrived.discard(call)
        if not arrived and not len(pending) - (call in pending):  # the loop may not have removed this one yet
            self.send(frames.ChannelAck([call]), now=True)
            return
        self._acknowledged.append(call)
        if not self._due:
            self._wake()

    def send(
        self, frame: frames.AnyFrame, parts: Sequence[Buffer] = (), *, now: bool = False, give: bool = False
    ) -> None:
        """Send a frame behind all earlier requests. *now* and *give* are those of `Peer.send`."""
        undisturbed(None, self._send, frame, parts, now, give)

    def _send(self, frame: frames.AnyFrame, parts: Sequence[Buffer], now: bool, give: bool) -> None:
        with self._lock:
            if self._waiting or self._acknowledged:
                self._send_waiting()
            self.peer.send(frame, parts, now=now, give=give)

    def _wake(self) -> None:
        """Let the I/O thread send what waits."""
        try:
            self._due = True
            self._soon(self.flush)
        except BaseException:  # a signal handler raised
            self._soon(self.flush)
            raise

    def flush(self) -> None:
        """Send all requests that wait."""
        self._due = False  # first: a request that is added from now on has another flush
        with self._lock:
            self._send_waiting()

    def add(self, request: Waiting, alone: bool) -> None:
        """Send a request. *alone*: True if no other request of this process to this host is under way."""
        if alone and not self._waiting and not self._acknowledged and undisturbed(None, self._send_alone, request):
            return
        self._waiting.append(request)
        if not self._due:
            self._wake()

    def _send_alone(self, request: Waiting) -> bool:
        """Send a request on this thread. Return False if another thread sends now, or requests wait."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._waiting:
                return False
            self._send_run([request], now=True)
            return True
        finally:
            self._lock.release()

    def _send_waiting(self) -> None:
        """Send all waiting requests in as few frames as possible. The caller holds the lock."""
        acknowledged, requests = self._acknowledged, self._waiting
        waiting: list[Any] = [requests.popleft() for _ in range(len(requests))]
        if acknowledged:  # before later requests: items that user code has must not count as waiting
            self.peer.send(frames.ChannelAck([acknowledged.popleft() for _ in range(len(acknowledged))]))
        run: list[Any] = []
        size, key, kind = 0, b"", 0
        for request in waiting:
            if len(request) != kind or request[0] != key or len(run) >= MOST or size >= FULL:
                self._send_run(run)
                run, size, key, kind = [], 0, request[0], len(request)
            run.append(request)
            if kind > 2:
                size += len(request[3])
        self._send_run(run)

    def _send_run(self, run: Sequence[Any], now: bool = False) -> None:
        """Send gets or puts of one key."""
        if not run:
            return
        send = self.peer.send
        first = run[0]
        if len(run) == 1:
            if len(first) == 2:
                send(frames.ChannelGet(first[1], first[0], False), now=now)
            else:
                key, call, weight, part = first
                send(frames.ChannelPut(call, key, weight, False), (part,), now=now)
        elif len(first) == 2:
            send(frames.ChannelGets([call for _, call in run], first[0]))
        else:
            weights = [weight for _, _, weight, _ in run]
            frame = frames.ChannelPuts([call for _, call, _, _ in run], first[0], weights if any(weights) else [])
            send(frame, [part for _, _, _, part in run])
