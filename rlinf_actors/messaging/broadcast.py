"""Broadcast: one object from one member to all; see `ring` for who they are and how the bytes go.

A source that cannot send, because its object cannot be pickled, says so in its turn, and the others
raise; so the turns of all members stay in step.

The members of a broadcast: who they are, whom this one gets from and passes on to, and what ends them.

Named a ring for all who belong; the bytes go down a tree. It is set up at the first broadcast among
them and kept. It watches every member: when one is gone, every broadcast that has not ended here ends
with PeerDiedError, wherever in the tree the gap is. It has a link to its children only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Union

from rlinf_actors.messaging import addressing, contents
from rlinf_actors.messaging.directory import gone, named
from rlinf_actors.messaging.mailbox import Arrived, Key
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.messaging.outbox import Letter
from rlinf_actors.messaging.receive import Body, Received, Slot
from rlinf_actors.messaging.tensor_transfer import Arriving, Hold
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup


class Turn:
    """One broadcast as one member sees it."""

    work: AsyncWork[Any]
    slot: Slot | None = None

    def begin(self, ring: Ring) -> None:
        """The members are known."""
        raise NotImplementedError


class Ring:
    """The members, as this one sees them. Any thread.

    Args:
        messenger: carries the messages.
        me: this worker.
        order: the members, the source first.
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
        self._child_peers: dict[WorkerAddress, Peer] = {}
        self._early: list[Turn] | None = []
        self._under_way: set[Turn] = set()
        self._error: Callable[[str], Exception] | None = None
        self._others: set[Peer] = set()
        self._parent: Peer | None = None
        self._children: list[Peer] = []
        self._stream = ""
        self._turns: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self.source_node = ""

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
            turn.work.reject(self._error(turn.work._what))
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
        child_members = [member for member in self.order if len(member.rank_path) > 1]
        if not child_members:
            self._complete()
        for child in child_members:
            self._messenger.directory.peer(child, partial(self._found_child, child, len(child_members)))

    def _found_child(self, child: WorkerAddress, count: int, outcome: Union[Peer, Exception]) -> None:
        if isinstance(outcome, Exception):
            failure = outcome
            self.fail(lambda what: named(failure, what))
            return
        with self._lock:
            self._child_peers[child] = outcome
            last = len(self._child_peers) == count
        if last:
            self._complete()

    def _complete(self) -> None:
        """All groups, and all children, were found."""
        try:
            self._take_places()
        except Exception as error:  # noqa: BLE001 - it reaches the waiters
            wrong = error
            self.fail(lambda what: named(wrong, what))
            return
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

    def _take_places(self) -> None:
        groups = [self._groups[member.root_group_name] for member in self.order]
        peers, nodes = [], []
        for group, member in zip(groups, self.order, strict=True):
            addressing.check_rank(member, len(group.peers))
            rank = member.rank_path[0]
            peers.append(self._child_peers.get(member) or group.peers[rank])
            nodes.append(group.states[rank].node_rank)
        parents = addressing.tree(nodes)
        self._parent = None if self._index == 0 else peers[parents[self._index]]
        self._children = [peers[child] for child in addressing.children(parents, nodes, self._index)]
        self._stream = addressing.stream_name(self.order, [peer.worker_id for peer in peers])
        self._others = {peer for index, peer in enumerate(peers) if index != self._index}
        self.source_node = peers[0].node

    def gone(self, peer: Peer) -> None:
        """If this is a member, and it is dead, no broadcast can end well any more."""
        error = self._messenger.error_of(peer)
        if error is not None and peer in self._others:
            self.fail(lambda what: gone(peer, error, what))

    def fail(self, error: Callable[[str], Exception]) -> None:
        """No broadcast of this ring can end well any more."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = [*self._under_way, *(self._early or [])]
            self._early = None
            self._under_way.clear()
            if self._turns is not None:
                self._turns.put(None)
        self._ended(self)
        for turn in lost:
            turn.work.reject(error(turn.work._what))
            if turn.slot is not None:
                self._messenger.withdraw(turn.slot)
        if self._parent is not None:
            self._messenger.forget(self.key)

    # --- what turns need ---

    @property
    def passes_on(self) -> bool:
        """Whether this member has children."""
        return bool(self._children)

    def in_order(self, turn: Callable[[], object], waits: bool) -> None:
        """Call *turn*, after those given before; on a thread of the ring's own from the first one that *waits*."""
        with self._lock:
            if self._turns is None and waits:
                self._turns = queue.SimpleQueue()
                threading.Thread(
                    target=_call_all, args=(self._turns,), name="rlinf-actors-broadcast", daemon=True
                ).start()
            turns = self._turns
            if turns is not None:
                turns.put(turn)
                if self._error is not None:
                    turns.put(None)
        if turns is None:
            turn()

    def forward(
        self,
        parts: Sequence[Buffer],
        large: bool,
        done: Callable[[], object],
        hold: Hold | None = None,
        options: CollectiveGroupOptions | None = None,
    ) -> None:
        """Send to the children; *done* when all have it. The end of one is that of the ring.

        Args:
            parts, large: see Letter.
            done: called once.
            hold: tensors that go by other ways.
            options: how these are made.
        """
        for child in self._children:
            if large:  # once for all who can be lent it; it is a copy then
                parts, stored = child.store(parts)
                large = not stored
        left = [len(self._children)]
        guard = threading.Lock()

        def one_done(child: Peer, work: AsyncWork[None]) -> None:
            error = work.error
            if error is not None:
                self.fail(lambda what: _ended_by(child, error, what))
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
            letter = Letter(self._stream, parts, large, work)
            self._messenger.freight.post(child, letter, hold or Hold(), options, False)

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


def _ended_by(child: Peer, error: BaseException, what: str) -> Exception:
    if child.error is None and isinstance(error, Exception):
        return named(error, what)  # it lives; the way to it does not
    return gone(child, error, what)


def _call_all(turns: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while True:
        turn = turns.get()
        if turn is None:
            return
        turn()
        del turn  # it has a message, which is the receiver's now


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

    def broadcast(
        self,
        value: Any,
        groups: Any,
        src: Any,
        problem: Exception | None = None,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork[Any]:
        """Take part in a broadcast; see Worker.broadcast.

        Args:
            value, groups, src: as there.
            problem: raised once this member has done its part for the others: the source tells them, another
                member passes on.
            options: how tensors travel that go by a collective library.

        Raises:
            ValueError, TypeError, UsageError: the members are not named well: nobody hears of it.
            Exception: *problem*; or, at the source, what keeps its object from being sent. The others raise too.
        """
        everyone = addressing.addresses(groups)
        order = tuple(addressing.in_order(everyone, addressing.source(src, everyone)))
        if self._me not in order:
            raise ValueError(f"{self._me} is not a member of the broadcast: {', '.join(map(str, order))}")
        error: BaseException | None = problem
        turn: Turn
        if order[0] != self._me:
            turn = Receiving(order, options)
        else:
            parts: list[Buffer] = []
            large = False
            hold = self._messenger.freight.hold()
            try:
                if problem is not None:
                    raise problem
                contents.check_contiguous(value)
                parts, large = contents.encode(value, None, hold)
                hold.seal()
            except BaseException as failed:  # noqa: BLE001 - raised below: the others must not wait for ever
                error = failed
                hold.clear()
                parts, large = contents.encode_failure(failed)
            turn = Sending(value, parts, large, hold, options)
        turn.work._seen = error is not None  # nobody will look at it
        self._ring(order).start(turn)
        if error is not None:
            raise error
        return turn.work

    def _ring(self, order: tuple[WorkerAddress, ...]) -> Ring:
        with self._lock:
            ring = self._rings.get(order)
            if ring is not None:
                return ring
            ring = self._rings[order] = Ring(self._messenger, self._me, order, self._ended)
        ring.find()
        return ring

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            rings = list(self._rings.values())
        for ring in rings:
            ring.gone(peer)

    def _ended(self, ring: Ring) -> None:
        with self._lock:
            if self._rings.get(ring.order) is ring:
                del self._rings[ring.order]


class Sending(Turn):
    """At the source; ends with its own object when its children have it."""

    def __init__(
        self,
        value: Any,
        parts: Sequence[Buffer],
        large: bool,
        hold: Hold,
        options: CollectiveGroupOptions | None,
    ) -> None:
        self.work = AsyncWork("broadcast()")
        self._hold = hold
        self._options = options
        self._value = value
        self._parts = parts
        self._large = large

    def begin(self, ring: Ring) -> None:
        """Send to the children."""
        done = lambda: self.work.resolve(self._value)  # noqa: E731
        ring.forward(self._parts, self._large, done, self._hold, self._options)


class Receiving(Turn):
    """At another member: receive, pass on as it came, end when the children have it."""

    def __init__(self, order: tuple[WorkerAddress, ...], options: CollectiveGroupOptions | None) -> None:
        self.options = options
        self.source = order[0]
        self.work = _Passed(self, f"broadcast() from {order[0]}")
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
        self._turn: Receiving | None = turn
        self._source = turn.source
        self._source_node = ""

    waits_for_cargo = False  # who passes on keeps the order, and waits for it elsewhere

    def take(self, message: Arrived) -> bool:
        """Pass on; the object is ours when the children have it, since both are the same memory."""
        assert self._turn is not None
        ring = self._turn.ring
        assert ring is not None
        ring.in_order(lambda: self._pass_on(ring, message), message.body.cargo is not None)
        return True

    def _pass_on(self, ring: Ring, message: Arrived) -> None:
        """In the order of the turns; not on the loop's thread if there is a cargo."""
        assert self._turn is not None
        options = self._turn.options
        cargo: Arriving | None = message.body.cargo
        hold, raw = Hold(), message.body.parts
        if cargo is not None:
            raw = cargo.parts
            try:
                cargo.wait()
                if ring.passes_on:
                    hold = cargo.hold()
            except Exception as error:  # noqa: BLE001 - it reaches this member's waiter, and the children's
                failed = error
                parts, large = contents.encode_failure(error)
                ring.forward(parts, large, lambda: self.reject(failed))
                return
        parts, large = contents.settled(raw)
        ring.forward(parts, large, lambda: self._passed(message, ring), hold, options)

    def _passed(self, message: Arrived, ring: Ring) -> None:
        self._message = message
        self._source_node = ring.source_node
        self._turn = None  # it has us: what we give would wait for the garbage collector, and be lent meanwhile
        self.resolve(None)

    def _read(self, body: Body) -> Any:
        error = contents.failure_in(body.parts, self._source, self._source_node)
        if error is not None:
            raise named(error, self._what)
        return super()._read(body)

    def _fall_asleep(self) -> None:
        pass  # cancelled or not, the others depend on it


class _Fixed:
    """The place of a member in a broadcast: it is not left."""

    def enter(self) -> None:
        raise AssertionError("a place that is not left is not entered again")

    def leave(self) -> None:
        raise AssertionError("a place in a broadcast is not left")

    def unread(self, message: Arrived) -> None:
        pass  # it was passed on; this member did not want it
