"""What the sockets of all transports do alike: queue messages, send them in chunks, and hand over what arrives.

Theory of operation. A socket belongs to one event loop. One thread at a time receives: the loop's, or, if the layer
above can handle messages on any thread (`on_any_thread`), the one whose turn it is (`net.reading`). What must be
handled on the loop then goes there in order. Any thread may send. A lock guards the transport's socket. Queueing a
message takes no lock: deque.append is atomic, and a flush clears its flag before it empties the queue, so a message
that is appended meanwhile is either sent by this flush or schedules another. The loop's thread may not wait for the
lock to flush (`StreamSocket._flush`): whoever has held it looks at the queue (`_leave_queue`).

*Sending.* A message is a header and parts. Messages that are queued for a peer while the loop is busy leave as one
chunk (`net.framing`): a small message costs a tenth of a message of its own. Calls and results that are queued as
objects become one frame then (`wire.together`). `now=True` sends what is queued and the
message on the calling thread, which saves the wake-up of the loop's thread for a caller that waits for the answer. A
thread that has queued BATCH messages sends them itself: the loop's thread may have to wait for the interpreter's lock
until that thread blocks, and the other end would have nothing to do meanwhile. A transport never refuses a message
because its queues are full; the layers above bound memory by credits. A peer that is not connected is reported
(`on_unreachable`), not an error: the head decides who is gone.

*Receiving.* Messages are handled after the lock was released, so a handler may send at once. What handlers send leaves
when they have all returned, in one chunk for each peer, because a caller waits for that answer.

*Bad input.* Bytes that are no chunk are dropped, with a throttled warning. A handler that raises is a bug of ours,
which `net.loop.handling_failed` turns over to the process's policy; the messages behind it in the chunk belong to
others and are still handled.

*Signals.* A handler that raises in the main thread must not leave the lock held, or lose what it has taken from the
queue: `net.held_signals`.

A socket must never be used in a forked child: it is the parent's.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import fault_injection, reading
from rlinf_actors.net.framing import unpack
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.net.link import LogThrottle, OnAnyThread, OnFailed, OnMessage, peer_name
from rlinf_actors.net.loop import call_soon, call_threadsafe, handling_failed
from rlinf_actors.net.reading_queues import LoopQueue
from rlinf_actors.plurals import counted

if TYPE_CHECKING:
    from rlinf_actors.net.zmq_network import ZmqNetwork
    from rlinf_actors.wire.together import Header

log = logging.getLogger(__name__)

Queued = tuple[bytes, "Header", Sequence[Buffer]]
"""Peer, header and parts of a message that waits to be sent."""
Messages = list[tuple[bytes, Sequence[Buffer]]]
"""Messages to one peer, in order, each as its header and parts."""
BATCH = 64
"""Queued messages that the thread which queues them sends itself."""


class MessageSocket:
    """Base of the listeners and links of all transports."""

    def __init__(
        self,
        network: ZmqNetwork,
        on_message: OnMessage,
        on_failed: OnFailed | None = None,
        on_any_thread: OnAnyThread | None = None,
    ) -> None:
        self._network = network
        self._loop = network._loop
        self._on_message = on_message
        self._on_failed = on_failed
        by_threads = reading.threads_read and fault_injection.active is None
        self._on_any_thread = on_any_thread if by_threads else None
        self._for_loop = LoopQueue(network._loop)
        self._lock = threading.Lock()
        self._out: collections.deque[Queued] = collections.deque()
        self._flush_due = False
        self._delivering = 0  # ident of the thread that handles messages now
        self._closed = False
        self._malformed = LogThrottle()
        self._thread = 0  # ident of the loop's thread
        self.on_unreachable: Callable[[bytes], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.on_ended: Callable[[bytes], None] | None = None

    # --- the transport's part ---

    def _write(self, peer: bytes, messages: Messages) -> None:
        """Send messages to one peer in as few chunks as possible. The caller holds the socket's lock.

        If the peer is not connected, drop the messages and call `on_unreachable`.
        """
        raise NotImplementedError

    @staticmethod
    def _joined(messages: Iterable[tuple[Header, Sequence[Buffer]]]) -> Messages:
        """Encode the headers of *messages*, and join those that may be. Only for a transport whose headers may be
        unencoded. Daemons have no such transport, and never load `wire.together`.
        """
        raise NotImplementedError

    def _flush(self) -> None:
        """Send all queued messages. Loop thread."""
        raise NotImplementedError

    def _after_send(self) -> Callable[[], None] | None:
        """Return what to call without the lock since messages were sent, or None. The caller holds the lock."""
        return None

    def stands(self) -> bool:
        """Implement `net.link.Link.stands` for links of which the kernel cannot tell."""
        return False

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Messages not sent within *linger_ms* milliseconds are dropped. Loop thread. Idempotent."""
        raise NotImplementedError

    def __contains__(self, peer: bytes) -> bool:
        """Implement `net.link.Listener` for listeners that do not notice the end of a connection."""
        return False

    def note_fork(self) -> None:
        """Close this forked child's descriptors of the socket, if that does not harm its parent's."""

    def _name(self, peer: bytes) -> str:
        return peer.decode(errors="replace")

    # --- out ---

    def _send(self, peer: bytes, header: Header, parts: Sequence[Buffer], now: bool, faulty: bool = True) -> None:
        faults = fault_injection.active
        if faulty and faults is not None:
            send = functools.partial(self._send, peer, header, parts, now, faulty=False)
            faults.carry("transport.send", self, peer, self._name(peer), send, self._loop)
            return
        if self._network.forked:
            return
        if now and undisturbed(self._loop, self._send_here, (peer, header, parts)):
            return
        self._out.append((peer, header, parts))
        self._look_at_queue()

    def _look_at_queue(self) -> None:
        """Have what was queued sent: by the loop, by this thread when it has handled messages, or now if it is much."""
        if self._delivering == threading.get_ident():
            self._flush_due = True  # it is flushed when what has arrived is handled
        elif not self._flush_due:
            undisturbed(self._loop, self._leave_queue)
        elif len(self._out) >= BATCH:
            undisturbed(self._loop, self._send_here)

    def _send_here(self, *last: Queued) -> bool:
        """Send what is queued, and then *last*, on this thread. Return False if another thread sends now."""
        if not self._lock.acquire(blocking=False):
            return False
        self._send_held(*last)
        return True

    def _send_held(self, *last: Queued) -> None:
        """Send what is queued, and then *last*, on this thread, which holds the socket's lock. Release the lock.

        A `_flush` that finds the lock taken does nothing, so what was queued meanwhile is left to another one.
        """
        try:
            if last and not self._out and not self._closed and type(header := last[0][1]) is bytes:
                self._write(last[0][0], [(header, last[0][2])])
            else:
                self._out.extend(last)
                self._write_queued()
            due = None if self._closed else self._after_send()
        finally:
            self._lock.release()
        if due is not None:
            due()
        if self._out:
            self._leave_queue()

    def _leave_queue(self) -> None:
        """Have the loop send what was queued while this thread held the socket's lock."""
        if not self._flush_due and not self._closed:
            self._flush_due = True
            self._wake(self._flush)

    def _wake(self, callback: Callable[[], None]) -> None:
        call_threadsafe(self._loop, callback)

    def _write_queued(self) -> None:
        """Send all queued messages: those for one peer in one chunk. The caller holds the socket's lock."""
        out = self._out
        if self._closed or not out:
            return
        queues: dict[bytes, list[tuple[Header, Sequence[Buffer]]]] = {}
        queue: list[tuple[Header, Sequence[Buffer]]] = []
        plain, last = True, None
        for _ in range(len(out)):  # as many as there are now: other threads may append meanwhile
            peer, header, parts = out.popleft()
            if peer is not last:
                queue, last = queues.setdefault(peer, []), peer
            queue.append((header, parts))
            plain = plain and type(header) is bytes
        if not plain:
            queues = {peer: self._joined(messages) for peer, messages in queues.items()}  # type: ignore[misc]
        for peer, messages in queues.items():
            self._write(peer, cast("Messages", messages))

    def _unreachable(self, peer: bytes, messages: Messages) -> None:
        """Report that *messages* were dropped, because *peer* is not connected."""
        log.debug("dropped %s to %r, which is not connected", counted(len(messages), "message"), peer_name(peer))
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
        anywhere, for_loop = self._on_any_thread, self._for_loop
        if fault_injection.active is not None:
            for header, parts in messages:
                self._handle_here(peer, header, parts)
        elif anywhere is None or (self._delivering == self._thread and not for_loop.waiting):
            self._handle(peer, messages)
        else:
            for header, parts in messages:  # here if that is safe, and no earlier one waits for the loop
                try:
                    if for_loop.waiting or not anywhere(peer, header, parts):
                        for_loop.append(self._deliver_late, peer, header, parts)
                except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
                    self._failed(peer, error)
        return True

    def _handle_here(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        faults = fault_injection.active
        if faults is None:
            self._handle(peer, ((header, parts),))
        else:
            deliver = functools.partial(self._deliver_late, peer, header, parts)
            faults.carry("transport.receive", self, peer, self._name(peer), deliver, self._loop)

    def _warn(self, peer: bytes, error: Exception) -> None:
        if self._malformed.note():
            count = self._malformed.count
            log.warning("dropped what %.40r sent (%d times by now): %s", peer_name(peer), count, error)

    def _deliver_late(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if not self._closed:
            self._handle(peer, ((header, parts),))

    def _handle(self, peer: bytes, messages: Iterable[tuple[bytes, list[Buffer]]]) -> None:
        handle = self._on_message
        for header, parts in messages:
            try:
                handle(peer, header, parts)
            except Exception as error:  # noqa: BLE001 - it goes to the loop's policy
                self._failed(peer, error)

    def _failed(self, peer: bytes, error: Exception) -> None:
        fail = None if self._on_failed is None else functools.partial(self._on_failed, peer)
        handling_failed(self._loop, f"handling a message from {peer_name(peer) or self._name(peer)}", error, fail)
