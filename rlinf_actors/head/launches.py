"""Requests of clients about groups: launch, find, detach and stop. Pure.

A launch whose robots are in use may wait for them; waiting launches are tried in the order of their arrival. A lookup
(FindGroup) may wait until a group of that name is launched.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.claims import ADVICE, IN_USE
from rlinf_actors.head.commands import Answer, Notify, Refuse, Refused, RequestReceived
from rlinf_actors.head.event_log import of_group
from rlinf_actors.head.group_notices import MOST_STATES, worker_changes
from rlinf_actors.head.launch_parts import LaunchParts
from rlinf_actors.head.records import Client, Group, Index, WorkerRecord
from rlinf_actors.head.recovery import NO_NODE_HAS_IT
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.head.validation import check_outlives, check_workers, node_for, own_namespace
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.wire.client_messages import Detach, Done, EndGroup, FindGroup, Launch, Launched, StopGroup, Warn
from rlinf_actors.wire.launch_messages import FindWorker, FoundWorker
from rlinf_actors.wire.values import ExitReport, GroupState, WorkerSpec, WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class _Waiting(msgspec.Struct, eq=False):
    """A launch or lookup that waits until `deadline`, in monotonic seconds. `client` identifies the sender."""

    client: str
    peer: bytes
    id: int
    asked: Launch | FindGroup
    deadline: float
    number: int
    robot: str = ""  # key of the robot that was in use at the last try
    timer: HeapTimer | None = None


class _Queue:
    """Waiting requests in the order of their arrival."""

    def __init__(self) -> None:
        self._all: dict[_Waiting, None] = {}
        self._of_group: Index[_Waiting] = Index()
        self._of_client: Index[_Waiting] = Index()

    def all(self) -> list[_Waiting]:
        return list(self._all)

    def of_group(self, namespace: str, name: str) -> list[_Waiting]:
        return self._of_group.of((namespace, name))

    def of_client(self, incarnation: str) -> list[_Waiting]:
        return self._of_client.of(incarnation)

    def add(self, waiting: _Waiting) -> None:
        self._all[waiting] = None
        self._of_group.add((waiting.asked.namespace, waiting.asked.group), waiting, waiting)
        self._of_client.add(waiting.client, waiting, waiting)

    def remove(self, waiting: _Waiting) -> None:
        del self._all[waiting]
        self._of_group.discard((waiting.asked.namespace, waiting.asked.group), waiting)
        self._of_client.discard(waiting.client, waiting)


class Launches:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._waiting = _Queue()
        self._lookups = _Queue()
        self._retry = False
        self._free: set[str] = set()  # keys of robots that have become free
        self._blocked: Index[_Waiting] = Index()  # by the robot that was in use at the last try
        self._numbers = itertools.count()
        self.parts = LaunchParts(head)
        self._following: list[Notify] = []

    # --- launch ---

    def launch(self, client: Client, event: RequestReceived, asked: Launch) -> Launched | None:
        """Launch a group: reserve its name and robots, and order the nodes to start its workers.

        Returns:
            The launched group; None if the launch waits for its hardware and is answered later.
        """
        asked = self._completed(client, asked)
        try:
            return self._launch(client, asked)
        except Refused as refusal:
            settled = self._head.groups.claims.settled
            patience_s = max(asked.wait_s, settled - self._head.now)
            if refusal.kind != IN_USE or patience_s <= 0:
                raise
            self._wait(self._waiting, client, event, asked, patience_s, refusal.robot)
            if self._head.now < settled:
                self._head.timers.at(settled, self.retry_waiting)
            why = refusal.text.removesuffix(ADVICE)
            text = f"group {asked.group!r} waits for its hardware, {patience_s:.3g} s at most: {why}"
            self._head.emit(Notify(event.peer, Warn(text)))
            return None

    def _completed(self, client: Client, asked: Launch) -> Launch:
        """Return *asked* with the workers of its parts. A repeated launch may have left them with a waiting launch."""
        for waiting in self._waiting.of_client(client.incarnation) if asked.parts else ():
            before = waiting.asked
            if isinstance(before, Launch) and before.workers[-1:] == asked.workers:
                return before
        return self.parts.complete(client, asked)

    def _launch(self, client: Client, asked: Launch) -> Launched:
        own_namespace(client, asked.namespace)
        self._head.robots.check(asked)
        groups = self._head.groups
        taken = groups.get(asked.namespace, asked.group)
        if taken is not None and not taken.launch.isdisjoint(spec.id for spec in asked.workers):
            return self._launch_again(taken, client, asked)
        if taken is not None and asked.get_if_exists and not taken.stopping and not taken.gone:
            return self._existing(taken, client, asked)
        if taken is not None and not groups.release(taken):
            raise Refused(
                "name_in_use",
                f"a group named {asked.group!r} is {taken.summary} in namespace {asked.namespace!r}: "
                "give this one another name, or shut that one down first",
            )
        groups.names.check(asked.namespace, asked.group)
        check_workers(asked, lambda id: groups.of_worker(id) is not None)
        nodes = [node_for(spec, self._head.nodes) for spec in asked.workers]
        if asked.outlives:
            check_outlives(asked, client, self._head.identity.embedded, nodes)
        groups.claims.check((claim for spec in asked.workers for claim in spec.claims), asked.namespace)
        token = self._head.jobs.token(asked.namespace)
        owner = (self._head.clients.driver_of(asked.namespace) if asked.detached else None) or client
        group = Group(asked.namespace, asked.group, asked.cls, owner.incarnation, asked.detail)
        if owner is not client:
            group.detached = True
            group.subscribers[client.incarnation] = None
        placed: dict[str, list[WorkerSpec]] = {}
        for node, unsigned in zip(nodes, asked.workers, strict=True):
            spec = replace(unsigned, token=token, resizes=0)
            placed.setdefault(node.id, []).append(spec)
            worker = WorkerRecord(spec, node.id, node.report.ip)
            groups.add(group, worker)
            groups.claims.take(group, worker, node)
        groups.enter(group)
        for lookup in self._lookups.of_group(*group.key):
            self._try(lookup)
        text = f"was launched: {group.cls}, ranks 0-{len(group.workers) - 1}"
        self._head.emit(of_group("group_launched", group, text))
        for node_id, specs in placed.items():
            groups.start(node_id, group, specs)
        return self._launched(client, group.state(token))

    def _launched(self, client: Client, state: GroupState) -> Launched:
        """Return the answer with the state of a group. States that do not fit into it follow it."""
        rest = state.workers[MOST_STATES:]
        if not rest:
            return Launched(state)
        for message in worker_changes(state.namespace, state.name, rest, state.world_size):
            self._following.append(Notify(client.peer, message))
        return Launched(replace(state, workers=state.workers[:MOST_STATES]))

    def _launch_again(self, group: Group, client: Client, asked: Launch) -> Launched:
        """Answer a repeated launch whose first answer was lost with a connection or with an earlier head.

        The head recognises the launch by its worker ids, because no two launches share an id. Workers that the head
        does not know are started.
        """
        groups = self._head.groups
        if group.stopping:
            raise Refused("usage", f"group {group.name!r} is being stopped: launch it again when it has ended")
        check_workers(asked, lambda id: groups.of_worker(id) not in (None, group))
        token = self._head.jobs.token(asked.namespace)
        groups.subscribe(group, client)
        try:
            missing = [
                (node_for(spec, self._head.nodes), spec) for spec in asked.workers if spec.id not in group.launch
            ]
            groups.claims.check((claim for _, spec in missing for claim in spec.claims), group.namespace, group)
        except Refused as refusal:
            if refusal.kind != IN_USE or self._head.now >= groups.claims.settled:
                groups.stop_group(group, "not all its nodes, or robots, were there after the head was restarted")
            raise
        for node, unsigned in missing:
            spec = replace(unsigned, token=token, resizes=0)
            worker = WorkerRecord(spec, node.id, node.report.ip)
            groups.adopt(group, worker)
            groups.claims.take(group, worker, node)
            groups.start(node.id, group, [spec])
        return self._launched(client, group.state(token))

    def _existing(self, group: Group, client: Client, asked: Launch) -> Launched:
        """Answer a launch that has `get_if_exists` with the running group of its name.

        Raises:
            Refused: that group is of another class.
        """
        if group.cls.rpartition(":")[2] != asked.cls.rpartition(":")[2]:
            raise Refused(
                "name_in_use",
                f"the group named {asked.group!r} in namespace {asked.namespace!r} is of class {group.cls}, and not of "
                f"{asked.cls}: give this one another name, or shut that one down first",
            )
        found = self._find(client, FindGroup(asked.namespace, asked.group))
        assert found is not None  # it is *group*
        return found

    def detach(self, client: Client, asked: Detach) -> Done:
        """Detach a running group for a client, so that the group outlives the client."""
        own_namespace(client, asked.namespace)
        group = self._head.groups.get(asked.namespace, asked.group)
        if group is None or group.gone or group.launch.isdisjoint(map(rank_id, asked.workers)):
            raise Refused("not_found", f"group {asked.group!r} has ended and cannot be detached")
        if group.stopping:
            raise Refused("usage", f"group {asked.group!r} is being stopped and cannot be detached")
        if group.owner == client.incarnation:
            driver = self._head.clients.driver_of(asked.namespace) if client.role == "worker" else None
            self._head.groups.give_to(group, driver.incarnation if driver is not None else "")
        elif not group.detached:
            raise Refused("usage", f"group {asked.group!r} belongs to another client, which alone can detach it")
        self._head.groups.subscribe(group, client)
        return Done()

    # --- find ---

    def find(self, client: Client, event: RequestReceived, asked: FindGroup) -> Launched | None:
        """Return the state of a group, and subscribe the client to its changes.

        Returns:
            The group; None if the group does not exist yet and the request waits for its launch.
        """
        own_namespace(client, asked.namespace)
        try:
            found = self._find(client, asked)
            if found is None and asked.wait_s <= 0:
                raise self._not_found(asked)
        except Refused:
            if asked.wait_s <= 0:
                raise
            found = None
        if found is None:
            self._wait(self._lookups, client, event, asked, asked.wait_s)
        return found

    def _find(self, client: Client, asked: FindGroup) -> Launched | None:
        """Return the state of a group, and subscribe the client; return None if no group has that name.

        Raises:
            Refused: another group than the requested one has the name.
        """
        namespace, name, groups = asked.namespace, asked.group, self._head.groups
        group = groups.get(namespace, name)
        if group is not None and asked.launch and asked.launch not in group.launches:
            raise Refused(
                "not_found",
                f"the group {name!r} of namespace {namespace!r} that was asked for has ended, and another one has its "
                "name: get a handle of that by WorkerGroup.from_group_name",
            )
        if group is None:
            ended = groups.ended(namespace, name, self._head.jobs.token(namespace)) if asked.ended else None
            if ended is not None and asked.launch in ("", *(launch_of(one.id) for one in ended.workers)):
                return self._launched(client, ended)
            return None
        groups.subscribe(group, client)
        state = group.state(self._head.jobs.token(namespace))
        return self._launched(client, replace(state, workers=[*state.workers, *_absent(group)]))

    def find_worker(self, client: Client, asked: FindWorker) -> FoundWorker:
        """Return the state of one worker of the client's job."""
        own_namespace(client, asked.namespace)
        group = self._head.groups.get(asked.namespace, asked.group)
        worker = group.member(asked.rank) if group is not None else None
        return FoundWorker() if group is None or worker is None else FoundWorker(worker.state(), group.world_size)

    def _not_found(self, asked: FindGroup) -> Refused:
        namespace = asked.namespace
        there = sorted(group.name for group in self._head.groups.of_job(namespace))
        known = f"there are {', '.join(map(repr, there))}" if there else "there is none at all"
        return Refused("not_found", f"no group named {asked.group!r} is running in namespace {namespace!r}; {known}")

    # --- stop ---

    def stop(self, client: Client, event: RequestReceived, asked: StopGroup) -> None:
        """Stop a group for a client, and answer the request when the group's last worker is gone.

        If there is no such group, or if the group of that name belongs to another launch, answer at once.
        """
        own_namespace(client, asked.namespace)
        self.parts.drop(client.incarnation, asked.namespace, asked.group)
        named = self._waiting.of_group(asked.namespace, asked.group)
        for waiting in [w for w in named if w.client == client.incarnation and _stops(asked, w.asked)]:
            self._remove(waiting)
            text = f"group {asked.group!r} was shut down while it waited for its hardware"
            self._head.emit(Refuse(waiting.peer, waiting.id, IN_USE, text))
        group = self._head.groups.get(asked.namespace, asked.group)
        if group is None or (asked.workers and group.launch.isdisjoint(map(rank_id, asked.workers))):
            self._head.emit(Answer(event.peer, event.id, Done()))
            return
        group.waiting.append((event.peer, event.id))
        self._head.groups.stop(group, asked.grace_s)

    def end(self, event: RequestReceived, asked: EndGroup) -> None:
        """Stop a group for a person or tool, and answer the request when the group's last worker is gone."""
        group = self._head.groups.get(asked.namespace, asked.group)
        if group is None:
            raise Refused("not_found", f"there is no group {asked.group!r} in namespace {asked.namespace!r}")
        if self._head.groups.release(group):
            self._head.emit(Answer(event.peer, event.id, Done()))
            return
        group.waiting.append((event.peer, event.id))
        self._head.groups.stop(group, asked.grace_s, f"{asked.by} ended it: {asked.reason or 'no reason was given'}")

    def stop_all(self) -> None:
        """Stop every group and refuse all waiting launches, because the cluster ends."""
        for waiting in self._waiting.all():
            self._remove(waiting)
            self._head.emit(Refuse(waiting.peer, waiting.id, "usage", "the cluster is being stopped"))
        for lookup in self._lookups.all():
            self._try(lookup, last=True)
        for group in self._head.groups.all():
            self._head.groups.stop(group, self._head.timing.stop_grace_s)

    # --- waiting ---

    def robot_free(self, key: str) -> None:
        """Try the launches that wait for this robot again at the next flush."""
        self._free.add(key)

    def retry_waiting(self) -> None:
        """Try all waiting launches again at the next flush, because a drain or an emergency stop may now refuse one."""
        self._retry = True

    def flush(self) -> None:
        if (self._retry or self._free) and self._head.now >= self._head.groups.claims.settled:
            due = self._waiting.all() if self._retry else [w for key in self._free for w in self._blocked.of(key)]
            self._retry, self._free = False, set()
            for waiting in sorted(due, key=lambda waiting: waiting.number):
                self._try(waiting)
        for notice in self._following:
            self._head.emit(notice)
        self._following.clear()

    def _wait(
        self,
        queue: _Queue,
        client: Client,
        event: RequestReceived,
        asked: Launch | FindGroup,
        wait_s: float,
        robot: str = "",
    ) -> None:
        for again in [w for w in queue.of_client(client.incarnation) if w.asked == asked]:
            self._remove(again)
            self._head.requests.done(again.peer, again.id)  # the repeated request gets the answer instead
        waiting = _Waiting(
            client.incarnation, event.peer, event.id, asked, self._head.now + wait_s, next(self._numbers), robot
        )
        waiting.timer = self._head.timers.at(waiting.deadline, lambda: self._try(waiting))
        queue.add(waiting)
        if isinstance(asked, Launch):
            self._blocked.add(robot, waiting, waiting)

    def _remove(self, waiting: _Waiting) -> None:
        self._head.timers.cancel(waiting.timer)
        self._blocked.discard(waiting.robot, waiting)
        (self._waiting if isinstance(waiting.asked, Launch) else self._lookups).remove(waiting)

    def _try(self, waiting: _Waiting, last: bool = False) -> None:
        """Try a waiting launch or lookup again.

        If the try fails, the request waits on or is refused. It is refused in any case if this is the *last* try.
        """
        client, asked = self._head.clients.get(waiting.client), waiting.asked
        may_wait = not last and self._head.now < waiting.deadline
        try:
            if client is not None:
                answer = self._launch(client, asked) if isinstance(asked, Launch) else self._find(client, asked)
                if answer is None and may_wait:
                    return
                if answer is None:
                    assert isinstance(asked, FindGroup)
                    raise self._not_found(asked)
                self._head.emit(Answer(waiting.peer, waiting.id, answer))
        except Refused as refusal:
            if may_wait and (isinstance(asked, FindGroup) or refusal.kind == IN_USE):
                self._blocked.discard(waiting.robot, waiting)
                waiting.robot = refusal.robot
                self._blocked.add(waiting.robot, waiting, waiting)
                return
            self._head.emit(Refuse(waiting.peer, waiting.id, refusal.kind, refusal.text))
        self._remove(waiting)


def _stops(stop: StopGroup, asked: Launch | FindGroup) -> bool:
    """Return True if the request *stop* is for the waiting launch *asked*, not for another launch of its name."""
    assert isinstance(asked, Launch)
    same = not stop.workers or not {spec.id for spec in asked.workers}.isdisjoint(stop.workers)
    return stop.group == asked.group and same


def _absent(group: Group) -> list[WorkerState]:
    """Return a worker state "gone" for each rank of the group for which a restarted head knows no worker."""
    known = group.ranks
    exit = ExitReport("node_lost", reason=NO_NODE_HAS_IT)
    return [
        WorkerState("", rank, -1, "unknown", "gone", exit=exit) for rank in range(group.world_size) if rank not in known
    ]
