"""RemoteGroup: a group as this process knows it, with its peers, the head's reports, and its construction.

All handles of a group in a process share one RemoteGroup, which GroupRegistry makes. There are two kinds. The process
that launched the group owns it: its RemoteGroup has a `Construction`, connects to every worker as the worker comes up,
and sends each worker a Create as the first message. Rank 0 chooses MASTER_PORT, so nothing is constructed before the
head has reported rank 0. All other processes connect to a worker when there is a message to send.

`ready` resolves when all workers are constructed. The first failure rejects it and fails every call on the group.
`gone` resolves when all workers have ended. Everything runs on the loop thread unless a docstring says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from rlinf_actors.errors import (
    ConnectionLostError,
    GroupClosedError,
    UsageError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.net.link import Network
from rlinf_actors.net.loop import Turns
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.construction import Construction, Inquiry, Readiness, unpickle_exception
from rlinf_actors.runtime.future import Promise, call_all
from rlinf_actors.runtime.membership import Membership, ResizableGroup
from rlinf_actors.runtime.node_relays import NodeRelays
from rlinf_actors.runtime.peer import First, Peer
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.runtime.worker_ends import death, note_breakpoint
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import ExitReport, GroupHandle, GroupState, WorkerState


class RemoteGroup(ResizableGroup):
    """One group as this process knows it: its connections (Peers), the last reports of the head, and its construction.

    Args:
        network: makes the links to the workers.
        identity, host: identity and host key of this process.
        namespace, name: namespace and name of the group.
        node_names: node name of each rank, for error messages.
        construction: how to construct the workers, if this process owns the group; else None.
        on_failure: called with this group if it cannot come up, or if a restarted worker cannot be constructed.
        soon: runs a function on the loop thread; callable from any thread. If given, the link to a worker is made when
            it is first needed; otherwise all links are made as the workers come up.
        me: worker id of this process, "" in a driver.
        launch: launch id (model.restart.launch_of), which tells the group from others of the same name; "" until the
            head reports it.
        reach: asks the head to describe the group, after which the registry calls `adopt`. None unless another process
            sent the handle.
        on_constructed: called with this group when all workers of a group that will be detached are constructed; the
            registry then makes the head the owner, and calls `detached`.

    Attributes:
        membership: the ranks that are being added, and those that were removed.
        closes: True if its class has ``_close()``; None unless this process has launched it by ``launch()``.
        came_up: False if the group could not be constructed.
        relays: the relays by which workers of other nodes are called; None if they are called directly.
        launched: a worker id of each rank, by which the head recognizes the group.
        preload: modules that the template of its workers imports first, as far as this process knows.
        patience_s: seconds for which a look-up of the group waits at the head if the launch has not arrived there yet.
        handles: ids of the handles (`group.control.GroupControl`) of the group that exist in this process.
        unheld: see `ends_unheld`. None but for groups that this process has launched on robots.
        takes_running: True if the launch may return a running group of the same name (get_if_exists). Until the head
            has answered, this process does not know which group it is.
    """

    def __init__(
        self,
        network: Network,
        identity: str,
        host: str,
        namespace: str,
        name: str,
        node_names: Sequence[str],
        construction: Construction | None = None,
        on_failure: Callable[[RemoteGroup], None] = lambda group: None,
        soon: Callable[..., object] | None = None,
        me: str = "",
        launch: str = "",
        reach: Callable[[RemoteGroup], object] | None = None,
        on_constructed: Callable[[RemoteGroup], None] = lambda group: None,
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.token = ""
        self.cls = ""
        self.closes: bool | None = None
        self.detail = ""
        self._launch = launch
        self._me = me
        self._waits: set[Peer] = set()
        self._new_peer = partial(
            Peer, network, identity, needed=self._link_needed, lost=self._link_lost, me=me, waits=self._waits
        )
        self.peers = [self._peer(rank, node) for rank, node in enumerate(node_names)]
        self.states: dict[int, WorkerState] = {}
        self.membership = Membership(name, self._ended, self._connect)
        lost = construction.lost if construction is not None else None
        self.ready: Promise[None] = Promise(f"group {name!r}") if lost is None else Readiness(name, lost, self._late)
        self.gone: Promise[None] = Promise(f"the end of group {name!r}")
        self.closing = False
        self.came_up = True
        self.launched: list[str] = []
        self.relays: NodeRelays | None = None
        self.patience_s = 0.0
        self.handles: set[int] = set()
        self.unheld: Callable[[RemoteGroup], object] | None = None
        self.takes_running = False
        self.owned = construction is not None
        self.preload: Sequence[str] = construction.preload if construction is not None else ()
        self._host = host
        self._construction = construction
        self._on_failure = on_failure
        self._on_constructed = on_constructed
        self._connecting: Turns[int] = Turns(self._connect_rank)
        self._closing_links: Turns[Peer] = Turns(Peer.close)
        self._began = construction is None  # rank 0 has reported the port that constructors need
        self._lock = threading.Lock()
        self._watchers: tuple[Callable[[Iterable[int]], object], ...] = ()
        self._soon = soon
        self._reach = reach
        if construction is None and soon is None:
            self.ready.resolve(None)
        self._inquiry = Inquiry(self)

    # --- what it is; any thread ---

    @property
    def launch(self) -> str:
        """The launch id, which tells this group from others of the same name; "" while it is unknown."""
        return self._launch or (launch_of(self.launched[0]) if self.launched else "")

    @property
    def found(self) -> bool:
        """True if the head has described the workers of this group to this process."""
        return bool(self.states)

    @property
    def called(self) -> bool:
        """True if a call waits for the workers whose result somebody may want. Loop thread."""
        waiting = (pending for peer in self.peers for pending in list(peer.pending.values()))
        return any(getattr(pending, "wanted", False) for pending in waiting)

    def ends_unheld(self) -> bool:
        """Return True if this is a launch on robots that is not up. If it has no handle, `unheld` may end it.
        To be called when a handle was dropped, or a caller has stopped waiting. Any thread.
        """
        if self.unheld is None or self.ready.done():
            return False
        if not self.handles:
            self.unheld(self)
        return True

    def serves(self, rank: int) -> bool:
        """True if the worker of *rank* is running and, if this process owns the group, is constructed."""
        state = self.states.get(rank)
        if state is None or state.state != "running" or state.id != self.peers[rank].worker_id:
            return False
        return self._construction is None or self._construction.constructed.get(rank) == state.id

    def awaited(self) -> list[Peer]:
        """Return the Peers of members for which this process waits. Costs nothing for the others. Loop thread."""
        found = []
        for peer in list(self._waits):
            self._waits.discard(peer)  # first: other threads add it after they began to wait
            if peer.awaited:
                self._waits.add(peer)
                if peer.rank < len(self.peers) and self.peers[peer.rank] is peer:
                    found.append(peer)
        return found

    def watch(self, callback: Callable[[Iterable[int]], object]) -> Callable[[], None]:
        """Call *callback* on the loop thread with the ranks for which the result of `serves` may have changed.

        Return a function that removes the callback. Any thread.
        """
        with self._lock:
            self._watchers = (*self._watchers, callback)

        def end() -> None:
            with self._lock:
                self._watchers = tuple(known for known in self._watchers if known is not callback)

        return end

    def matches(self, state: GroupState) -> bool:
        """True if *state* describes the workers of this group or their restarts, not another group of the same name.

        The group may have another number of ranks now.
        """
        known = {launch_of(peer.worker_id) for peer in self.peers if peer.worker_id}
        return bool(known) and {launch_of(worker.id) for worker in state.workers if worker.id} == known

    def handle(self) -> GroupHandle:
        """Return the last known state of each worker, also of ended ones, to send to a restarted head.

        The states have no endpoints: agentds report those, and the message would be too long for many workers.
        """
        states = [*self.states.values(), *self.membership.states()]
        brief = [replace(state, endpoint=None, pid=0, port=0, master_port=0, pulse=None) for state in states]
        return GroupHandle(self.namespace, self.name, brief, self.detail if self.owned else "")

    # --- readiness of another process's group ---

    def request_ready(self) -> Promise[None]:
        """Return the promise that resolves when all workers are constructed. Any thread.

        If another process constructs the workers, this asks each worker to report when it is constructed.
        """
        ready = self.ready
        if not self.owned and self._soon is not None and not ready.done():
            self._soon(self._inquiry.ask)
        return ready

    def look_up(self) -> None:
        """Ask the head for the workers of this group if they are unknown, because another process sent the handle."""
        if not self.found and self._reach is not None:
            self._reach(self)

    def unreachable(self, error: Exception) -> None:
        """Fail all waiting calls on this group, because the head could not be asked for it. A later call asks again."""
        ready, self.ready = self.ready, Promise(f"group {self.name!r}")
        ready.reject(error)
        self._replace([(peer, "", error) for peer in self.peers])

    # --- the head's reports ---

    def adopt(self, state: GroupState) -> None:
        """Take over the head's description of the group: its token, its class, and the state of every worker."""
        self.token, self.cls, self.detail = state.token, state.cls, state.detail
        self.launched = self.launched or [worker.id for worker in state.workers if worker.id]
        self.resize(state.world_size)
        self.update(state.workers)
        if self._inquiry.requested and not self.owned:
            self._inquiry.ask()

    def become(self, state: GroupState, soon: Callable[..., object]) -> None:
        """Become a handle of the running group that *state* describes, which has the same name.

        Called if a launch with get_if_exists has found that group running. Calls that wait for this launch go to the
        ranks of the running group, and fail if it has another number of ranks.

        Args:
            state: the head's description of the running group.
            soon: runs a function on the loop thread; callable from any thread.
        """
        self.owned, self._construction, self._soon, self._began = False, None, soon, True
        self._launch, self.launched = "", []
        self._inquiry.requested = True  # who waits for this launch waits for the constructors of the running group
        workers = sorted(state.workers, key=lambda worker: worker.rank)
        if len(workers) != len(self.peers):
            error = UsageError(
                f"group {self.name!r} was running already and has {counted(len(workers), 'rank')}, "
                f"not {len(self.peers)} as this launch asked for: await the group before the first call"
            )
            before, self.peers = self.peers, [self._peer(worker.rank, worker.node_ip) for worker in workers]
            for peer in before:
                peer.fail(error)
        self.adopt(state)

    def update(self, workers: Sequence[WorkerState]) -> None:
        """Handle a report of the head: connect to workers that run, and fail calls to workers that have ended.

        A restarted worker gets a new Peer.
        """
        self._succeed([worker for worker in workers if self._is_successor(worker)])
        for worker in workers:
            if not 0 <= worker.rank < len(self.peers):
                self.membership.report(worker)
                continue
            if self.peers[worker.rank].worker_id not in ("", worker.id):
                continue  # of another group, or of an earlier incarnation
            before = self.states.get(worker.rank)
            if before is not None and before.state == "gone" and before.id == worker.id:
                continue
            self.states[worker.rank] = worker
            peer = self.peers[worker.rank]
            if self.owned:
                note_breakpoint(peer.name, self.namespace, before, worker)
            peer.worker_id = worker.id
            peer.node = peer.node or worker.node_ip
            if worker.state == "gone":
                self._ended(peer, worker.exit or ExitReport("exited"))
        first = self.states.get(0)
        if self._began:
            self._connecting.add(worker.rank for worker in workers)
        elif first is not None and first.master_port:
            self._began = True
            self._connecting.add(list(self.states))
        if self._all_gone():
            self.gone.resolve(None)
        call_all(self._watchers, [worker.rank for worker in workers])

    def _succeed(self, workers: Sequence[WorkerState]) -> None:
        """Give a new Peer to the rank of each of *workers*, which are later incarnations."""
        restarted: list[tuple[Peer, str, Exception]] = []
        for worker in workers:
            old = self.peers[worker.rank]
            error = death(worker.exit or ExitReport("exited"), old.name, old.rank, old.node)
            restarted.append((old, worker.id, error))
        for peer in self._replace(restarted):
            if self.closing:
                peer.fail(self._closed_error())

    def _ended(self, peer: Peer, exit_report: ExitReport) -> None:
        error: Exception
        if self.closing or exit_report.kind == "stopped":
            why = f"its group {self.name!r} was shut down"
            if not self.closing:  # by others; `rlinf-actors events` tells who
                why = exit_report.reason or f"{why} by another process, or its node's agentd was stopped"
            error = GroupClosedError(f"worker {peer.name} on {peer.node} was stopped: {why}")
        else:
            error = death(exit_report, peer.name, peer.rank, peer.node)
        peer.fail(error)
        self._closing_links.add([peer])
        if self.owned and not self.ready.done():
            self.construction_failed(peer.error or error)

    # --- peers and links ---

    def _peer(self, rank: int, node: str) -> Peer:
        peer = self._new_peer(f"{self.name}:{rank}", rank, node)
        if self._launch and rank_id(self._me) == f"{self._launch}-{rank}":
            peer.worker_id = self._me  # known before the group is looked up: a wait for itself never ends
        return peer

    def _link_needed(self, peer: Peer) -> None:
        if self._soon is not None:
            self._soon(self._connect_rank, peer.rank)

    def _link_lost(self, old: Peer) -> None:
        """Give a rank a new Peer, because the connection of its Peer *old* was interrupted and messages may be lost.

        Calls that are pending on *old* fail. If this process was still constructing the group, the launch fails.
        """
        if old.rank >= len(self.peers) or self.peers[old.rank] is not old:
            if old in self.membership.peers:
                self.membership.link_lost(old)
            return
        if old.error is not None:
            return
        if self.owned and not self.ready.done():  # it is unknown whether the worker was constructed
            error = _connection_lost(old)
            old.fail(error)
            self.construction_failed(error)
            return
        lost = [old]
        if old.relay is not None and old.relay.ended:  # all at once: whoever gets the error may call all ranks again
            lost = [peer for peer in self.peers if peer.relay is old.relay and peer.error is None]
        new = self._replace([(peer, "", _connection_lost(peer)) for peer in lost])
        for peer, before in zip(new, lost, strict=True):
            peer.succeed(before)
            self._connect_rank(peer.rank)  # at once: the Join tells the worker of the loss

    def _connect_rank(self, rank: int) -> None:
        if rank >= len(self.peers):
            return  # removed since, or being added
        state, peer = self.states.get(rank), self.peers[rank]
        self.look_up()
        if state is None or state.state != "running" or state.endpoint is None:
            return
        if peer.connected or peer.error is not None or not (self._soon is None or peer.wanted):
            return
        first = self.states.get(0)  # with its port as it is now: rank 0 may be restarted before the link is ready
        again = partial(self._connecting.add, [rank])
        if self.relays is not None and not peer.succeeds and self.relays.waits(state.node_rank, again):
            return
        self._connect(peer, state, lambda: self._create(peer, first))
        if peer.error is None or not self.owned:
            return
        # the owner alone can construct the worker
        if not self.ready.done():
            self.construction_failed(peer.error)
        elif not self.closing:  # the worker was restarted: calls from other processes would wait without end
            self._on_failure(self)
            self.fail(peer.error)

    def _connect(self, peer: Peer, state: WorkerState, first: First) -> None:
        endpoint, relay = state.endpoint, None
        assert endpoint is not None
        if endpoint.ipc and endpoint.host != self._host:
            peer.sibling = frames.Sibling(peer.name, state.id, state.pid, endpoint)
            if self.relays is not None and not peer.succeeds:  # a lost link's successor is direct
                relay = self.relays.path(state.node_rank)
        peer.connect(endpoint, self._host, self.token, first, relay)

    # --- construction by the owner ---

    def _create(self, peer: Peer, first: WorkerState | None) -> tuple[bytes, Sequence[Buffer]] | None:
        construction = self._construction
        if construction is None or first is None or construction.constructed.get(peer.rank) == peer.worker_id:
            return None
        call, header = construction.create(first)
        peer.open(PendingRequest(partial(self._create_answered, peer), partial(self._create_failed, peer)), call)
        if not self.ready.done():
            peer.constructing(call)
        return header, construction.parts

    def _create_answered(self, peer: Peer, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if not isinstance(frame, frames.Raised):
            self._constructed(peer)
            return

        def raised(error: Exception) -> None:
            self.construction_failed(error)
            peer.release()  # if the group is up already, a rank that is constructed again fails its own calls

        unpickle_exception(peer, frame, parts, raised)

    def _create_failed(self, peer: Peer, error: Exception) -> None:
        if self.peer_of(peer.rank) is peer:  # else the worker was restarted, and is constructed then
            self.construction_failed(error)

    def _constructed(self, peer: Peer) -> None:
        """Record that the worker of *peer* is constructed.

        If it was the last worker, the group is ready, or is detached first if the launch asked for that.
        """
        construction = self._construction
        assert construction is not None
        if peer.rank < len(self.peers):  # else it was removed while it was constructed again
            construction.constructed[peer.rank] = peer.worker_id
        call_all(self._watchers, (peer.rank,))
        peer.release()
        if len(construction.constructed) == len(self.peers):
            if not construction.again and not construction.growable:
                construction.parts = ()  # the arguments may be large, and are not needed again
            if construction.detach:
                self._on_constructed(self)
            else:
                self.ready.resolve(None)

    def detached(self) -> None:
        """Record that the head now owns this group instead of this process, and that the group is ready."""
        self.owned = False
        self.ready.resolve(None)

    def construction_failed(self, error: Exception) -> None:
        """Fail the launch, and every call on the group, with *error*. Do nothing if the launch has already ended."""
        if not self.ready.done():
            self.came_up = isinstance(error, GroupClosedError)  # else its owner shut it down before it was up
            self._on_failure(self)
            self.fail(error)

    def _late(self) -> list[Peer]:
        constructed = self._construction.constructed if self._construction is not None else {}
        return [peer for peer in self.peers if constructed.get(peer.rank) != peer.worker_id or not peer.worker_id]

    def error_was_raised(self) -> None:
        """Record that the launching code got the error of the launch, so that LostErrors does not report it."""
        if isinstance(self.ready, Readiness):
            self.ready.seen()

    # --- the end ---

    def fail(self, error: Exception) -> None:
        """Fail the launch, if it has not ended, and all calls on this group, also later ones. Any thread."""
        self.ready.reject(error)
        self.membership.fail(error)
        for peer in [*self.peers, *self.membership.peers]:
            peer.fail(error)

    def end_calls(self, error: Exception | None = None) -> None:
        """Fail all calls on this group and close the links to its workers, which may still run.

        *error* is the error of the calls; None for a GroupClosedError.
        """
        self.closing = True
        self.fail(error or self._closed_error())
        self._closing_links.add([*self.peers, *self.membership.peers])

    def close(self, error: Exception | None = None) -> None:
        """Record that the group has ended for this process: fail all calls, close the links, and resolve `gone`.

        *error* is the error of the calls; None for a GroupClosedError.
        """
        self.end_calls(error)
        self.gone.resolve(None)

    def _closed_error(self) -> GroupClosedError:
        return GroupClosedError(f"group {self.name!r} was shut down")


def _connection_lost(peer: Peer) -> ConnectionLostError:
    return ConnectionLostError(
        f"the connection to {peer.name} on {peer.node} was lost, and is there again: how far it got with what was "
        "under way is not known. It runs, and can be called again"
    )
