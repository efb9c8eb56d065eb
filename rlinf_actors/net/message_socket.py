"""What the sockets of all transports do alike: queue messages, send them in chunks, and hand over what arrives.

Theory of operation. A socket belongs to one event loop, whose thread alone receives; any thread may send. A lock guards
the transport's socket. Queueing a message takes no lock: deque.append is atomic, and a flush clears its flag before it
empties the queue, so a message that is appended meanwhile is either sent by this flush or schedules another.

*Sending.* A message is a header and parts. Messages that are queued for a peer while the loop is busy leave as one
chunk (`net.framing`): a small message costs a tenth of a message of its own. `now=True` sends on the calling thread if
nothing is queued before it, which saves the wake-up of the loop's thread for a caller that waits for the answer. A
transport never refuses a message because its queues are full; the layers above bound memory by credits. A peer that is
not connected is reported (`on_unreachable`), not an error: the head decides who is gone.

*Receiving.* Messages are handled after the lock was released, so a handler may send at once. What handlers send leaves
when they have all returned, in one chunk for each peer, because a caller waits for that answer.

*Bad input.* Bytes that are no chunk are dropped, with a throttled warning. A handler that raises is a bug of ours,
which `net.loop.handling_failed` turns over to the process's policy; the messages behind it in the chunk belong to
others and are still handled.

A socket must never be used in a forked child: it is the parent's.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection
from rlinf_actors.net.framing import unpack
from rlinf_actors.net.link import LogThrottle, OnFailed, OnMessage, peer_name
from rlinf_actors.net.loop import call_soon, call_threadsafe, handling_failed

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork

log = logging.getLogger(__name__)

T = TypeVar("T")
Messages = list[tuple[bytes, Sequence[Buffer]]]
"""Messages to one peer, in order, each as its header and parts."""


class MessageSocket:
    """Base of the listeners and links of all transports."""

    def __init__(self, network: ZmqNetwork, on_message: OnMessage, on_failed: OnFailed | None = None) -> None:
        self._network = network
        self._loop = network._loop
        self._on_message = on_message
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._out: collections.deque[tuple[bytes, bytes, Sequence[Buffer]]] = collections.deque()
        self._flush_due = False
        self._delivering = False
        self._closed = False
        self._malformed = LogThrottle()
        self._thread = 0
        self.on_unreachable: Callable[[bytes], None] | None = None
        self.on_drained: Callable[[], None] | None = None

    # --- the transport's part ---

    def _write(self, peer: bytes, messages: Messages) -> None:
        """Send messages to one peer in as few chunks as possible. The caller holds the socket's lock.

        If the peer is not connected, drop the messages and call `on_unreachable`.
        """
        raise NotImplementedError

    def _flush(self) -> None:
        """Send all queued messages. Loop thread."""
        raise NotImplementedError

    def _after_send(self) -> Callable[[], None] | None:
        """Return a function that the loop must run since messages were sent, or None. The caller holds the lock."""
        return None

    def stands(self) -> bool:
        """Implement `net.link.Link.stands` for links of which the kernel cannot tell."""
        return False

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Messages not sent within *linger_ms* milliseconds are dropped. Loop thread. Idempotent."""
        raise NotImplementedError

    def note_fork(self) -> None:
        """Close this forked child's descriptors of the socket, if that does not harm its parent's."""

    def _name(self, peer: bytes) -> str:
        return peer.decode(errors="replace")

    # --- out ---

    def _send(self, peer: bytes, header: bytes, parts: Sequence[Buffer], now: bool, faulty: bool = True) -> None:
        faults = fault_injection.active
        if faulty and faults is not None:
            send = functools.partial(self._send, peer, header, parts, now, faulty=False)
            faults.carry("transport.send", self, peer, self._name(peer), send, self._loop)
            return
        if self._network.forked:
            return
        if now and not self._out and self._lock.acquire(blocking=False):
            try:
                if self._closed:
                    return
                self._write(peer, [(header, parts)])
                due = self._after_send()
            finally:
                self._lock.release()
            if due is not None:
                self._wake(due)
            return
        self._out.append((peer, header, parts))
        if not self._flush_due:
            self._flush_due = True
            if not (self._delivering and threading.get_ident() == self._thread):  # else it is flushed afterwards
                self._wake(self._flush)

    def _wake(self, callback: Callable[[], None]) -> None:
        call_threadsafe(self._loop, callback)

    def _write_queued(self) -> None:
        """Send all queued messages: those for one peer in one chunk. The caller holds the socket's lock."""
        out = self._out
        if self._closed or not out:
            return
        queues: dict[bytes, Messages] = {}
        for peer, header, parts in _take_all(out):
            queues.setdefault(peer, []).append((header, parts))
        for peer, messages in queues.items():
            self._write(peer, messages)

    def _unreachable(self, peer: bytes, messages: Messages) -> None:
        """Report that *messages* were dropped, because *peer* is not connected."""
        log.debug("dropped %d messages to %r, which is not connected", len(messages), peer_name(peer))
        if self.on_unreachable is not None:
            call_soon(self._loop, self.on_unreachable, peer)

    # --- in ---

    def _deliver(self, peer: bytes, records: Buffer, big: list[Buffer]) -> bool:
        """Handle the messages of a chunk. Return False if it is malformed."""
        try:
            messages = unpack(records, big)
        except RemoteWireError as error:
            self._warn(peer, error)
            return False
        for header, parts in messages:
            self._handle_here(peer, header, parts)
        return True

    def _handle_here(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        faults = fault_injection.active
        if faults is None:
            self._handle(peer, header, parts)
        else:
            deliver = functools.partial(self._deliver_late, peer, header, parts)
            faults.carry("transport.receive", self, peer, self._name(peer), deliver, self._loop)

    def _warn(self, peer: bytes, error: Exception) -> None:
        if self._malformed.note():
            count = self._malformed.count
            log.warning("dropped what %.40r sent (%d times by now): %s", peer_name(peer), count, error)

    def _deliver_late(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if not self._closed:
            self._handle(peer, header, parts)

    def _handle(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        try:
            self._on_message(peer, header, parts)
        except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
            self._failed(peer, error)

    def _failed(self, peer: bytes, error: Exception) -> None:
        fail = None if self._on_failed is None else functools.partial(self._on_failed, peer)
        handling_failed(self._loop, f"handling a message from {peer_name(peer) or self._name(peer)}", error, fail)


def _take_all(queue: collections.deque[T]) -> Iterator[T]:
    # as many as there are now: other threads may append meanwhile
    for _ in range(len(queue)):
        yield queue.popleft()
