"""Messenger: the messages of one worker, both directions. Any thread, unless a method says otherwise.

House rules: the mailbox is touched under `_lock` alone; no work is ended and nothing is sent while
it is held. What a finalizer gives back (any thread, any lock held) is put into `_unread`, and from
there into the mailbox before anybody looks there. An outbox is made on the first message to a worker
and ends with it. The objects are pickled and unpickled on the user's threads, never on the loop's.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rlinf_actors.errors import CallTimeoutError, ConnectionLostError, GroupNotFoundError, WorkerDiedError
from rlinf_actors.messaging import contents
from rlinf_actors.messaging.directory import Directory, gone, named
from rlinf_actors.messaging.flow_control import Returns
from rlinf_actors.messaging.mailbox import Arrived, Key, Mailbox, Recent
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.messaging.outbox import Letter, Outbox
from rlinf_actors.messaging.receive import Body, Received, Slot
from rlinf_actors.messaging.tensor_sender import Freight
from rlinf_actors.messaging.tensor_transfer import Station
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

log = logging.getLogger(__name__)

Reply = Callable[[bytes, frames.AnyFrame], None]


class Messenger:
    """One worker's messages.

    Args:
        runtime: of this worker.
        name, worker_id: of this worker.
        connect: waits (on the loop) until the runtime is in session with the head.
        reply: answers on a link that a message came by.
        window: bytes that may be on their way to one worker.
        station: this worker's end of the ways that tensors take beside the messages; default: one without devices.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        worker_id: str,
        connect: Callable[[], Awaitable[Runtime]],
        reply: Reply,
        window: int,
        station: Station | None = None,
    ) -> None:
        self.name = name
        self.worker_id = worker_id
        self.directory = Directory(runtime, connect)
        self._io = runtime.io
        self._reply = reply
        self._window = window
        self._lock = threading.Lock()
        self._mailbox: Mailbox[Slot] = Mailbox()
        self._returns = Returns()
        self._outboxes: dict[Peer, Outbox] = {}
        self._watched: set[Peer] = set()
        self._broken: Recent[str, Exception] = Recent()  # those that live, and to whom a connection was lost
        self._unread: collections.deque[tuple[Key, Arrived]] = collections.deque()
        self.peer_gone: Callable[[Peer], None] = lambda peer: None
        """Called with a peer given to `watch` that is gone; set before the first message. Any thread."""
        self.freight = Freight(station or Station(runtime.io, worker_id, name), self.directory, reply, self._outbox)

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that arrived and that nobody has asked for."""
        return self._mailbox.held

    # --- sending ---

    def send(
        self,
        to: WorkerAddress,
        value: Any,
        piggyback: Any,
        *,
        now: bool,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork[None]:
        """Send an object; the work ends when the window let it go and the receiver holds its buffers.

        Raises:
            ValueError: a tensor in it is not contiguous. Nothing was sent.
            SerializationError: something in it cannot be pickled. Nothing was sent.
        """
        contents.check_contiguous(value)
        hold = self.freight.hold()
        parts, large = contents.encode(value, piggyback, hold)
        hold.seal()
        work: AsyncWork[None] = AsyncWork(f"send() to {to}")
        letter = Letter("", parts, large, work)

        def found(peer: Peer | Exception) -> None:
            try:
                if isinstance(peer, Exception):
                    raise peer
                self.freight.post(peer, letter, hold, options, now)
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                work.reject(named(error, work._what))

        self.directory.peer(to, found)
        return work

    def post(self, peer: Peer, letter: Letter, *, now: bool = False) -> None:
        """Send to a worker that was found."""
        self._outbox(peer).post(letter, now=now)

    def _outbox(self, peer: Peer) -> Outbox:
        box = self._outboxes.get(peer)
        if box is None:
            self.watch(peer)
            with self._lock:
                box = self._outboxes.get(peer)
                if box is None:
                    box = self._outboxes[peer] = Outbox(peer, self.name, self.worker_id, self._window)
                if peer.error is not None:
                    del self._outboxes[peer]  # its end was told before the outbox was there
            broken = self._broken.get(peer.worker_id)
            if broken is not None:
                box.fail(broken)
        return box

    def error_of(self, peer: Peer) -> Exception | None:
        """Why no more messages can be exchanged with this worker: it is gone, or one may be missing. Any thread."""
        return peer.error or self._broken.get(peer.worker_id)

    # --- receiving ---

    def receive(
        self, sender: WorkerAddress, convert: Callable[[Any], Any] = lambda value: value
    ) -> tuple[Received, Slot]:
        """Ask for the next object of *sender*; see `wait` for waiting with a limit."""
        place = _Place(self, sender)
        work = Received(f"recv() from {sender}", place, convert)
        place.slot = Slot((sender.get_name(), ""), work)
        place.enter()
        return work, place.slot

    def _post(self, slot: Slot, peer: Peer | Exception) -> None:
        if isinstance(peer, GroupNotFoundError):
            with self._lock:  # what a group sent before everybody forgot it is still here
                waits = self._mailbox.has_messages(slot.key)
            if not waits:
                raise peer
            self.post_slot(slot, None)
            return
        if isinstance(peer, Exception):
            raise peer
        self.watch(peer)
        self.post_slot(slot, peer)

    def post_slot(self, slot: Slot, peer: Peer | None) -> None:
        """Let a receive take its place; it gets its message at once if that is here."""
        slot.incarnation = "" if peer is None else peer.worker_id
        self._put_back()
        with self._lock:
            if slot.abandoned:
                return
            message, stale = self._mailbox.posted(slot.key, slot)
            dead = message is None and peer is not None and self.error_of(peer) is not None
            if dead:
                self._mailbox.withdraw(slot.key, slot)
        if stale:
            log.warning("dropped %d messages of an earlier %s, which has ended", len(stale), slot.key[0])
        if message is not None:
            self._give(slot, message)
        elif dead:
            assert peer is not None
            self._died([slot], peer)

    def wait(self, work: Received, slot: Slot, timeout: float | None) -> Any:
        """Block until the object is there; after *timeout* seconds the receive is withdrawn."""
        try:
            return work.wait(timeout)
        except CallTimeoutError:
            if work.done() or not self.withdraw(slot):
                return work.wait()  # it came at the last moment, or is the work's own error
        raise _late(work, timeout or 0.0)

    def limit(self, work: Received, slot: Slot, timeout: float) -> None:
        """End the work after *timeout* seconds, unless it has ended."""

        def start() -> None:
            if not work.done():
                slot.timer = self._io.loop.call_later(timeout, self._expire, slot, timeout)

        def stop() -> None:
            if slot.timer is not None:
                slot.timer.cancel()

        self._io.call(start)
        work._on_done(lambda: self._io.call(stop))

    def _expire(self, slot: Slot, timeout: float) -> None:
        work = slot.work
        if work is not None and not work.done() and (self.withdraw(slot) or work.asleep):
            work.reject(_late(work, timeout))

    def withdraw(self, slot: Slot) -> bool:
        """Take a receive back; False if it has its message or error."""
        with self._lock:
            message, slot.pending = slot.pending, None
            if slot.closed and message is None:
                return False
            slot.closed = True
            self._mailbox.withdraw(slot.key, slot)
        if message is not None:  # its tensors are still on their way
            self._unread.append((slot.key, message))
            self._put_back()
        return True

    def arrived(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> None:
        """A message came. Loop thread."""
        if frame.n:
            self._reply(link, frames.Held(frame.id, frame.n))
        body = Body(link, frame.id, parts, self.freight.arrived(link, frame, parts))
        message = Arrived(frame.src_id, frame.size, body)
        key = (frame.src, frame.stream)
        self._put_back()
        with self._lock:
            wanted = self._mailbox.wants(key, frame.src_id)
            slot = self._mailbox.arrived(key, message) if wanted else None
        if slot is not None:
            self._give(slot, message)
        elif not wanted:
            self._credit(message)

    def _give(self, slot: Slot, message: Arrived) -> None:
        """The receive gets the message; its sender may send as much again."""
        self._credit(message)
        with self._lock:
            work = slot.work if not slot.closed else None
            slot.closed = True
            body: Body = message.body
            loading = work is not None and work.waits_for_cargo and body.cargo is not None and not body.cargo.done()
            slot.pending = message if loading else None
        if loading:
            assert body.cargo is not None
            body.cargo._on_done(partial(self._loaded, slot))
        elif work is None or not work.take(message):
            self._unread.append((slot.key, message))
            self._put_back()

    def _loaded(self, slot: Slot) -> None:
        """What comes with the receive's message by other ways is here, or is lost. Any thread."""
        with self._lock:
            message, slot.pending = slot.pending, None
            work = slot.work
        if message is not None and (work is None or not work.take(message)):
            self._unread.append((slot.key, message))
            self._put_back()

    def _credit(self, message: Arrived) -> None:
        body: Body = message.body
        with self._lock:
            back = self._returns.taken(body.link, body.outbox, message.size)
        message.size = 0  # one that is put back is not counted twice
        if back:
            self._reply(body.link, frames.Returned(body.outbox, back))

    def unread(self, key: Key, message: Arrived) -> None:
        """The receive that got this message was dropped, or cancelled, before anybody looked. Finalizers too."""
        self._unread.append((key, message))
        self._io.call(self._put_back)

    def _put_back(self) -> None:
        while self._unread:
            again = []
            with self._lock:
                unread = [self._unread.popleft() for _ in range(len(self._unread))]
                for key, message in sorted(unread, key=lambda pair: pair[1].order):
                    slot = self._mailbox.put_back(key, message)
                    if slot is not None:
                        again.append((slot, message))
            for slot, message in again:
                self._give(slot, message)

    # --- who is gone ---

    def watch(self, peer: Peer) -> None:
        """End what waits for this worker when it is gone."""
        with self._lock:
            if peer in self._watched:
                return
            self._watched.add(peer)
        peer.on_gone(lambda _error: self._gone(peer))

    def link_lost(self, _link: bytes, worker_id: str) -> None:
        """A worker's connection to this one was lost: a message of its may be missing. Loop thread."""
        if not worker_id:
            return  # a driver sends no messages
        with self._lock:
            peers = [peer for peer in self._watched if peer.worker_id == worker_id]
            self._broken[worker_id] = ConnectionLostError(
                "the connection over which it sends was lost, and is there again: a message may be missing. "
                "It runs, but no more messages can be exchanged with it: launch one of the groups again"
            )
        for peer in peers:
            self._gone(peer)

    def link_forgotten(self, link: bytes) -> None:
        """The process at the other end of a link has ended, and what it sent is here. Loop thread."""
        with self._lock:
            self._returns.forget(link)

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            if isinstance(peer.error, ConnectionLostError):  # other messages go to another peer of the same worker
                if peer.worker_id not in self._broken:
                    self._broken[peer.worker_id] = peer.error
            elif isinstance(peer.error, WorkerDiedError):
                self._broken.pop(peer.worker_id, None)  # all its peers say so themselves from now on
            slots = self._mailbox.sender_gone(peer.name, peer.worker_id)
            self._watched.discard(peer)
            box = self._outboxes.pop(peer, None)
        if box is not None and peer.error is None:
            box.fail(self._broken[peer.worker_id])
        self._died(slots, peer)
        self.peer_gone(peer)

    def _died(self, slots: list[Slot], peer: Peer) -> None:
        error = self.error_of(peer)
        assert error is not None
        self._fail(slots, lambda what: gone(peer, error, what))

    def _fail(self, slots: list[Slot], error: Callable[[str], Exception]) -> None:
        for slot in slots:
            with self._lock:
                work = None if slot.closed else slot.work
                slot.closed = True
            if work is not None:
                work.reject(error(work._what))

    def forget(self, key: Key) -> None:
        """Nobody will receive from this queue any more; what arrives later is dropped."""
        with self._lock:
            messages = self._mailbox.forget(key)
        for message in messages:
            self._credit(message)


class _Place:
    """Where a recv waits."""

    slot: Slot

    def __init__(self, messenger: Messenger, sender: WorkerAddress) -> None:
        self._messenger = messenger
        self._sender = sender
        self._entered = 0

    def enter(self) -> None:
        self.slot.closed = False
        self._entered += 1
        self._messenger.directory.peer(self._sender, partial(self._found, self._entered))

    def leave(self) -> None:
        self._messenger.withdraw(self.slot)

    def unread(self, message: Arrived) -> None:
        self._messenger.unread(self.slot.key, message)

    def _found(self, entered: int, peer: Peer | Exception) -> None:
        if entered != self._entered:
            return  # it left while the sender was looked up, and came again
        try:
            self._messenger._post(self.slot, peer)
        except Exception as error:  # noqa: BLE001 - it reaches the waiter
            failure = error
            self._messenger._fail([self.slot], lambda what: named(failure, what))


def _late(work: Received, timeout: float) -> CallTimeoutError:
    return CallTimeoutError(f"{work._what}: no message came within {timeout:g} s")
