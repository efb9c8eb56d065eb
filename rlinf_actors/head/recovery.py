"""Reconciliation of the head's state with what agentds and clients report, mostly after a restart of the head. Pure.

After a restart of the head, agentds, drivers and workers reconnect in any order. Until every registered node has
reported its workers, or `Timing.patience_s` has passed, the head's knowledge is incomplete: a group name that the head
does not know may be in use. `EarlyMessages` holds back the messages that cannot be answered until then. `Reconciler`
adopts the workers that agentds report, and sends clients the state of the workers in their handles. If a rank ended
before the restart, the owner of its group may be the only process that knows.

House rule: the number of held messages is bounded. Requests have a quota (`head.quotas`). Of each peer at most one
hello and one Handles message is held. A peer without a session is asked to say hello first.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head import commands, validation
from rlinf_actors.head.claims import contradiction
from rlinf_actors.head.event_log import of_group
from rlinf_actors.head.group_notices import worker_changes
from rlinf_actors.head.quotas import Quota
from rlinf_actors.head.records import Client, Group, Index, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.model.restart import launch_of
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire import agent_messages, client_messages, resize_messages
from rlinf_actors.wire.client_messages import FindGroup
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.launch_messages import FindWorker
from rlinf_actors.wire.values import ExitReport, GroupHandle, RunningWorker, WorkerSpec, WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

TOGETHER = 200
"""Most held messages that are examined in one turn: thousands may wait for the last node."""
NEVER_HELD = (agent_messages.Beat, client_messages.EStop)
RESIZES = (resize_messages.AddRanks, resize_messages.ResizeGroup)
NO_NODE_HAS_IT = "no node had it when the head was restarted: it ended meanwhile, or its node is lost"


class Reconciler:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._missing_workers = Quota("missing workers")
        self._replacing: dict[str, Sliced[None]] = {}

    # --- agentds ---

    def reconcile(self, node: Node, reported: Sequence[RunningWorker], known: bool) -> Sliced[None]:
        """Update the head's record of a node's workers from the *reported* workers.

        The head adopts each reported worker that it does not know, because the worker's group is from before this head
        started. A worker that the head knows and that is not reported counts as ended. But if it is still starting, the
        order to start it is sent again (agentd ignores ids that it has).

        Args:
            node: the node whose agentd has sent a hello.
            reported: the workers in that hello, running and ended.
            known: True if this incarnation of the agentd has registered with this head before.
        """
        groups = self._head.groups
        # Living workers first: a living worker decides to which launch a name or rank belongs now. Agents list ended
        # workers oldest first, so the newest end comes first here.
        ended = [one for one in reported if one.exit is not None]
        for piece, more in pieces([*(one for one in reported if one.exit is None), *reversed(ended)]):
            for running in piece:
                self._take_over(node, running)
            if more:
                yield
            if self._head.nodes.get(node.id) is not node:
                return
        listed = {running.spec.id for running in reported}
        groups.claims.node_is_back(node.id, listed, known)
        groups.names.node_is_back(node.id, listed)
        for some, more in pieces(groups.workers_on(node.id)):
            starting: dict[tuple[str, str], tuple[Group, list[WorkerSpec]]] = {}
            for worker in some:
                group = groups.of_worker(worker.id)
                if worker.id in listed or worker.gone or group is None or group.launching:
                    continue
                if worker.life is WorkerLife.STARTING:
                    starting.setdefault(group.key, (group, []))[1].append(worker.spec)
                elif worker.life is not WorkerLife.RESTARTING:
                    groups.missing(worker, node, "its agent does not have it any more")
            for group, specs in starting.values():
                groups.start(node.id, group, specs)
            if more:
                yield

    def replaced(self, node: Node, hello: agent_messages.AgentHello) -> None:
        """End the workers of a node's earlier agentd that the *hello* of its new agentd does not list.

        A new agentd that keeps workers (`hello.keeps`) has searched for all workers that the earlier agentd was ordered
        to start. `hello.ended` says why it ended some of them. If it mentions a starting worker nowhere, the order to
        start that worker never arrived, and `reconcile` sends the order again. Any other worker that it does not
        mention is lost, and its robots stay held for a while, because the worker may still be making them safe.
        """
        self._replacing[node.id] = self._end_of_earlier(node, hello)

    def replacing(self, node_id: str) -> Sliced[None]:
        """Do what `replaced` has left for this node: before `reconcile`, which ends other workers for other reasons."""
        yield from self._replacing.pop(node_id, ())

    def _end_of_earlier(self, node: Node, hello: agent_messages.AgentHello) -> Sliced[None]:
        groups = self._head.groups
        listed = {running.spec.id for running in hello.workers}
        for some, more in pieces(sorted(groups.workers_on(node.id), key=lambda worker: not worker.spec.claims)):
            for worker in some:
                if worker.life is WorkerLife.RESTARTING or worker.id in listed or worker.gone:
                    continue
                why = hello.ended.get(worker.id)
                if why is not None:
                    groups.missing(worker, node, why)
                elif not (hello.keeps and worker.life is WorkerLife.STARTING):
                    groups.lost(worker, f"node {node.name}: its agentd was started anew")
                    groups.claims.lose(worker, False)
            if more:
                yield

    def _take_over(self, node: Node, running: RunningWorker) -> None:
        groups, spec = self._head.groups, running.spec
        known = groups.of_worker(spec.id)
        unseen = groups.ended_unseen(spec.id)
        if unseen is not None:
            if running.exit is not None:
                groups.exited(node, spec.id, validation.exit_report(running.exit))
            else:
                self._stop(node, spec, 0.0, unseen)
            return
        if known is None:
            if not self._adopt(node, running):
                return
        elif running.exit is None:
            worker = known.workers[spec.id]
            if worker.gone:
                self._stop(node, spec, 0.0)  # its owner was told that it is gone
                return
            if worker.life is WorkerLife.STOPPING:
                self._stop(node, spec, self._head.timing.stop_grace_s)  # the first order may be lost
            elif known.detached and not running.detached:
                groups.start(node.id, known, [worker.spec])  # the agentd was not told that the group is detached
        if running.exit is not None:
            groups.exited(node, spec.id, validation.exit_report(running.exit))
        elif running.endpoint is not None:
            ready = agent_messages.WorkerReady(
                spec.id, running.pid, running.endpoint, running.port, running.master_port
            )
            groups.ready(node, ready)

    def _adopt(self, node: Node, running: RunningWorker) -> bool:
        """Adopt a reported worker that the head does not know, with its group if that is unknown too.

        Returns:
            True if the worker is adopted. False if the report is old or contradicts what the head knows of the job or
            group; in most of these cases the worker, if it lives, is ordered to stop.
        """
        groups, clients, jobs, spec = self._head.groups, self._head.clients, self._head.jobs, running.spec
        grace_s = self._head.timing.orphan_grace_s
        believed = node.member == LOCAL and not jobs.settled  # from before this cluster had keys
        if not jobs.vouches(spec.namespace, spec.token, believed):
            if running.exit is None:
                self._stop(node, spec, grace_s, f"it belongs to an earlier job {spec.namespace!r}")
            return False
        group, owner = groups.get(spec.namespace, spec.group), clients.get(running.owner)
        if group is None:
            if owner is not None and owner.namespace != spec.namespace:
                return False  # a lie: the owner of a group is of its job
            over = groups.has_ended(spec)
            if running.exit is not None and (clients.ended(running.owner) is not None or over):
                return False
            group = Group(spec.namespace, spec.group, running.cls, running.owner, running.detail)
            group.detached, group.unclaimed = running.detached, bool(running.owner)
            jobs.adopt(spec.namespace, spec.token, running.exit is None, believed)
            text = f"runs already, its agent on node {node.name} says"
            self._head.emit(of_group("group_adopted", group, text))
        elif running.exit is not None and not _lacks(group, spec):
            return False  # an end that was reported before: the name has been given again since
        elif group.owner != running.owner and not _detached_meanwhile(group, running):
            self._stop(node, spec, grace_s)
            return False
        group.detail = group.detail or running.detail
        worker = WorkerRecord(spec, node.id, node.report.ip)
        groups.adopt(group, worker)
        if group.owner != running.owner:
            groups.give_to(group, group.owner if group.detached else running.owner)
        if running.exit is None:
            other = groups.claims.take(group, worker, node)
            if other is not None and not group.stopping:
                self._head.emit(commands.LogEvent("robot_conflict", contradiction(other, group)))
                groups.stop_group(group, "")
            elif group.stopping:
                self._stop(node, spec, grace_s)
        if group.owner:
            clients.expect(group.owner, node.member)
        return True

    def _stop(self, node: Node, spec: WorkerSpec, grace_s: float, reason: str = "") -> None:
        self._head.emit(commands.Notify(node.peer, agent_messages.StopWorkers([spec.id], grace_s, reason)))

    # --- clients ---

    def check_owner(self, hello: agent_messages.ClientHello) -> None:
        """Raise Refused if the client's incarnation owns a group of another job."""
        for group in self._head.groups.of_owner(hello.incarnation):
            if group.namespace != hello.namespace:
                raise commands.Refused("authentication", f"this {hello.role} says that it owns groups of another job")

    def handles(self, client: Client, message: client_messages.Handles) -> Sliced[None]:
        """Answer a reconnected client's handles with the present state of the workers in its groups.

        If the client owns a group that its handles no longer name, stop that group, because the client has shut it
        down.
        """
        own: dict[str, GroupHandle] = {}
        for some, more in pieces(message.groups, 10 * PIECE):
            own.update((handle.name, handle) for handle in some if handle.namespace == client.namespace)
            if more:
                yield
        launches: set[str] = set()
        for ids, more in pieces(message.launching, 10 * PIECE):
            launches.update(map(launch_of, ids))
            if more:
                yield
        for handle in own.values():
            launches.update(launch_of(state.id) for state in handle.workers[:1])
            yield from self._handle(client, handle)
            if self._head.clients.get(client.incarnation) is not client:
                return
        for group in self._head.groups.of_owner(client.incarnation):
            if group.unclaimed:
                group.unclaimed = not group.detached and group.launches.isdisjoint(launches)
                self._head.early.note(group.key)
                if group.unclaimed and not group.stopping:
                    self._head.groups.stop_group(group, "its owner has shut it down while the head was away")
        self._head.groups.flush()  # the name of one that was in a back-off is free for a launch that was held

    def _handle(self, client: Client, handle: GroupHandle) -> Sliced[None]:
        group = self._head.groups.get(handle.namespace, handle.name)
        if group is not None and group.launches.isdisjoint(launch_of(state.id) for state in handle.workers[:1]):
            group = None  # a namesake
        if group is not None:
            most = max(group.world_size, len(handle.workers))  # more: some are being added
            self._head.groups.subscribe(group, client)
            if group.owner == client.incarnation:
                group.detail = group.detail or handle.detail
            for piece, more in pieces(handle.workers):
                for state in piece if self._head.groups.get(*group.key) is group else ():
                    known = self._head.groups.of_worker(state.id)
                    if 0 <= state.rank < most and state.rank not in group.ranks and known is None:
                        self._add_ended(client, group, state)
                if more:
                    yield
            yield from self._head.groups.notices.send_all(group, client)
        if group is None or self._head.groups.get(*group.key) is not group:  # it may have ended meanwhile
            ends = yield from self._ends_of(client, handle)
            yield from self._tell(client, worker_changes(handle.namespace, handle.name, ends, 0))

    def _tell(self, client: Client, messages: Sequence[client_messages.WorkerChanged]) -> Sliced[None]:
        for message in messages:
            self._head.emit(commands.Notify(client.peer, message))
            yield

    def _ends_of(self, client: Client, handle: GroupHandle) -> Sliced[list[WorkerState]]:
        """Return the final states of the workers in a client's handle whose group does not exist any more."""
        ended = self._head.groups.ended(handle.namespace, handle.name)
        known = {state.id: state for state in ended.workers} if ended is not None else {}
        states = []
        for number, state in enumerate(handle.workers, 1):
            if not number % PIECE:
                yield
            if state.state != "gone":
                found = known.get(state.id)
                if found is None:
                    self._abandon(client, state)
                    exit = ExitReport("node_lost", reason=NO_NODE_HAS_IT)
                    found = replace(state, state="gone", endpoint=None, exit=exit)
                state = found
            states.append(state)
        return states

    def _add_ended(self, client: Client, group: Group, state: WorkerState) -> None:
        """Record the end of a worker that only this client's handle names, so that all subscribers are notified."""
        known = next(iter(group.workers.values())).spec
        spec = replace(known, id=state.id, rank=state.rank, node_rank=state.node_rank, claims=())
        worker = WorkerRecord(spec, "", state.node_ip)
        ended = validation.exit_report(state.exit) if state.state == "gone" and state.exit is not None else None
        self._head.groups.adopt(group, worker)
        self._head.groups.lost(worker, NO_NODE_HAS_IT, ended)
        if ended is None:
            self._abandon(client, state)

    def _abandon(self, client: Client, state: WorkerState) -> None:
        """Refuse this worker if an agentd reports it later, because the client was told that the worker has ended."""
        if not self._missing_workers.is_full(client.incarnation):
            self._missing_workers.take(client.incarnation)
            self._head.groups.abandon(state.id, NO_NODE_HAS_IT, client.member)

    def client_gone(self, client: Client) -> None:
        self._missing_workers.forget(client.incarnation)


def _detached_meanwhile(group: Group, running: RunningWorker) -> bool:
    """Return True if *running* has another owner than *group* only because its node missed the order to detach."""
    same_launch = launch_of(running.spec.id) in group.launches
    return same_launch and group.detached != running.detached and (group.detached or group.unclaimed)


def _lacks(group: Group, spec: WorkerSpec) -> bool:
    """Return True if the worker completes a known launch: the worker is of that launch, and its rank is unknown."""
    return spec.rank not in group.ranks and launch_of(spec.id) in group.launches


class EarlyMessages:
    """Holds back messages that a restarted head cannot answer yet.

    A message waits for one thing: for a worker, for a group, or for the end of the wait for nodes. Ten thousand
    messages may wait while a thousand nodes come back, so after an event only messages whose thing has changed are
    examined: the tables report changed workers and groups to `note`.

    Attributes:
        over: True once every node of the earlier head has registered again or was declared lost.
    """

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self.over = self._released = self._is_over = not head.nodes.missing
        self._until = head.now + head.timing.patience_s
        self._timer: HeapTimer | None = None
        self._numbers = itertools.count()
        self._held: dict[int, commands.Message] = {}
        self._waits_for: Index[int] = Index()  # numbers of the held messages, by the key that `_awaited` returns
        self._of_peer: Index[int] = Index()
        self._noted: dict[Hashable, None] = {}
        self._all_noted = False
        self._examined: deque[int] = deque()  # numbers of the messages to examine next
        self._last: dict[tuple[bytes, type[object]], int] = {}
        self._launches: Counter[tuple[bytes, str, str]] = Counter()
        self._arm()

    def holds(self, event: commands.Message) -> bool:
        """If the head cannot answer this message yet, hold the message back until `take` returns it.

        Returns:
            True if the message is held back; False if the head can handle it now.
        """
        if self._released and not self._held and not isinstance(event.body, FindGroup):
            return False
        behind = self._released and event.peer in self._of_peer and not isinstance(event.body, NEVER_HELD)
        if not behind and not self._too_early(event):
            return False
        number = next(self._numbers)
        self._held[number] = event
        self._waits_for.add(_awaited(event.body), number, number)
        self._of_peer.add(event.peer, number, number)
        if isinstance(event.body, client_messages.Launch):
            self._launches[event.peer, event.body.namespace, event.body.group] += 1
        if isinstance(event.body, (agent_messages.ClientHello, client_messages.Handles)):
            # peers send these again until they are answered, or complete: the last one counts
            before = self._last.pop((event.peer, type(event.body)), None)
            if before is not None:
                self._head.drop(self._release(before))
            self._last[event.peer, type(event.body)] = number
        if behind:  # earlier messages of its connection have not been examined yet
            self._examined.append(number)
        self._arm()
        return True

    def is_over(self) -> bool:
        """Return True, once, if the earlier head's nodes are all back or the time to wait for them is over.

        The caller then declares the missing nodes lost, sets `over`, and calls `release_all`.
        """
        if self._is_over or not (self._late or not self._head.nodes.missing):
            return False
        self._is_over = True
        return True

    def release_all(self) -> None:
        """Let all messages be handled from now on, because the head knows all that agentds will report."""
        self._released = self._all_noted = True

    def note(self, awaited: str | tuple[str, str]) -> None:
        """Note that a worker (by its id) or a group (by its namespace and name) has changed.

        The next `take` examines the held messages that wait for it.
        """
        if awaited in self._waits_for:
            self._noted[awaited] = None

    @property
    def pending(self) -> bool:
        """True if `take` must be called again, after other events had their turn."""
        return bool(self._noted or self._all_noted or self._examined)

    def take(self) -> list[commands.Message]:
        """Examine TOGETHER held messages, and return those that can be handled now, in the order of their arrival.

        FindGroup requests come last, because a Handles or Launch message before them may name ranks that no agentd has.
        """
        if self._noted or self._all_noted:
            numbers = list(self._held) if self._all_noted else sorted(self._candidates())
            self._noted, self._all_noted = {}, False
            self._examined.extend(sorted(numbers, key=lambda n: isinstance(self._held[n].body, FindGroup)))
        numbers = [self._examined.popleft() for _ in range(min(TOGETHER, len(self._examined)))]
        held = [number for number in dict.fromkeys(numbers) if number in self._held]
        return [self._release(number) for number in held if not self._too_early(self._held[number])]

    def _candidates(self) -> Iterator[int]:
        """Yield the held messages that wait for a noted worker or group, except for groups that still lack workers."""
        for awaited in self._noted:
            group = self._head.groups.get(*awaited) if isinstance(awaited, tuple) else None
            if group is None or group.whole or (self._released and not _may_grow(group)):
                yield from self._waits_for.of(awaited)

    def forget(self, peer: bytes) -> None:
        for number in self._of_peer.of(peer):
            self._release(number)

    def stalled(self, seconds: float) -> None:
        self._until += seconds

    @property
    def _late(self) -> bool:
        return self._head.now >= self._until

    def _arm(self) -> None:
        """Schedule a timer at the time when the head stops waiting for its nodes."""
        if self._timer is None and (self._held or not self.over):
            self._timer = self._head.timers.at(max(self._until, self._head.now), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._all_noted = self._late
        if not self._late:  # the head stalled
            self._arm()

    def _release(self, number: int) -> commands.Message:
        event = self._held.pop(number)
        self._waits_for.discard(_awaited(event.body), number)
        self._of_peer.discard(event.peer, number)
        if isinstance(event.body, client_messages.Launch):
            key = event.peer, event.body.namespace, event.body.group
            self._launches[key] -= 1
            if not self._launches[key]:
                del self._launches[key]
            self.note(key[1:])
        if self._last.get((event.peer, type(event.body))) == number:
            del self._last[event.peer, type(event.body)]
        return event

    def _too_early(self, event: commands.Message) -> bool:
        body, groups = event.body, self._head.groups
        if isinstance(body, (client_messages.StopCluster, client_messages.EndGroup, client_messages.KillWorker)):
            return not self._released  # groups of nodes that are not back yet end too
        if not isinstance(body, agent_messages.ClientHello) and self._head.clients.of_peer(event.peer) is None:
            return False  # it is asked to say hello first
        if isinstance(body, FindGroup):
            group = groups.get(body.namespace, body.group)
            if not (self._late and self._released) and not (group is not None and group.whole):
                return not self._released or (group is not None and _may_grow(group))
        if self._released:
            return False
        if isinstance(body, agent_messages.ClientHello):
            # a worker is a member if an agentd has it; a new driver must not be given a token that is not the job's
            return (
                groups.namespace_of(body.parent or body.worker_id) is None if body.role == "worker" else not body.token
            )
        if isinstance(body, client_messages.StopGroup):
            if self._launches[event.peer, body.namespace, body.group]:
                return True  # the launch that it stops is held back too
            group = groups.get(body.namespace, body.group)
            return group is None or not group.whole
        if isinstance(body, client_messages.GetNodes):
            return not body.num_nodes
        if isinstance(body, FindWorker):
            group = groups.get(body.namespace, body.group)
            return group is None or group.member(body.rank) is None
        return isinstance(body, (client_messages.Launch, client_messages.Handles, *RESIZES))


def _may_grow(group: Group) -> bool:
    """Return True if the owner of the group has not confirmed it, and may know of more workers."""
    return group.unclaimed and not group.stopping


def _awaited(body: Body) -> Hashable:
    """Return what a held message waits for: a worker's id, a group's namespace and name, or None for all nodes."""
    if isinstance(body, agent_messages.ClientHello) and body.role == "worker":
        return body.parent or body.worker_id
    if isinstance(body, (FindGroup, FindWorker, client_messages.StopGroup)):
        return body.namespace, body.group
    return None
