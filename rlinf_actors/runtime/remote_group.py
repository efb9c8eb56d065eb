"""The readiness of a group that this process has launched.

A group as this process knows it: its peers, what the head says of them, and how it began.

The owner's handle also constructs: when rank 0 is up its MASTER_PORT is known, and each worker
that is up gets a Create as its first message. `ready` ends when all are constructed, or at the
first failure in time, which then ends every call on the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rlinf_actors.errors import (
    CallTimeoutError,
    ConnectionLostError,
    GroupClosedError,
    NodeLostError,
    RlinfActorsError,
    UsageError,
    WorkerDiedError,
    WorkerStartError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.net.link import Network
from rlinf_actors.runtime.future import Promise, call_all
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.peer import ANSWER_S, LateReport, Peer
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import Endpoint, ExitReport, Extension, GroupHandle, GroupState, WorkerState, ending


class Readiness(Promise[None]):
    """Ends when the owner's group is up, or with the error that keeps it down; an unawaited error is reported.

    Calls on the group fail by the same error: whoever sees it there has seen it here.
    """

    shared = True

    def __init__(self, name: str, lost: LostErrors, late: Callable[[], Sequence[Peer]] = tuple) -> None:
        super().__init__(f"group {name!r}")
        self._late_ranks = late
        self.loop = asyncio._get_running_loop()
        self._lost = lost
        self._unseen = False

    def reject(self, error: BaseException) -> bool:
        """Set the error, and register it; False if there is an outcome already. Any thread."""
        awaited = bool(self._callbacks)
        ended = super().reject(error)
        if ended and not isinstance(error, GroupClosedError):  # that is the owner's own doing
            self._unseen = True
            self._lost.failed(self, awaited=awaited)
        return ended

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        report = LateReport(self._late_ranks())
        with contextlib.suppress(CallTimeoutError):
            report.wait(min(ANSWER_S, max(timeout, 0.01)))  # a caller that polls is not held up
        return CallTimeoutError(f"{self._what} was not ready within {timeout:g} s; it goes on: {report.describe()}")

    def seen(self) -> None:
        """The error was raised to the caller."""
        if self._unseen:
            self._unseen = False
            self._lost.seen(self)

    def _outcome(self) -> None:
        self.seen()
        return super()._outcome()

    @property
    def cause(self) -> Exception | None:
        """See runtime.lost.Failed."""
        return self._error if isinstance(self._error, Exception) else None

    def raised(self) -> Exception:
        """The error as `await group` raises it."""
        assert isinstance(self._error, Exception)
        return self._error

    def describe(self) -> str:
        """The error as one text, for the log."""
        return f"{self._what} could not be brought up: {self._error}"

    def __del__(self) -> None:
        if self._unseen:
            self._lost.collected(self)


log = logging.getLogger(__name__)


@dataclass
class Construction:
    """How the owner constructs the workers' class.

    Attributes:
        cls: "module:qualname", or "" where the class comes by value.
        parts: the payload: class or None, args, kwargs, extras. Encoded once, shared by all ranks.
        max_concurrency: threads for a class without ``async def``; 0 for the main thread.
        decode_failure: makes the caller's exception of a Raised.
        extensions: what registers the types of the workers' hardware.
        again: whether workers that fail are started, and constructed, again.
        detach: whether the owner gives the group up when all are constructed.
        constructed: the worker of each rank that was.
        lost: hears that the group cannot come up, None if its owner waits for it in any case.
    """

    cls: str
    parts: Sequence[Buffer]
    max_concurrency: int
    decode_failure: Callable[[frames.Raised, AuthenticatedParts, Peer], Exception]
    extensions: Sequence[Extension] = ()
    again: bool = False
    detach: bool = False
    constructed: dict[int, str] = field(default_factory=dict)
    lost: LostErrors | None = None


class RemoteGroup:
    """One group, by this process's handle. Loop thread, unless said otherwise.

    Args:
        network: for the links.
        identity: of this process.
        host: its host key.
        namespace: of the group.
        name: of the group.
        world_size: number of ranks.
        node_names: node of each rank, for messages to people.
        construction: given by the owner, None for a handle of another process.
        on_failure: called once if the construction fails.
        soon: runs a function on the loop; where it is given, the link to a worker is made when there is something
            to send to it. Otherwise all links are made as the workers come up.
        me: the worker id of this process, "" of a driver.
        launch: what tells the group from a namesake (model.restart.launch_of), "" where the head is to say.
        reach: of a handle that another process sent: looks the group up at the head, and calls `adopt`. Called on the
            loop with this handle when there is something to send to the group.
        on_constructed: called once when all are constructed and the owner is to give the group up; it calls `given_up`.

    Attributes:
        came_up: False once it could not be constructed.
        launched: ids of its workers, of whichever incarnation: what tells it from a namesake.
        patience_s: how long (seconds) the head may take to hear of its launch, where it has not answered that yet.
        takes_running: its launch takes the running group of its name, if there is one: until the head has answered, it
            is not known which group this is.
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
        self._launch = launch
        self._me = me
        self.token = ""
        self.cls = ""
        self.detail = ""
        self._new_peer = partial(Peer, network, identity, me=me)
        self.peers = [self._peer(rank, node) for rank, node in enumerate(node_names)]
        self.states: dict[int, WorkerState] = {}
        lost = construction.lost if construction is not None else None
        self.ready: Promise[None] = Promise(f"group {name!r}") if lost is None else Readiness(name, lost, self._late)
        self.gone: Promise[None] = Promise(f"the end of group {name!r}")
        self.closing = False
        self.came_up = True
        self.launched: list[str] = []
        self.patience_s = 0.0
        self.takes_running = False
        self.owned = construction is not None
        self._host = host
        self._construction = construction
        self._on_failure = on_failure
        self._on_constructed = on_constructed
        self._watching = threading.Lock()
        self._watchers: tuple[Callable[[], object], ...] = ()
        self._soon = soon
        self._reach = reach
        if construction is None and soon is None:
            self.ready.resolve(None)
        self._asks = False  # whether somebody here waits until the group of another process is constructed
        self._unready: set[int] = set()  # the ranks that have not answered that

    @property
    def launch(self) -> str:
        """What tells this group from a namesake, "" while that is not known. Any thread."""
        return self._launch or (launch_of(self.launched[0]) if self.launched else "")

    @property
    def found(self) -> bool:
        """True if the head has described the group. Any thread."""
        return bool(self.states)

    def want(self) -> Promise[None]:
        """Return `ready`. Where another process constructs the group, its workers are asked now. Any thread."""
        ready = self.ready
        if not self.owned and self._soon is not None and not ready.done():
            self._soon(self._ask)
        return ready

    def look_up(self) -> None:
        """Begin to look up the group of a handle that another process sent."""
        if not self.found and self._reach is not None:
            self._reach(self)

    def _ask(self) -> None:
        """Ask the workers of another process's group to say when they are constructed, once."""
        if not self.found and self._reach is not None:
            self._asks = True  # once they are known
            self.look_up()
        elif not self.ready.done() and not self._unready:
            alive = [peer for peer in self.peers if peer.error is None]
            ends = [peer.error for peer in self.peers if peer.error is not None]
            if not alive:
                self.ready.reject(ends[0])
            self._unready = {peer.rank for peer in alive}
            for peer in alive:
                self._ask_rank(peer)

    def _ask_rank(self, peer: Peer) -> None:
        peer.send(frames.WhatRuns(peer.open(_Ready(self, peer)), True), now=True)

    def answered(self, peer: Peer, error: Exception | None) -> None:
        """A worker of another process's group is constructed, or will not be. Any thread."""
        successor = self.peers[peer.rank]
        if error is not None and successor is not peer and successor.error is None and not self.ready.done():
            self._ask_rank(successor)  # it is started again, or its connection was made anew
        elif error is not None:
            self.ready.reject(error)
        else:
            self._unready.discard(peer.rank)
            if not self._unready:
                self.ready.resolve(None)

    def unreachable(self, error: Exception) -> None:
        """The head could not be asked for the group: what waits for that ends; what comes later asks again."""
        ready, self.ready = self.ready, Promise(f"group {self.name!r}")
        ready.reject(error)
        for peer in self.peers:
            self._replace(peer, error)

    def adopt(self, state: GroupState) -> None:
        """Take over what the head says of the whole group."""
        self.token, self.cls, self.detail = state.token, state.cls, state.detail
        self.launched = self.launched or [worker.id for worker in state.workers if worker.id]
        self.update(state.workers)
        if self._asks and not self.owned:
            self._ask()

    def holds(self, state: GroupState) -> bool:
        """Whether the head speaks of these very workers, or later incarnations, not of a namesake's."""
        workers = sorted(state.workers, key=lambda worker: worker.rank)
        return [rank_id(peer.worker_id) for peer in self.peers] == [rank_id(worker.id) for worker in workers]

    def handle(self) -> GroupHandle:
        """What a head is told that has forgotten us: every worker, for nobody else may know of one that has ended."""
        return GroupHandle(self.namespace, self.name, list(self.states.values()))

    def update(self, workers: Sequence[WorkerState]) -> None:
        """The head says how these workers are."""
        for worker in workers:
            if not 0 <= worker.rank < len(self.peers):
                continue  # of an earlier or later group of this name
            known = self.peers[worker.rank].worker_id
            if known not in ("", worker.id) and not self._succeed(worker):
                continue
            before = self.states.get(worker.rank)
            if before is not None and before.state == "gone" and before.id == worker.id:
                continue
            self.states[worker.rank] = worker
            peer = self.peers[worker.rank]
            peer.worker_id = worker.id
            if worker.state == "gone":
                self._ended(peer, worker.exit or ExitReport("exited"))
        self._connect()
        if len(self.states) == len(self.peers) and all(w.state == "gone" for w in self.states.values()):
            self.gone.resolve(None)
        call_all(self._watchers)

    def serves(self, rank: int) -> bool:
        """True if the worker of a rank is known to be up, and constructed if this process does that. Any thread."""
        state = self.states.get(rank)
        if state is None or state.state != "running" or state.id != self.peers[rank].worker_id:
            return False
        return self._construction is None or self._construction.constructed.get(rank) == state.id

    def watch(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call *callback* (loop thread) whenever what `serves` says may have changed, until the result is called."""
        with self._watching:
            self._watchers = (*self._watchers, callback)

        def end() -> None:
            with self._watching:
                self._watchers = tuple(known for known in self._watchers if known is not callback)

        return end

    def _succeed(self, worker: WorkerState) -> bool:
        """A rank has another worker: from now on calls are for that one. False if it is of another group, or older."""
        old, before = self.peers[worker.rank], self.states.get(worker.rank)
        restarts = before.restarts if before is not None else -1
        if rank_id(old.worker_id) != rank_id(worker.id) or worker.restarts <= restarts:
            return False
        peer = self._replace(old, death(worker.exit or ExitReport("exited"), old.name, old.rank, old.node))
        peer.worker_id = worker.id
        if self.closing:
            peer.fail(GroupClosedError(f"group {self.name!r} was shut down"))
        return True

    def _replace(self, old: Peer, error: Exception) -> Peer:
        """From now on calls of a rank go to another peer; those under way end with *error*."""
        peer = self._peer(old.rank, old.node)
        # first: who hears of the old one's end calls again, and is to find the new one; calls under way keep theirs
        self.peers = [*self.peers[: old.rank], peer, *self.peers[old.rank + 1 :]]
        old.fail(error)
        old.close()
        return peer

    def _lost(self, old: Peer) -> None:
        """The connection to a worker was lost, and is there again: requests and answers may be missing."""
        if self.peers[old.rank] is not old or old.error is not None:
            return
        error = ConnectionLostError(
            f"the connection to {old.name} on {old.node} was lost, and is there again: how far it got with what was "
            "under way is not known. It runs, and can be called again"
        )
        if self.owned and not self.ready.done():  # nobody knows whether it was constructed
            old.fail(error)
            self.construction_failed(error)
            return
        peer = self._replace(old, error)
        peer.worker_id, peer.wanted = old.worker_id, True
        # one that brought nothing may never have joined there: its predecessors are not known to be lost either
        peer.succeeds = [*([] if old.received else old.succeeds), old.link_identity]
        self._connect_rank(old.rank)  # at once: the worker is to hear of it

    def _peer(self, rank: int, node: str) -> Peer:
        peer = self._new_peer(f"{self.name}:{rank}", rank, node, partial(self._needed, rank), self._lost)
        if self._launch and rank_id(self._me) == f"{self._launch}-{rank}":
            peer.worker_id = self._me  # known before the group is looked up: a wait for itself never ends
        return peer

    def fail(self, error: Exception) -> None:
        """End every call on this group, now and later. Any thread."""
        self.ready.reject(error)
        for peer in self.peers:
            peer.fail(error)

    def _late(self) -> list[Peer]:
        """The ranks that are not constructed."""
        constructed = self._construction.constructed if self._construction is not None else {}
        return [peer for peer in self.peers if constructed.get(peer.rank) != peer.worker_id or not peer.worker_id]

    def error_was_raised(self) -> None:
        """The caller of launch() got the error of `ready` as an exception."""
        if isinstance(self.ready, Readiness):
            self.ready.seen()

    def close(self, error: Exception | None = None) -> None:
        """The handle is of no use any more: end its calls and drop its links."""
        self.end_calls(error)
        self.gone.resolve(None)

    def end_calls(self, error: Exception | None = None) -> None:
        """End the calls and drop the links of a group whose workers may still run."""
        self.closing = True
        self.fail(error or GroupClosedError(f"group {self.name!r} was shut down"))
        for peer in self.peers:
            peer.close()

    def _connect(self) -> None:
        if self._construction is not None:
            first = self.states.get(0)
            if first is None or not first.master_port:
                return  # MASTER_PORT is rank 0's to give
        for rank in self.states:
            self._connect_rank(rank)

    def _needed(self, rank: int) -> None:
        """Something waits for the link to this worker. Any thread."""
        if self._soon is not None:
            self._soon(self._connect_rank, rank)

    def _connect_rank(self, rank: int) -> None:
        state, peer = self.states.get(rank), self.peers[rank]
        self.look_up()
        if state is None or state.state != "running" or state.endpoint is None:
            return
        if not peer.connected and peer.error is None and (self._soon is None or peer.wanted):
            self._connect_peer(peer, state.endpoint)

    def _connect_peer(self, peer: Peer, endpoint: Endpoint) -> None:
        try:
            first = self.states.get(0)  # its port as it is now: rank 0 may be started again before the link is ready
            peer.connect(endpoint, self._host, self.token, lambda: self._create(peer, first))
        except (OSError, RlinfActorsError) as error:  # no descriptor left, or an address that may not be used
            peer.fail(RlinfActorsError(f"cannot connect to {peer.name} on {peer.node}: {error}"))
        if peer.error is not None:
            self._cannot_construct(peer.error)

    def _cannot_construct(self, reason: Exception) -> None:
        """A worker is there, and its owner, who alone could construct it, has no link to it."""
        if self.owned and not self.ready.done():
            self.construction_failed(reason)
        elif self.owned and not self.closing:  # it was started again: other handles' calls would wait for ever
            self._on_failure(self)
            self.fail(reason)

    def _create(self, peer: Peer, first: WorkerState | None) -> tuple[frames.AnyFrame, Sequence[Buffer]] | None:
        construction = self._construction
        if construction is None or first is None or construction.constructed.get(peer.rank) == peer.worker_id:
            return None
        env = {"MASTER_ADDR": first.node_ip, "MASTER_PORT": str(first.master_port)}
        call = peer.open(_Constructed(self, peer, construction))
        if not self.ready.done():
            peer.constructing(call)
        extensions = list(construction.extensions)
        frame = frames.Create(call, construction.cls, env, construction.max_concurrency, extensions)
        return frame, construction.parts

    def _ended(self, peer: Peer, exit_report: ExitReport) -> None:
        error: Exception
        if self.closing or exit_report.kind == "stopped":
            why = f"its group {self.name!r} was shut down"
            if not self.closing:  # not by us; `rlinf-actors events` says by whom
                why = exit_report.reason or f"{why} by another process, or its node's agentd was stopped"
            error = GroupClosedError(f"worker {peer.name} on {peer.node} was stopped: {why}")
        else:
            error = death(exit_report, peer.name, peer.rank, peer.node)
        peer.fail(error)
        peer.close()
        if self.owned and not self.ready.done():
            self.construction_failed(peer.error or error)

    def constructed(self, peer: Peer) -> None:
        """One worker's class is constructed."""
        assert self._construction is not None
        self._construction.constructed[peer.rank] = peer.worker_id
        call_all(self._watchers)
        peer.release()
        if len(self._construction.constructed) == len(self.peers):
            if not self._construction.again:
                self._construction.parts = ()  # the arguments may be large, and are not needed again
            if self._construction.detach:
                self._on_constructed(self)
            else:
                self.ready.resolve(None)

    def given_up(self) -> None:
        """The group is up, and this process does not own it any more."""
        self.owned = False
        self.ready.resolve(None)

    def become(self, state: GroupState, soon: Callable[..., object]) -> None:
        """The name is that of another launch's group, which is taken instead. Calls that wait are for its ranks."""
        self.owned, self._construction, self._soon = False, None, soon
        self._launch, self.launched = "", []
        self._asks = True  # who waits for this launch waits for the constructors of the other one
        workers = sorted(state.workers, key=lambda worker: worker.rank)
        if len(workers) != len(self.peers):
            error = UsageError(
                f"group {self.name!r} was running already and has {len(workers)} ranks, not {len(self.peers)} as this "
                "launch asked for: await the group before the first call"
            )
            before, self.peers = self.peers, [self._peer(worker.rank, worker.node_ip) for worker in workers]
            for peer in before:
                peer.fail(error)
        self.adopt(state)

    def construction_failed(self, error: Exception) -> None:
        """The group cannot come up: the first cause ends every call on it."""
        if self.ready.done():
            return
        self.came_up = isinstance(error, GroupClosedError)  # else it was ended by its owner before it could
        self._on_failure(self)
        self.fail(error)


class _Ready:
    """Waits until a worker of another process's group is constructed."""

    def __init__(self, group: RemoteGroup, peer: Peer) -> None:
        self._group = group
        self._peer = peer

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        error = None
        if isinstance(frame, frames.Raised):  # the exception itself is for the owner, who ends the group
            text = failure.describe(frame, "__init__", worker=self._peer.name, node=self._peer.node)
            error = WorkerStartError(text, worker=self._peer.name, node=self._peer.node)
        self._group.answered(self._peer, error)
        return True

    def fail(self, error: Exception) -> None:
        self._group.answered(self._peer, error)


class _Constructed:
    """Waits for the answer to a Create."""

    def __init__(self, group: RemoteGroup, peer: Peer, construction: Construction) -> None:
        self._group = group
        self._peer = peer
        self._construction = construction

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        if isinstance(frame, frames.Raised):
            # unpickling runs the user's code: not on this thread
            decoding = asyncio.get_running_loop().run_in_executor(
                None, self._construction.decode_failure, frame, parts, self._peer
            )
            decoding.add_done_callback(self._decoded)
        else:
            self._group.constructed(self._peer)
        return True

    def fail(self, error: Exception) -> None:
        if self._group.peers[self._peer.rank] is self._peer:  # else it is started again, and constructed then
            self._group.construction_failed(error)

    def _decoded(self, decoding: asyncio.Future[Exception]) -> None:
        if not decoding.cancelled():
            error = decoding.exception()
            self._group.construction_failed(error if isinstance(error, Exception) else decoding.result())
            self._peer.release()  # where the group is up by now: a rank that is constructed again fails its own calls


def death(report: ExitReport, worker: str, rank: int, node: str) -> RlinfActorsError:
    """What a caller gets for a worker that ended as *report* says."""
    if report.kind == "start_failed":
        return WorkerStartError(f"{worker} on {node} {ending(report)}", worker=worker, node=node)
    if report.kind == "node_lost":
        return NodeLostError(f"{worker} is gone with its node {node}: {report.reason or 'the node stopped answering'}")
    tail = "".join(f"\n    {line}" for line in report.stderr_tail)
    said = f"\nlast lines of its stderr:{tail}" if tail else ""
    return WorkerDiedError(
        f"worker {worker} on {node} {ending(report)}{said}",
        worker=worker,
        rank=rank,
        node=node,
        exit_code=report.exit_code,
        signal=report.signal,
        oom=report.oom,
        stderr_tail=report.stderr_tail,
    )
