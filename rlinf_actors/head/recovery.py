"""What an agent says it has against what this head knows: after a restart of either, or a lost message. Pure.

The first seconds of a head that was restarted: what it cannot answer yet waits until its nodes are back. Pure.

Agents, drivers and workers come back in any order. Until every node that was registered has said what it has, or
one lease has passed, this head knows a part only: a name that it does not know may well be in use. Of a rank that
ended before, its group's owner alone may know.

House rule: what is held is bounded. Requests are (`head.quotas`), of hellos and handles each peer has one, and who
has no session yet has nothing else to ask.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rlinf_actors.head import validation
from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import (
    ConnectionRejected,
    Emit,
    Event,
    LogEvent,
    NoticeReceived,
    Notify,
    Refusal,
    RequestReceived,
    Timing,
)
from rlinf_actors.head.event_log import of_group
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.hardware_claims import contradiction
from rlinf_actors.head.key_registry import Jobs
from rlinf_actors.head.quotas import KEPT_OF_ONE
from rlinf_actors.head.records import Client, Group, Node, WorkerLife, WorkerRecord
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agent_messages import (
    AgentHello,
    Beat,
    ClientHello,
    FlushLogs,
    LogCredit,
    LogLines,
    StopWorkers,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.client_messages import (
    EndGroup,
    FindGroup,
    GetEvents,
    GetNodes,
    GetStatus,
    Handles,
    Launch,
    StopCluster,
    StopGroup,
    WorkerChanged,
)
from rlinf_actors.wire.values import ExitReport, GroupHandle, RunningWorker, WorkerSpec, WorkerState

NOBODY_HAS_IT = "no node had it when the head was restarted: it ended meanwhile, or its node is lost"

_WITHOUT_PROCESS = (WorkerLife.GONE, WorkerLife.RESTARTING)


class Reconciler:
    """Brings the groups in line with the agents.

    Args:
        timing: the head's timers.
        emit: takes commands.
        clients, groups, jobs: the tables.
    """

    def __init__(self, timing: Timing, emit: Emit, clients: ClientTable, groups: GroupTable, jobs: Jobs) -> None:
        self._timing = timing
        self._emit = emit
        self._clients = clients
        self._groups = groups
        self._jobs = jobs
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._over: dict[tuple[str, str], set[str]] = {}

    def reconcile(self, node: Node, there: Sequence[RunningWorker], known: bool, now: float) -> None:
        """Bring our view of a node in line with its agent's; *known* if that is the one that we knew before.

        Workers that we do not know belong to groups from before this head started: they are taken over. Workers
        that we have and it does not: those that are to start are asked for once more (the agent ignores ids that it
        has), the others have ended unseen.
        """
        self._seen.clear()
        self._over.clear()
        # what a name or a rank is now, before what it was; agents keep ends in the order in which they came
        ended = [one for one in there if one.exit is not None]
        for running in [*(one for one in there if one.exit is None), *reversed(ended)]:
            self._take_over(node, running, now)
        listed = {running.spec.id for running in there}
        self._groups.claims.node_is_back(node.id, listed, known, now)
        self._groups.names.node_is_back(node.id, listed)
        for group in self._groups.all():
            ours = [w for w in group.workers.values() if w.node_id == node.id and w.life not in _WITHOUT_PROCESS]
            missing = [worker for worker in ours if worker.id not in listed]
            wanted = [worker for worker in missing if worker.life is WorkerLife.STARTING]
            self._groups.start(node.id, group, [worker.spec for worker in wanted])
            for worker in missing:
                if worker.life is not WorkerLife.STARTING:
                    self._groups.missing(worker, node, "its agent does not have it any more", now)

    def replaced(self, node: Node, hello: AgentHello, now: float) -> None:
        """Another agentd has taken the place of a node's: what it does not list of the earlier one's workers has ended.

        An agentd that keeps workers has looked for all that the earlier one was asked for, and says why it ended some;
        what it says nothing of may be making its robot safe yet, or was never asked for: `reconcile` asks once more.
        """
        listed = {running.spec.id for running in hello.workers}
        for group in self._groups.all():
            for worker in list(group.workers.values()):
                if worker.node_id != node.id or worker.life in _WITHOUT_PROCESS or worker.id in listed:
                    continue
                why = hello.ended.get(worker.id)
                if why is not None:
                    self._groups.missing(worker, node, why, now)
                elif not (hello.keeps and worker.life is WorkerLife.STARTING):
                    self._groups.lost(worker, f"node {node.name}: its agentd was started anew")
                    self._groups.claims.lose(worker, False, now)

    def check_owner(self, hello: ClientHello) -> None:
        """Refuse a client that says it is the one which owns groups of another job.

        Raises:
            Refusal: it is not.
        """
        for group in self._groups.all():
            if group.owner == hello.incarnation and group.namespace != hello.namespace:
                raise Refusal("authentication", f"this {hello.role} says that it is the owner of another job's groups")

    def handles(self, client: Client, said: Handles) -> None:
        """A client that is back says which groups it knows: tell it what has become of their workers."""
        own = {handle.name: handle for handle in said.groups if handle.namespace == client.namespace}
        for handle in own.values():
            self._handle(client, handle)
        self._claim(client, said)

    def _claim(self, client: Client, said: Handles) -> None:
        """Stop what agents say is this client's and it does not know (any more): who else would end it?"""
        known = {state.id for handle in said.groups for state in handle.workers} | set(said.launching)
        ranks = {rank_id(id) for id in known}
        for group in self._groups.all():
            if group.owner == client.incarnation and group.unclaimed:
                group.unclaimed = not group.detached and group.launch.isdisjoint(ranks)
                if group.unclaimed and not group.stopping:
                    self._groups.stop_group(group, "its owner has shut it down while the head was away")
        self._groups.flush()  # the name of one that was in a back-off is free for a launch that was held

    def _handle(self, client: Client, handle: GroupHandle) -> None:
        group = self._groups.get(handle.namespace, handle.name)
        if group is not None and group.launch.isdisjoint(rank_id(state.id) for state in handle.workers):
            group = None  # a namesake
        if group is None:
            states = self._ends_of(client, handle)
        else:
            ranks, world_size = group.ranks, group.world_size
            for state in handle.workers:
                known = self._groups.of_worker(state.id)
                if 0 <= state.rank < world_size and state.rank not in ranks and known is None:
                    ranks.add(state.rank)
                    self._add_ended(client, group, state)
            if client.incarnation != group.owner:
                group.subscribers[client.incarnation] = None
            states = [worker.state() for worker in group.workers.values()]
        self._emit(Notify(client.peer, WorkerChanged(handle.namespace, handle.name, states)))

    def _ends_of(self, client: Client, handle: GroupHandle) -> list[WorkerState]:
        """How the workers of a group that is not there have ended."""
        before = self._groups.ended(handle.namespace, handle.name)
        known = {state.id: state for state in before.workers} if before is not None else {}
        return [
            state if state.state == "gone" else known.get(state.id) or self._nobodys(client, state)
            for state in handle.workers
        ]

    def _nobodys(self, client: Client, state: WorkerState) -> WorkerState:
        self._give_up(client, state)
        return replace(state, state="gone", endpoint=None, exit=ExitReport("node_lost", reason=NOBODY_HAS_IT))

    def _add_ended(self, client: Client, group: Group, state: WorkerState) -> None:
        """A rank of a group that no agent has any more, so that whoever looks at the group hears of it."""
        known = next(iter(group.workers.values())).spec
        spec = replace(known, id=state.id, rank=state.rank, node_rank=state.node_rank, claims=[])
        worker = WorkerRecord(spec, "", state.node_ip)
        ended = validation.exit_report(state.exit) if state.state == "gone" and state.exit is not None else None
        self._groups.adopt(group, worker)
        self._groups.lost(worker, NOBODY_HAS_IT, ended)
        if ended is None:
            self._give_up(client, state)

    def _give_up(self, client: Client, state: WorkerState) -> None:
        """It must not come back: a client was told so. One that names workers without end is not remembered for all."""
        if client.given_up < KEPT_OF_ONE:
            client.given_up += 1
            self._groups.give_up(state.id, NOBODY_HAS_IT, client.member)

    def _take_over(self, node: Node, running: RunningWorker, now: float) -> None:
        spec = running.spec
        known = self._groups.of_worker(spec.id)
        unseen = self._groups.ended_unseen(spec.id)
        if unseen is not None:
            if running.exit is not None:
                self._groups.ended_after_all(spec.id, node.id)
            else:
                self._emit(Notify(node.peer, StopWorkers([spec.id], 0.0, unseen)))
            return
        if known is None:
            if not self._adopt(node, running, now):
                return
        elif known.workers[spec.id].gone and running.exit is None:
            self._emit(Notify(node.peer, StopWorkers([spec.id], 0.0)))  # we told its owner that it is gone
            return
        elif known.workers[spec.id].life is WorkerLife.STOPPING and running.exit is None:
            self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.stop_grace_s)))  # the first may be lost
        elif known.detached and not running.detached and running.exit is None:
            self._groups.start(
                node.id, known, [known.workers[spec.id].spec]
            )  # it was not told that the owner gave it up
        if running.exit is not None:
            self._groups.exited(node, spec.id, running.exit, now)
        elif running.endpoint is not None:
            self._groups.ready(
                node, WorkerReady(spec.id, running.pid, running.endpoint, running.port, running.master_port)
            )

    def _adopt(self, node: Node, running: RunningWorker, now: float) -> bool:
        """Whether a worker that we did not know is one of ours from now on."""
        spec = running.spec
        believed = node.member == LOCAL and not self._jobs.settled  # from before this cluster had keys
        if not self._jobs.vouches(spec.namespace, spec.token, believed):
            if running.exit is None:
                why = f"it is no member of the job that namespace {spec.namespace!r} is now"
                self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.orphan_grace_s, why)))
            return False
        group, owner = self._groups.get(spec.namespace, spec.group), self._clients.get(running.owner)
        if group is None:
            if owner is not None and owner.namespace != spec.namespace:
                return False  # whoever says so makes it up: who launched it was of its job
            if running.exit is not None and (self._clients.ended(running.owner) is not None or self._has_ended(spec)):
                return False
            group = Group(spec.namespace, spec.group, running.cls, running.owner, running.detail)
            group.detached, group.unclaimed = running.detached, bool(running.owner)
            self._jobs.adopt(spec.namespace, spec.token, running.exit is None, believed)
            self._emit(of_group("group_adopted", group, f"runs already, its agent on node {node.name} says"))
        elif running.exit is not None and not self._look_at(group).lacks(spec):
            return False  # an end that was told before: the name has been given again since
        elif group.owner != running.owner and not _given_up_meanwhile(group, running):
            self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.orphan_grace_s)))
            return False
        worker = WorkerRecord(spec, node.id, node.report.ip)
        self._groups.adopt(group, worker)
        if group.owner != running.owner:
            self._groups.give_to(group, group.owner if group.detached else running.owner)
        if group.key in self._seen:
            self._seen[group.key].add(spec)
        if running.exit is None:
            other = self._groups.claims.take(group, worker, node, now)
            if other is not None and not group.stopping:
                self._emit(LogEvent("robot_conflict", contradiction(other, group)))
                self._groups.stop_group(group, "")
            elif group.stopping:
                self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.orphan_grace_s)))
        if group.owner:
            self._clients.await_return(group.owner, now, node.member)
        return True

    def _has_ended(self, spec: WorkerSpec) -> bool:
        """Whether it is of a group that is over: its agent has not heard yet that we know of its end."""
        key = (spec.namespace, spec.group)
        if key not in self._over:
            over = self._groups.ended(*key)
            self._over[key] = {rank_id(state.id) for state in over.workers} if over is not None else set()
        return rank_id(spec.id) in self._over[key]

    def _look_at(self, group: Group) -> _Seen:
        if group.key not in self._seen:
            self._seen[group.key] = seen = _Seen()
            for worker in group.workers.values():
                seen.add(worker.spec)
        return self._seen[group.key]


def _given_up_meanwhile(group: Group, running: RunningWorker) -> bool:
    """True if one of two nodes of a group has not heard yet that the owner gave it up."""
    same_launch = launch_of(running.spec.id) in map(launch_of, group.workers)
    return same_launch and group.detached != running.detached and (group.detached or group.unclaimed)


class _Seen:
    """A group while an agent tells of its workers, of which there may be thousands."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._launches: set[str] = set()

    def add(self, spec: WorkerSpec) -> None:
        """It has this worker."""
        self._ranks.add(spec.rank)
        self._launches.add(launch_of(spec.id))

    def lacks(self, spec: WorkerSpec) -> bool:
        """Whether it has no such rank, and this one is of its launch: ids of one launch differ in the rank alone."""
        return spec.rank not in self._ranks and launch_of(spec.id) in self._launches


_TELLS_NOTHING = (Beat, LogLines, LogCredit, FlushLogs, WorkerReady, WorkersHealth, GetStatus, GetEvents, GetNodes)


class EarlyMessages:
    """Holds what comes too early.

    Args:
        until: when it is over at the latest.
        missing: whether nodes are still to come back.
        whole: whether a group, by namespace and name, is known with all its workers.
        worker_known: whether a worker, by its id, is known.
        owner_away: whether the owner of a group, by namespace and name, is still to say what it knows of it.
        has_session: whether a peer said hello, and was welcomed.
        dropped: called with an event that a later one of its peer has taken the place of.
    """

    def __init__(
        self,
        until: float,
        missing: Callable[[], bool],
        whole: Callable[[str, str], bool],
        worker_known: Callable[[str], bool],
        owner_away: Callable[[str, str], bool],
        has_session: Callable[[bytes], bool],
        dropped: Callable[[RequestReceived | NoticeReceived], None],
    ) -> None:
        self.until = until
        self.over = not missing()
        self._missing = missing
        self._whole = whole
        self._worker_known = worker_known
        self._owner_away = owner_away
        self._late = False
        self._has_session = has_session
        self._dropped = dropped
        self._numbers = itertools.count()
        self._held: dict[int, RequestReceived | NoticeReceived] = {}
        self._last: dict[tuple[bytes, type[object]], int] = {}
        self._launches: Counter[tuple[bytes, str, str]] = Counter()

    def holds(self, event: RequestReceived | NoticeReceived) -> bool:
        """Whether an event is too early; it is kept for `take` then."""
        if not self._too_early(event):
            return False
        number = next(self._numbers)
        self._held[number] = event
        if isinstance(event.body, Launch):
            self._launches[_launch(event)] += 1
        if isinstance(event.body, (ClientHello, Handles)):
            # said again until there is an answer, or whole: the last one counts
            before = self._last.pop((event.peer, type(event.body)), None)
            if before is not None:
                self._dropped(self._release(before))
            self._last[event.peer, type(event.body)] = number
        return True

    def look(self, now: float) -> bool:
        """Whether the waiting has ended just now."""
        self._late = now >= self.until
        if not self.over and (self._late or not self._missing()):
            self.over = True
            return True
        return False

    def take(self, after: Sequence[Event]) -> list[RequestReceived | NoticeReceived]:
        """What was held and can go on after these events, in the order in which it came.

        Looks at groups come last: what others hold handles of, or launch, may tell of ranks that no agent has any more.
        """
        if not self._held or all(map(_tells_nothing, after)):
            return []
        ready = [number for number, event in self._held.items() if not self._too_early(event)]
        return sorted(map(self._release, ready), key=lambda event: isinstance(event.body, FindGroup))

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody waits there any more."""
        for number in [number for number, event in self._held.items() if event.peer == peer]:
            self._release(number)

    def stalled(self, seconds: float) -> None:
        """The head stood still: nobody was silent."""
        self.until += seconds

    def next_deadline(self) -> float:
        """When it is over at the latest, infinity if it is."""
        return math.inf if self.over and not self._held else self.until

    def _release(self, number: int) -> RequestReceived | NoticeReceived:
        event = self._held.pop(number)
        if isinstance(event.body, Launch):
            self._launches[_launch(event)] -= 1
            if not self._launches[_launch(event)]:
                del self._launches[_launch(event)]
        if self._last.get((event.peer, type(event.body))) == number:
            del self._last[event.peer, type(event.body)]
        return event

    def _too_early(self, event: RequestReceived | NoticeReceived) -> bool:
        body = event.body
        if isinstance(body, (StopCluster, EndGroup)):
            return not self.over  # groups of nodes that are not back yet end too
        if not isinstance(body, ClientHello) and not self._has_session(event.peer):
            return False  # it is told to say hello first
        if isinstance(body, FindGroup) and not self._late and not self._whole(body.namespace, body.group):
            return not self.over or self._owner_away(body.namespace, body.group)
        if self.over:
            return False
        if isinstance(body, ClientHello):
            # a worker is a member if an agent has it; a new driver must not be given a token that is not the job's
            return not self._worker_known(body.parent or body.worker_id) if body.role == "worker" else not body.token
        if isinstance(body, StopGroup) and self._launches[event.peer, body.namespace, body.group]:
            return True  # what is to stop has not begun
        if isinstance(body, StopGroup):
            return not self._whole(body.namespace, body.group)
        if isinstance(body, GetNodes):
            return not body.num_nodes
        return isinstance(body, (Launch, Handles))


def _tells_nothing(event: Event) -> bool:
    """Whether what was too early still is after an event."""
    said = isinstance(event, (RequestReceived, NoticeReceived)) and isinstance(event.body, _TELLS_NOTHING)
    return said or isinstance(event, ConnectionRejected)


def _launch(event: RequestReceived | NoticeReceived) -> tuple[bytes, str, str]:
    assert isinstance(event.body, Launch)
    return event.peer, event.body.namespace, event.body.group
