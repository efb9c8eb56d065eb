"""Membership: the ranks that a RemoteGroup gains and loses while the group runs.

The ranks of a group are 0 to N - 1; the RemoteGroup has a Peer for each. Here are the Peers of other ranks: of those
that the owner is adding, and of those that were removed. An added rank joins the RemoteGroup when its worker is
constructed. A removed rank leaves it at once, so that later calls do not reach it; calls under way end with the worker.

Everything runs on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rlinf_actors.errors import ConnectionLostError, GroupClosedError, RlinfActorsError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.restart import rank_id
from rlinf_actors.runtime.construction import Construction, unpickle_exception
from rlinf_actors.runtime.future import Promise, call_all
from rlinf_actors.runtime.peer import First, Peer
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import ExitReport, WorkerState

Connect = Callable[[Peer, WorkerState, First], None]


class Membership:
    """The ranks of a group that are being added, and those that were removed.

    Args:
        group: name of the group.
        end: fails the Peer of a worker that has ended, by its exit report.
        connect: makes the link of a Peer to its worker, and sends the given message first.

    Attributes:
        busy: True while `add_ranks` or `remove_ranks` is under way.
        additions: number of times that ranks were added, also in vain; part of the new worker ids.
        removed: Peers of removed ranks, which may still finish calls, by rank.
    """

    def __init__(self, group: str, end: Callable[[Peer, ExitReport], None], connect: Connect) -> None:
        self.busy = False
        self.additions = 0
        self.removed: dict[int, Peer] = {}
        self._group = group
        self._end = end
        self._connect = connect
        self._joining: dict[int, Peer] = {}
        self._states: dict[int, WorkerState] = {}
        self._constructed: set[int] = set()
        self._joined: Promise[None] | None = None
        self._construction: Construction | None = None
        self._first: Callable[[], WorkerState | None] = lambda: None
        self._parts: Sequence[Buffer] = ()

    @property
    def peers(self) -> list[Peer]:
        """The Peers that are no members: of ranks that are being added or were removed."""
        return [*self._joining.values(), *self.removed.values()]

    def states(self) -> list[WorkerState]:
        """Return the last known states of the workers that are being added, to send to a restarted head."""
        return list(self._states.values())

    # --- the owner adds ranks ---

    def begin(
        self,
        peers: Sequence[Peer],
        construction: Construction,
        parts: Sequence[Buffer],
        first: Callable[[], WorkerState | None],
    ) -> Promise[None]:
        """Begin to add ranks. Return the promise that resolves when all of their workers are constructed.

        Args:
            peers: a new Peer for each rank, in rank order.
            construction: how the workers are constructed.
            parts: the pickled arguments of the constructor.
            first: returns the state of rank 0, which has MASTER_PORT.
        """
        self._joining = {peer.rank: peer for peer in peers}
        self._states, self._constructed = {}, set()
        self._construction, self._parts, self._first = construction, parts, first
        self._joined = Promise(f"the new ranks of group {self._group!r}")
        return self._joined

    def report(self, worker: WorkerState) -> None:
        """Handle a report of the head on a rank that is no member."""
        peer = self._joining.get(worker.rank)
        if peer is None or peer.worker_id != worker.id:
            peer = self.removed.get(worker.rank)
        # a restarted head reports again that a worker has ended which had the rank before
        if peer is None or peer.worker_id not in ("", worker.id):
            return
        peer.worker_id, joining = worker.id, peer is self._joining.get(worker.rank)
        if worker.state == "gone":
            self._end(peer, worker.exit or ExitReport("exited"))
            if joining:
                self._states.pop(worker.rank, None)
                self.fail(peer.error or RlinfActorsError(f"{peer.name} has ended"))
        elif joining:
            self._states[worker.rank] = worker
            if worker.state == "running" and worker.endpoint is not None and not peer.connected and peer.error is None:
                self._connect(peer, worker, partial(self._create, peer))

    def _create(self, peer: Peer) -> tuple[bytes, Sequence[Buffer]] | None:
        construction, first = self._construction, self._first()
        if construction is None or first is None or peer.rank in self._constructed:
            return None
        call, header = construction.create(first)
        peer.open(PendingRequest(partial(self._answered, peer), self.fail), call)
        peer.constructing(call)
        return header, self._parts

    def _answered(self, peer: Peer, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if not isinstance(frame, frames.Raised):
            self._constructed.add(peer.rank)
            peer.release()
            if self._joined is not None and len(self._constructed) == len(self._joining):
                self._joined.resolve(None)
            return
        unpickle_exception(peer, frame, parts, self.fail)

    def fail(self, error: BaseException) -> None:
        """Fail the addition that is under way, if there is one. Any thread."""
        if self._joined is not None:
            self._joined.reject(error)

    def link_lost(self, peer: Peer) -> None:
        """Fail *peer*, and the addition of its rank, because its connection was interrupted."""
        peer.fail(ConnectionLostError(f"the connection to {peer.name} on {peer.node} was lost"))
        if peer.rank in self._joining and peer.error is not None:
            self.fail(peer.error)

    def joined(self) -> tuple[list[Peer], dict[int, WorkerState]]:
        """Take the Peers and states of the added ranks, which are members now, in rank order."""
        peers = [self._joining[rank] for rank in sorted(self._joining)]
        states, self._joining, self._states, self._joined = self._states, {}, {}, None
        for peer in peers:
            self.removed.pop(peer.rank, None)
        return peers, states

    def withdraw(self, error: Exception) -> None:
        """Forget the ranks that are being added, because that failed: fail their Peers and close their links."""
        peers, self._joining, self._states, self._joined = self._joining, {}, {}, None
        for peer in peers.values():
            peer.fail(error)
            peer.close()

    # --- ranks leave ---

    def leave(self, peers: Sequence[Peer]) -> None:
        """Keep the Peers of removed ranks, until their workers have ended."""
        for peer in peers:
            self.removed[peer.rank] = peer

    def end_removed(self) -> None:
        """Fail the Peers of removed ranks whose workers have ended, if no report has done so yet."""
        for peer in self.removed.values():
            peer.fail(removed_error(peer))
            peer.close()


def removed_error(peer: Peer) -> GroupClosedError:
    """Return the error for calls to a removed rank."""
    return GroupClosedError(f"worker {peer.name} on {peer.node} has ended: it was removed from its group")


class ResizableGroup:
    """Base of RemoteGroup: its ranks with their Peers, and how they change."""

    owned: bool
    detail: str
    peers: list[Peer]
    states: dict[int, WorkerState]
    membership: Membership
    _construction: Construction | None
    _watchers: tuple[Callable[[Iterable[int]], object], ...]
    _alive = 0  # a rank whose worker has not ended, as far as was checked

    def _peer(self, rank: int, node: str) -> Peer:
        raise NotImplementedError

    def peer_of(self, rank: int) -> Peer | None:
        """Return the Peer of *rank*, also of one that was removed; None if it is not known."""
        peers = self.peers
        return peers[rank] if rank < len(peers) else self.membership.removed.get(rank)

    def resize(self, world_size: int, detail: str = "") -> None:
        """Follow the number of ranks and the description that the head reports, if another process owns the group."""
        self.detail = detail or self.detail
        if self.owned or not world_size or world_size == len(self.peers):
            return
        if world_size < len(self.peers):
            self.shrink(world_size)
        else:
            new = range(len(self.peers), world_size)
            self.peers = [*self.peers, *(self._peer(rank, "") for rank in new)]
            for rank in new:
                self.membership.removed.pop(rank, None)

    def shrink(self, world_size: int) -> list[Peer]:
        """Remove the ranks from *world_size* on, and return their Peers. Calls under way on them go on."""
        leaving, self.peers = self.peers[world_size:], self.peers[:world_size]
        self.membership.leave(leaving)
        for peer in leaving:
            self.states.pop(peer.rank, None)
            if self._construction is not None:
                self._construction.constructed.pop(peer.rank, None)
        call_all(self._watchers, [peer.rank for peer in leaving])
        return leaving

    def begin_growth(self, workers: Sequence[tuple[str, str]], parts: Sequence[Buffer]) -> Promise[None]:
        """Begin to add ranks for *workers*, (id, node name) pairs; see `Membership.begin`. *parts* are arguments."""
        assert self._construction is not None
        peers = [self._peer(len(self.peers) + index, node) for index, (_, node) in enumerate(workers)]
        for peer, (id, _) in zip(peers, workers, strict=True):
            peer.worker_id = id
        return self.membership.begin(peers, self._construction, parts, lambda: self.states.get(0))

    def grow(self) -> None:
        """Make the added ranks, whose workers are constructed, members of the group."""
        assert self._construction is not None
        peers, states = self.membership.joined()
        self.peers = [*self.peers, *peers]
        self.states.update(states)
        self._construction.constructed.update({peer.rank: peer.worker_id for peer in peers})
        call_all(self._watchers, [peer.rank for peer in peers])

    def _is_successor(self, worker: WorkerState) -> bool:
        """Return True if *worker* is a later incarnation of the known worker of its rank."""
        if not 0 <= worker.rank < len(self.peers):
            return False
        known, before = self.peers[worker.rank].worker_id, self.states.get(worker.rank)
        if known in ("", worker.id) or rank_id(known) != rank_id(worker.id):
            return False
        return worker.restarts > (before.restarts if before is not None else -1)

    def _replace(self, replaced: Sequence[tuple[Peer, str, Exception]]) -> list[Peer]:
        """Give new Peers to ranks, and return them.

        *replaced* has, for each rank, the old Peer, the worker id of the new one, and the error with which calls fail
        that are pending on the old one. The list of Peers is copied once: results of calls keep the old one.
        """
        if not replaced:
            return []
        peers, made = list(self.peers), []
        for old, worker_id, _ in replaced:
            peer = peers[old.rank] = self._peer(old.rank, old.node)
            peer.worker_id = worker_id or peer.worker_id
            made.append(peer)
        self.peers = peers  # before `fail`: callers that are told of the end call again, and must find the new peers
        for old, _, error in replaced:
            old.fail(error)
            old.close()
        return made

    def _all_gone(self) -> bool:
        """Return True if all workers have ended. `_alive` moves on only, so all reports together cost O(ranks)."""
        size = len(self.peers)
        if len(self.states) < size:
            return False
        for _ in range(size):
            state = self.states.get(self._alive % size)
            if state is None or state.state != "gone":
                return False
            self._alive += 1
        return True

    @property
    def construction(self) -> Construction | None:
        """How this process constructs the workers; None if another process owns the group."""
        return self._construction if self.owned else None
