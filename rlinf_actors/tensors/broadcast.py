"""Broadcast: one object from one member to all, down a binary tree, so that the source sends it twice at most.

A ring of members (named so for all who belong; the bytes go down a tree) is set up at the first
broadcast among them and kept. It watches every member: when one is gone, every broadcast that has
not ended here ends with PeerDiedError, wherever in the tree the gap is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Union

from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote import RemoteGroup
from rlinf_actors.tensors import contents, members
from rlinf_actors.tensors.directory import gone, named
from rlinf_actors.tensors.mailbox import Arrived, Key
from rlinf_actors.tensors.messenger import Messenger
from rlinf_actors.tensors.outbox import Letter
from rlinf_actors.tensors.receive import Received, Slot


class Broadcaster:
    """The broadcasts of one worker. Any thread.

    Args:
        messenger: carries them.
        me: this worker's address.
    """

    def __init__(self, messenger: Messenger, me: WorkerAddress) -> None:
        self._messenger = messenger
        self._me = me
        self._lock = threading.Lock()
        self._rings: dict[tuple[WorkerAddress, ...], Ring] = {}
        messenger.peer_gone = self._gone

    def broadcast(self, value: Any, groups: Any, src: Any) -> AsyncWork[Any]:
        """Take part in a broadcast; see Worker.broadcast.

        Raises:
            ValueError, TypeError, UsageError: the members are not named well, or a tensor is not contiguous.
            SerializationError: the object cannot be pickled. Nothing was sent.
        """
        everyone = members.addresses(groups)
        order = tuple(members.tree(everyone, members.source(src, everyone)))
        if self._me not in order:
            raise ValueError(f"{self._me} is not a member of the broadcast: {', '.join(map(str, order))}")
        turn: Turn
        if order[0] == self._me:
            contents.check_contiguous(value)
            turn = Sending(value, *contents.encode(value))
        else:
            turn = Receiving(order)
        with self._lock:
            ring = self._rings.get(order)
            new = ring is None
            if ring is None:
                ring = self._rings[order] = Ring(self._messenger, self._me, order, self._ended)
        if new:
            ring.find()
        ring.start(turn)
        return turn.work

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            rings = list(self._rings.values())
        for ring in rings:
            ring.gone(peer)

    def _ended(self, ring: Ring) -> None:
        with self._lock:
            if self._rings.get(ring.order) is ring:
                del self._rings[ring.order]


class Ring:
    """The members of a broadcast, in the tree's order.

    Args:
        messenger: carries the messages.
        me: this worker.
        order: the members as a heap, the source first.
        ended: called once when a member is gone or could not be found.
    """

    def __init__(
        self,
        messenger: Messenger,
        me: WorkerAddress,
        order: tuple[WorkerAddress, ...],
        ended: Callable[[Ring], None],
    ) -> None:
        self.order = order
        self._messenger = messenger
        self._index = order.index(me)
        self._ended = ended
        self._lock = threading.RLock()  # ending one turn's work may start what follows it
        self._groups: dict[str, RemoteGroup] = {}
        self._names = list(dict.fromkeys(member.root_group_name for member in order))
        self._early: list[Turn] | None = []
        self._under_way: set[Turn] = set()
        self._error: Callable[[str], Exception] | None = None
        self._parent: Peer | None = None
        self._children: list[Peer] = []
        self._others: set[Peer] = set()
        self._stream = ""

    def start(self, turn: Turn) -> None:
        """The next broadcast. In order of the calls, also of those made before the members were found."""
        with self._lock:
            if self._error is None and self._early is not None:
                self._early.append(turn)
                return
            if self._error is None:
                self._under_way.add(turn)
        self._go(turn)

    def _go(self, turn: Turn) -> None:
        if self._error is not None:
            turn.fail(self._error)
            return
        turn.work._on_done(lambda: self._over(turn))
        turn.begin(self)

    def _over(self, turn: Turn) -> None:
        with self._lock:
            self._under_way.discard(turn)

    # --- members ---

    def find(self) -> None:
        """Look up the groups, one after the other; then begin what was started meanwhile."""
        name = self._names[len(self._groups)]
        self._messenger.directory.group(name, lambda outcome: self._found(name, outcome))

    def _found(self, name: str, outcome: Union[RemoteGroup, Exception]) -> None:
        if isinstance(outcome, Exception):
            failure = outcome
            self.fail(lambda what: named(failure, what))
            return
        self._groups[name] = outcome
        if len(self._groups) < len(self._names):
            self.find()
            return
        try:
            peers = [self._messenger.peer(self._groups[member.root_group_name], member) for member in self.order]
        except Exception as error:  # noqa: BLE001 - it reaches the waiters
            failure = error
            self.fail(lambda what: named(failure, what))
            return
        parent, children = members.parent_and_children(self._index, len(peers))
        self._parent = None if parent is None else peers[parent]
        self._children = [peers[child] for child in children]
        self._stream = members.stream_name(self.order, [peer.worker_id for peer in peers])
        self._others = {peer for index, peer in enumerate(peers) if index != self._index}
        for peer in self._others:
            self._messenger.watch(peer)
        for peer in self._others:
            self.gone(peer)  # one may have been dead before
        while True:
            with self._lock:
                early = self._early or []
                if not early:
                    self._early = None
                    return
                self._early = []
                self._under_way.update(early)
            for turn in early:
                self._go(turn)

    def gone(self, peer: Peer) -> None:
        """If this is a member, and it is dead, no broadcast can end well any more. Any thread."""
        error = peer.error
        if error is not None and peer in self._others:
            self.fail(lambda what: gone(peer, error, what))

    def fail(self, error: Callable[[str], Exception]) -> None:
        """A member is gone: no broadcast of this ring can end well any more. Any thread."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = [*self._under_way, *(self._early or [])]
            self._early = None
            self._under_way.clear()
        self._ended(self)
        for turn in lost:
            turn.fail(error)
            if isinstance(turn, Receiving) and turn.slot is not None:
                self._messenger.withdraw(turn.slot)
        if self._parent is not None:
            self._messenger.forget((self._parent.name, self._stream))

    # --- what turns need ---

    def forward(self, parts: list[Buffer], large: bool, done: Callable[[], object]) -> None:
        """Send to the children; *done* when all have it. The end of one is that of the ring."""
        left = [len(self._children)]
        guard = threading.Lock()

        def one_done(child: Peer, work: AsyncWork[None]) -> None:
            error = work.error
            if error is not None:
                self.fail(lambda what: gone(child, error, what))
                return
            with guard:
                left[0] -= 1
                last = left[0] == 0
            if last:
                done()

        if not self._children:
            done()
        for child in self._children:
            work: AsyncWork[None] = AsyncWork(f"broadcast from {self.order[0]} to {child.name}")
            work._seen = True  # its error is the ring's
            work._on_done(lambda child=child, work=work: one_done(child, work))  # type: ignore[misc]
            self._messenger.post(child, Letter(self._stream, parts, large, work))

    def post(self, slot: Slot) -> None:
        """Wait for the parent's next message."""
        assert self._parent is not None
        slot.key = self.key
        self._messenger.post_slot(slot, self._parent)

    @property
    def key(self) -> Key:
        """The queue that the parent's messages come in."""
        assert self._parent is not None
        return self._parent.name, self._stream


class Turn:
    """One broadcast as one member sees it."""

    work: AsyncWork[Any]

    def begin(self, ring: Ring) -> None:
        """The members are known."""
        raise NotImplementedError

    def fail(self, error: Callable[[str], Exception]) -> None:
        """It cannot end well."""
        self.work.reject(error(self.work._what))


class Sending(Turn):
    """At the source; ends with its own object when its children have it."""

    def __init__(self, value: Any, parts: list[Buffer], large: bool) -> None:
        self.work = AsyncWork("broadcast()")
        self._value = value
        self._parts = parts
        self._large = large

    def begin(self, ring: Ring) -> None:
        """Send to the children."""
        ring.forward(self._parts, self._large, lambda: self.work.resolve(self._value))


class Receiving(Turn):
    """At another member: receive, pass on as it came, end when the children have it."""

    def __init__(self, order: tuple[WorkerAddress, ...]) -> None:
        self.work = _Passed(self, f"broadcast() from {order[0]}")
        self.slot: Slot | None = None
        self.ring: Ring | None = None

    def begin(self, ring: Ring) -> None:
        """Wait for the parent."""
        self.ring = ring
        self.slot = Slot(ring.key, self.work)  # type: ignore[arg-type]
        ring.post(self.slot)


class _Passed(Received):
    """The work of a member that passes on. It stays while its turn does: others depend on it."""

    def __init__(self, turn: Receiving, what: str) -> None:
        super().__init__(what, _Fixed())
        self._turn = turn

    def take(self, message: Arrived) -> bool:
        """Pass on; the object is ours when the children have it, since both are the same memory."""
        ring = self._turn.ring
        assert ring is not None
        parts, large = contents.settled(message.body.parts)
        ring.forward(parts, large, lambda: self._passed(message))
        return True

    def _fall_asleep(self) -> None:
        pass  # cancelled or not, the others depend on it

    def _passed(self, message: Arrived) -> None:
        self._message = message
        self.resolve(None)


class _Fixed:
    """The place of a member in a broadcast: it is not left."""

    def enter(self) -> None:
        raise AssertionError("a place that is not left is not entered again")

    def leave(self) -> None:
        raise AssertionError("a place in a broadcast is not left")

    def unread(self, message: Arrived) -> None:
        pass  # it was passed on; this member did not want it
