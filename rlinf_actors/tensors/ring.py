"""The members of a broadcast: who they are, whom this one gets from and passes on to, and what ends them.

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

from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote import RemoteGroup
from rlinf_actors.tensors import members
from rlinf_actors.tensors.cargo import Hold
from rlinf_actors.tensors.directory import gone, named
from rlinf_actors.tensors.mailbox import Key
from rlinf_actors.tensors.messenger import Messenger
from rlinf_actors.tensors.options import CollectiveGroupOptions
from rlinf_actors.tensors.outbox import Letter
from rlinf_actors.tensors.receive import Slot


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
            members.check_rank(member, len(group.peers))
            rank = member.rank_path[0]
            peers.append(self._child_peers.get(member) or group.peers[rank])
            nodes.append(group.states[rank].node_rank)
        parents = members.tree(nodes)
        self._parent = None if self._index == 0 else peers[parents[self._index]]
        self._children = [peers[child] for child in members.children(parents, nodes, self._index)]
        self._stream = members.stream_name(self.order, [peer.worker_id for peer in peers])
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
