"""Requests of clients about groups: launch, find, detach and stop. Pure.

A launch whose robots are in use may wait for them; waiting launches are tried in the order of their arrival. A lookup
(FindGroup) may wait until a group of that name is launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.claims import ADVICE, IN_USE
from rlinf_actors.head.commands import Answer, Notify, Refuse, Refused, RequestReceived
from rlinf_actors.head.event_log import of_launch
from rlinf_actors.head.group_notices import MOST_STATES
from rlinf_actors.head.group_slices import add_absent, states_of
from rlinf_actors.head.launch_parts import LaunchParts
from rlinf_actors.head.node_requests import NAMED
from rlinf_actors.head.owners import owner_clause
from rlinf_actors.head.records import Client, Group, Index, WorkerRecord
from rlinf_actors.head.slices import PIECE, Sliced, group_key, pieces
from rlinf_actors.head.validation import check_outlives, check_workers, node_for, own_namespace
from rlinf_actors.head.waiting import Waiting, WaitingQueue
from rlinf_actors.model.names import wrong_name
from rlinf_actors.model.restart import launch_of
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.client_messages import Detach, Done, EndGroup, FindGroup, Launch, Launched, StopGroup, Warn
from rlinf_actors.wire.launch_messages import FindWorker, FoundWorker, LaunchPart
from rlinf_actors.wire.values import GroupState, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


ENDING = "the cluster is being stopped"
"""Why nothing is launched any more."""


class Launches:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._waiting = WaitingQueue()
        self._lookups = WaitingQueue()
        self._retry = False
        self._free: set[str] = set()  # keys of robots that have become free
        self._blocked: Index[Waiting] = Index()  # by the robot that was in use at the last try
        self._numbers = itertools.count()
        self.parts = LaunchParts(head)

    # --- launch ---

    def launch(self, client: Client, event: RequestReceived, asked: Launch) -> Sliced[Launched | None]:
        """Launch a group: reserve its name and robots, and order the nodes to start its workers.

        Returns:
            The launched group; None if the launch waits for its hardware and is answered later.
        """
        if self._head.ending:
            raise Refused("usage", ENDING)
        asked = self._completed(client, asked)
        try:
            return (yield from self._launch(client, asked))
        except Refused as refusal:
            settled = self._head.groups.claims.settled
            patience_s = max(asked.wait_s, settled - self._head.now)
            if refusal.kind != IN_USE or patience_s <= 0:
                raise
            self._wait(self._waiting, client, event, asked, patience_s, refusal.robot, refusal.text)
            if self._head.now < settled:
                self._head.timers.at(settled, self.retry_waiting)
            why = refusal.text.removesuffix(ADVICE)
            text = f"group {asked.group!r} waits for its hardware, {patience_s:.3g} s at most: {why}"
            self._head.emit(Notify(event.peer, Warn(text)))
            return None

    def add_part(self, client: Client, asked: LaunchPart) -> Sliced[Done]:
        """Keep a part of a launch that will follow."""
        if self._head.ending:
            raise Refused("usage", ENDING)
        return (yield from self.parts.add(client, asked))

    def _completed(self, client: Client, asked: Launch) -> Launch:
        """Return *asked* with the workers of its parts. A repeated launch may have left them with a waiting launch."""
        for waiting in self._waiting.of_client(client.incarnation) if asked.parts else ():
            before = waiting.asked
            if isinstance(before, Launch) and before.workers[-1:] == asked.workers:
                return before
        return self.parts.complete(client, asked)

    def _launch(self, client: Client, asked: Launch) -> Sliced[Launched]:
        own_namespace(client, asked.namespace)
        self._head.robots.check(asked)
        groups = self._head.groups
        key = asked.namespace, asked.group
        taken = groups.get(*key)
        if taken is not None and _names([spec.id for spec in asked.workers[:1]], taken.launches):
            return (yield from self._launch_again(taken, client, asked))
        if taken is not None and asked.get_if_exists and not taken.stopping and not taken.gone:
            return (yield from self._existing(taken, client, asked))
        if taken is not None and not (yield from groups.release(taken)):
            raise Refused(
                "name_in_use",
                f"a group named {asked.group!r} is {taken.summary} in job {asked.namespace!r}, "
                f"{owner_clause(self._head, taken)}: "
                "give this one another name, or shut that one down first",
            )
        if wrong := wrong_name(asked.group, "a group"):
            raise Refused("usage", wrong)
        groups.names.check(asked.namespace, asked.group)
        yield from check_workers(asked, lambda id: groups.of_worker(id) is not None)
        robots = yield from self.check_nodes(client, asked.workers)
        # From here to the next yield nothing else happens: the name and all robots are granted together.
        if self._head.ending:
            raise Refused("usage", ENDING)
        if self._head.clients.get(client.incarnation) is not client:
            raise Refused("node_lost", f"the {client.role} that launched group {asked.group!r} has ended")
        if (taken := groups.get(*key)) is not None:
            whose = owner_clause(self._head, taken)
            raise Refused("name_in_use", f"a group named {asked.group!r}, {whose}, was reported by a node meanwhile")
        self._head.robots.check(asked)
        if asked.outlives:
            check_outlives(asked, client, self._head.identity.embedded)
        groups.claims.check((claim for spec in robots for claim in spec.claims), asked.namespace)
        token = self._head.jobs.token(asked.namespace)
        owner = (self._head.clients.driver_of(asked.namespace) if asked.detached else None) or client
        group = Group(asked.namespace, asked.group, asked.cls, owner.incarnation, asked.detail)
        group.nested = client.role == "worker"
        if owner is not client:
            group.detached = True
            group.subscribers[client.incarnation] = None
        group.launching = True
        groups.enter(group)
        try:
            yield from self._add_workers(group, asked.workers, robots, token)
        except Refused as refusal:
            self._head.group_slices.launch_failed(group, refusal.text)
            raise
        group.launching = False
        self._try(self._lookups.of_group(*group.key))
        self._head.emit(of_launch(group, len(group.workers)))
        yield from self._head.group_slices.start_all(group, list(group.workers.values()))
        states = yield from states_of(group)
        return self.launched(client, group.state(token, states))

    def check_nodes(self, client: Client, specs: Sequence[WorkerSpec]) -> Sliced[list[WorkerSpec]]:
        """Raise Refused if the node of a worker is not there, or if the client may not launch it there.

        Returns:
            The workers with robots.
        """
        checked: set[tuple[int, bool]] = set()
        robots: list[WorkerSpec] = []
        for some, more in pieces(specs, 5 * PIECE):
            for spec in some:
                kind = spec.node_rank, bool(spec.claims)
                if kind not in checked:
                    self._head.admission.check(client, node_for(spec, self._head.nodes), spec)
                    checked.add(kind)
                if spec.claims:
                    robots.append(spec)
            if more:
                yield
        return robots

    def _add_workers(
        self, group: Group, specs: Sequence[WorkerSpec], robots: Sequence[WorkerSpec], token: str
    ) -> Sliced[None]:
        """Add the workers of a launch to its group, those with *robots* first and without a yield.

        Raises:
            Refused: the group was stopped or a node was lost in the meantime.
        """
        for spec in robots:
            self._add(group, spec, token)
        for some, more in pieces(specs):
            for spec in some:
                if not spec.claims:
                    self._add(group, spec, token)
            if more:
                yield
                if group.stopping:
                    raise Refused("usage", f"group {group.name!r} was stopped while it was launched")

    def _add(self, group: Group, spec: WorkerSpec, token: str) -> None:
        node = node_for(spec, self._head.nodes)
        worker = WorkerRecord(replace(spec, token=token, resizes=0), node.id, node.report.ip)
        self._head.groups.add(group, worker)
        self._head.groups.claims.take(group, worker, node)

    def launched(self, client: Client, state: GroupState) -> Launched:
        """Return the answer with the state of a group. States that do not fit into it follow it."""
        rest = state.workers[MOST_STATES:]
        if not rest:
            return Launched(state)
        state = replace(state, workers=state.workers[:MOST_STATES])
        self._head.slices.start(self._head.group_slices.follow(client, state, rest), speaker=client.member)
        return Launched(state)

    def _launch_again(self, group: Group, client: Client, asked: Launch) -> Sliced[Launched]:
        """Answer a repeated launch whose first answer was lost with a connection or with an earlier head.

        The head recognises the launch by its worker ids, because no two launches share an id. Workers that the head
        does not know are started.
        """
        groups = self._head.groups
        yield from check_workers(asked, lambda id: groups.of_worker(id) not in (None, group))
        missing: list[WorkerSpec] = []
        for some, more in pieces(asked.workers, 5 * PIECE):
            missing += [spec for spec in some if not group.has_had(spec)]
            if more:
                yield
        try:
            robots = yield from self.check_nodes(client, missing)
            if group.stopping or groups.get(*group.key) is not group:
                raise Refused("usage", f"group {group.name!r} is being stopped: launch it again when it has ended")
            groups.claims.check((claim for spec in robots for claim in spec.claims), group.namespace, group)
        except Refused as refusal:
            if refusal.kind != IN_USE or self._head.now >= groups.claims.settled:
                groups.stop_group(group, "not all its nodes, or robots, were there after the head was restarted")
            raise
        token = self._head.jobs.token(asked.namespace)
        groups.subscribe(group, client)
        added = yield from self.adopt_all(group, missing, token, 0)
        yield from self._head.group_slices.start_all(group, added)
        states = yield from states_of(group)
        return self.launched(client, group.state(token, states))

    def adopt_all(
        self, group: Group, specs: Sequence[WorkerSpec], token: str, resizes: int
    ) -> Sliced[list[WorkerRecord]]:
        """Add workers to a group that clients know, those with robots without a yield. Return their records."""
        ordered = [*(one for one in specs if one.claims), *(one for one in specs if not one.claims)]
        added = []
        for number, unsigned in enumerate(ordered, 1):
            node = self._head.nodes.of_rank(unsigned.node_rank)
            if node is None or group.stopping:
                break  # those that were added so far are not started, see GroupTable.start_all
            worker = WorkerRecord(replace(unsigned, token=token, resizes=resizes), node.id, node.report.ip)
            self._head.groups.adopt(group, worker)
            self._head.groups.claims.take(group, worker, node)
            added.append(worker)
            if not number % PIECE and not (number < len(ordered) and ordered[number].claims):
                yield
        return added

    def _existing(self, group: Group, client: Client, asked: Launch) -> Sliced[Launched]:
        """Answer a launch that has `get_if_exists` with the running group of its name.

        Raises:
            Refused: that group is of another class.
        """
        if group.cls.rpartition(":")[2] != asked.cls.rpartition(":")[2]:
            raise Refused(
                "name_in_use",
                f"the group named {asked.group!r} in job {asked.namespace!r}, {owner_clause(self._head, group)}, "
                f"is of class {group.cls}, not of {asked.cls}: give this one another name, or shut that one down first",
            )
        found = yield from self._find(client, FindGroup(asked.namespace, asked.group))
        assert found is not None  # it is *group*
        return found

    def detach(self, client: Client, asked: Detach) -> Done:
        """Detach a running group for a client, so that the group outlives the client."""
        own_namespace(client, asked.namespace)
        group = self._head.groups.get(asked.namespace, asked.group)
        if group is None or group.gone or not _names(asked.workers, group.launches):
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

    def find(self, client: Client, event: RequestReceived, asked: FindGroup) -> Sliced[Launched | None]:
        """Return the state of a group, and subscribe the client to its changes.

        Returns:
            The group; None if the group does not exist yet and the request waits for its launch.
        """
        own_namespace(client, asked.namespace)
        try:
            found = yield from self._find(client, asked)
            if found is None and asked.wait_s <= 0:
                raise self._not_found(asked)
        except Refused:
            if asked.wait_s <= 0:
                raise
            found = None
        if found is None:
            self._wait(self._lookups, client, event, asked, asked.wait_s)
        return found

    def _find(self, client: Client, asked: FindGroup) -> Sliced[Launched | None]:
        """Return the state of a group, and subscribe the client; return None if no group has that name.

        Raises:
            Refused: another group than the requested one has the name.
        """
        namespace, name, groups = asked.namespace, asked.group, self._head.groups
        group = groups.get(namespace, name)
        if group is not None and asked.launch and asked.launch not in group.launches:
            raise Refused(
                "not_found",
                f"the group {name!r} of job {namespace!r} that was asked for has ended, and another one has its "
                "name: get a handle of that by WorkerGroup.from_group_name",
            )
        if group is None:
            ended = groups.ended(namespace, name, self._head.jobs.token(namespace)) if asked.ended else None
            if ended is not None and asked.launch in ("", *(launch_of(one.id) for one in ended.workers)):
                return self.launched(client, ended)
            return None
        groups.subscribe(group, client)
        states = yield from states_of(group)
        if len(states) < group.world_size:
            yield from add_absent(group, states)
        return self.launched(client, group.state(self._head.jobs.token(namespace), states))

    def find_worker(self, client: Client, asked: FindWorker) -> FoundWorker:
        """Return the state of one worker of the client's job."""
        own_namespace(client, asked.namespace)
        group = self._head.groups.get(asked.namespace, asked.group)
        worker = group.member(asked.rank) if group is not None else None
        return FoundWorker() if group is None or worker is None else FoundWorker(worker.state(), group.world_size)

    def _not_found(self, asked: FindGroup) -> Refused:
        namespace = asked.namespace
        there = [group.name for group in self._head.groups.of_job(namespace)]
        names = ", ".join(map(repr, sorted(there[:NAMED])))
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        known = f"there are {names}{more}" if there else "there is none at all"
        return Refused("not_found", f"no group named {asked.group!r} is running in job {namespace!r}; {known}")

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
        if group is None or (asked.workers and not _names(asked.workers, group.launches)):
            self._head.emit(Answer(event.peer, event.id, Done()))
            return
        group.waiting.append((event.peer, event.id))
        self._head.groups.stop(group, asked.grace_s)

    def end(self, event: RequestReceived, asked: EndGroup) -> Sliced[None]:
        """Stop a group for a person or tool, and answer the request when the group's last worker is gone."""
        group = self._head.groups.get(asked.namespace, asked.group)
        if group is None:
            raise Refused("not_found", f"there is no group {asked.group!r} in job {asked.namespace!r}")
        if (yield from self._head.groups.release(group)):
            self._head.emit(Answer(event.peer, event.id, Done()))
            return
        group.waiting.append((event.peer, event.id))
        self._head.groups.stop(group, asked.grace_s, f"{asked.by} ended it: {asked.reason or 'no reason was given'}")

    def stop_all(self) -> None:
        """Stop every group and refuse all waiting launches, because the cluster ends."""
        for waiting in self._waiting.all():
            self._remove(waiting)
            self._head.emit(Refuse(waiting.peer, waiting.id, "usage", ENDING))
        for lookup in self._lookups.all():
            lookup.last = True
        self._try(self._lookups.all())
        groups, grace_s = self._head.groups, self._head.timing.stop_grace_s
        work = self._head.group_slices.stop_groups(groups.all(), lambda group: groups.stop(group, grace_s))
        self._head.slices.start(work)

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
            self._try(sorted(due, key=lambda waiting: waiting.number))

    def _wait(
        self, queue: WaitingQueue, client: Client, event: RequestReceived, asked: Launch | FindGroup, wait_s: float,
        robot: str = "", why: str = "",
    ) -> None:  # fmt: skip
        for again in [w for w in queue.of_client(client.incarnation) if w.asked == asked]:
            if again.id != event.id and isinstance(asked, FindGroup):
                continue  # of another thread of the client; a repeated request has its old number
            self._remove(again)
            self._head.requests.done(again.peer, again.id)  # the repeated request gets the answer instead
        until, number = self._head.now + wait_s, next(self._numbers)
        waiting = Waiting(client.incarnation, event.peer, event.id, asked, until, number, robot, why)
        waiting.timer = self._head.timers.at(until, lambda: self._expired(waiting))
        queue.add(waiting)
        if isinstance(asked, Launch):
            self._blocked.add(robot, waiting, waiting)

    def _remove(self, waiting: Waiting) -> None:
        self._head.timers.cancel(waiting.timer)
        self._blocked.discard(waiting.robot, waiting)
        (self._waiting if isinstance(waiting.asked, Launch) else self._lookups).remove(waiting)

    def _expired(self, waiting: Waiting) -> None:
        """End a wait at its deadline. A launch is not tried again: its robot has not become free since the last try."""
        if waiting.trying or not waiting.robot or self._retry or waiting.robot in self._free:
            self._try([waiting])
        else:
            self._head.emit(Refuse(waiting.peer, waiting.id, IN_USE, waiting.why))
            self._remove(waiting)

    def _try(self, due: Sequence[Waiting]) -> None:
        """Try waiting launches and lookups again: one now, the others in slices, those for one group in their order.

        If the try fails, the request waits on or is refused.
        """
        of_group: dict[tuple[str, str], list[Waiting]] = {}
        for waiting in due:
            if not waiting.trying:
                waiting.trying = True
                of_group.setdefault((waiting.asked.namespace, waiting.asked.group), []).append(waiting)
        for number, (key, some) in enumerate(of_group.items()):
            client = self._head.clients.get(some[0].client)
            speaker = client.member if client is not None else LOCAL
            keys = [group_key(*key)] if isinstance(some[0].asked, Launch) else []  # lookups delay no end of the group
            self._head.slices.start(self._try_each(some, number == 0), keys, speaker)

    def _try_each(self, some: Sequence[Waiting], now: bool) -> Sliced[None]:
        for waiting in some:
            if not now:
                yield
            now = False
            if self._is_waiting(waiting):
                yield from self._trying(waiting)

    def _trying(self, waiting: Waiting) -> Sliced[None]:
        client, asked = self._head.clients.get(waiting.client), waiting.asked
        answer: Launched | None = None
        try:
            if client is not None:
                if isinstance(asked, Launch):
                    answer = yield from self._launch(client, asked)
                else:
                    group = self._head.groups.get(asked.namespace, asked.group)
                    if group is None or not group.launching:
                        answer = yield from self._find(client, asked)
                    if answer is None:
                        raise self._not_found(asked)
        except Refused as refusal:
            waiting.trying = False
            may_wait = not waiting.last and self._head.now < waiting.deadline
            if may_wait and (isinstance(asked, FindGroup) or refusal.kind == IN_USE):
                self._blocked.discard(waiting.robot, waiting)
                waiting.robot, waiting.why = refusal.robot, refusal.text
                if isinstance(asked, Launch):
                    self._blocked.add(waiting.robot, waiting, waiting)
                return
            if self._is_waiting(waiting):
                self._head.emit(Refuse(waiting.peer, waiting.id, refusal.kind, refusal.text))
        if answer is not None and self._is_waiting(waiting):
            self._head.emit(Answer(waiting.peer, waiting.id, answer))
        if self._is_waiting(waiting):
            self._remove(waiting)

    def _is_waiting(self, waiting: Waiting) -> bool:
        return waiting in (self._waiting if isinstance(waiting.asked, Launch) else self._lookups)


def _stops(stop: StopGroup, asked: Launch | FindGroup) -> bool:
    """Return True if the request *stop* is for the waiting launch *asked*, not for another launch of its name."""
    assert isinstance(asked, Launch)
    return not stop.workers or _names(stop.workers, [launch_of(spec.id) for spec in asked.workers[:1]])


def _names(workers: Sequence[str], launches: Collection[str]) -> bool:
    """Return True if the ids *workers*, which are of one launch, are of one of these *launches*."""
    return bool(workers) and launch_of(workers[0]) in launches
