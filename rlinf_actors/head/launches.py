"""What clients ask of groups: launch one, now or when its hardware is free, find one, stop one. Pure.

Launches that wait for their hardware, first come, first served, and looks at groups that wait for a launch. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import Answer, Emit, Notify, Refusal, Refuse, Timing
from rlinf_actors.head.event_log import of_group
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.hardware_claims import ADVICE, IN_USE
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.records import Client, Group, WorkerRecord
from rlinf_actors.head.recovery import NOBODY_HAS_IT
from rlinf_actors.head.validation import check_launch, check_outlives, check_workers, node_for, own_namespace
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.wire.client_messages import Detach, Done, EndGroup, FindGroup, Launch, Launched, StopGroup, Warn
from rlinf_actors.wire.values import ExitReport, WorkerSpec, WorkerState


@dataclass(frozen=True)
class _Waiting:
    client: str
    peer: bytes
    id: int
    asked: Launch
    deadline: float


class WaitingLaunches:
    """They are answered when they can start, when their time is over, or when they are withdrawn.

    Args:
        emit: takes commands.
        clients: who asked; the launch of one that has ended is dropped.
        launch: carries one out, or raises Refusal.
        dropped: called with the peer and number of a request that will have no answer: it was asked again.
    """

    def __init__(
        self,
        emit: Emit,
        clients: ClientTable,
        launch: Callable[[Client, Launch, float], Launched],
        dropped: Callable[[bytes, int], None],
    ) -> None:
        self._emit = emit
        self._clients = clients
        self._launch = launch
        self._dropped = dropped
        self._waiting: list[_Waiting] = []

    def add(self, client: Client, peer: bytes, id: int, asked: Launch, why: str, patience_s: float, now: float) -> None:
        """Persist a launch for *patience_s* at most; its client is told *why* it waits."""
        for again in [w for w in self._waiting if (w.client, w.asked) == (client.incarnation, asked)]:
            self._waiting.remove(again)
            self._dropped(again.peer, again.id)
        self._waiting.append(_Waiting(client.incarnation, peer, id, asked, now + patience_s))
        text = f"group {asked.group!r} waits for its hardware, {patience_s:.3g} s at most: {why.removesuffix(ADVICE)}"
        self._emit(Notify(peer, Warn(text)))

    def tick(self, freed: bool, now: float) -> None:
        """Try all of them if something was *freed*, else those whose time is over."""
        for waiting in [w for w in self._waiting if freed or now >= w.deadline]:
            client = self._clients.get(waiting.client)
            try:
                if client is not None:
                    self._emit(Answer(waiting.peer, waiting.id, self._launch(client, waiting.asked, now)))
            except Refusal as refused:
                if refused.kind == IN_USE and now < waiting.deadline:
                    continue
                self._emit(Refuse(waiting.peer, waiting.id, refused.kind, refused.text))
            self._waiting.remove(waiting)

    def withdraw(self, client: Client, stop: StopGroup) -> None:
        """The client shuts its group down before it could start."""
        for waiting in [w for w in self._waiting if w.client == client.incarnation and _concerns(stop, w.asked)]:
            self._waiting.remove(waiting)
            text = f"group {stop.group!r} was shut down while it waited for its hardware"
            self._emit(Refuse(waiting.peer, waiting.id, IN_USE, text))

    def refuse_all(self, text: str) -> None:
        """None of them will start any more."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._emit(Refuse(one.peer, one.id, "usage", text))

    def next_deadline(self) -> float:
        """When the next one's time is over, infinity for never."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)


@dataclass(frozen=True)
class _Find:
    client: str
    peer: bytes
    id: int
    asked: FindGroup
    deadline: float


class WaitingFinds:
    """Looks at groups whose launch is on the way; arguments as of WaitingLaunches, with *find* for *launch*."""

    def __init__(
        self,
        emit: Emit,
        clients: ClientTable,
        find: Callable[[Client, FindGroup], Launched],
        dropped: Callable[[bytes, int], None],
    ) -> None:
        self._emit = emit
        self._clients = clients
        self._find = find
        self._dropped = dropped
        self._waiting: list[_Find] = []

    def add(self, client: Client, peer: bytes, id: int, asked: FindGroup, now: float) -> None:
        """Persist a look for as long as it may wait."""
        for again in [w for w in self._waiting if (w.client, w.asked) == (client.incarnation, asked)]:
            self._waiting.remove(again)
            self._dropped(again.peer, again.id)
        self._waiting.append(_Find(client.incarnation, peer, id, asked, now + asked.wait_s))

    def launched(self, key: tuple[str, str]) -> None:
        """Answer those that wait for the group of this namespace and name."""
        self._answer([w for w in self._waiting if (w.asked.namespace, w.asked.group) == key], last=False)

    def tick(self, now: float) -> None:
        """Answer those whose time is over."""
        self._answer([w for w in self._waiting if now >= w.deadline], last=True)

    def next_deadline(self) -> float:
        """When the next one's time is over, infinity for never."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)

    def _answer(self, due: list[_Find], last: bool) -> None:
        for one in due:
            client = self._clients.get(one.client)
            try:
                if client is not None:
                    self._emit(Answer(one.peer, one.id, self._find(client, one.asked)))
            except Refusal as refused:
                if not last:
                    continue  # it is a namesake
                self._emit(Refuse(one.peer, one.id, refused.kind, refused.text))
            self._waiting.remove(one)


def _concerns(stop: StopGroup, asked: Launch) -> bool:
    """Whether it is this launch that is to stop, and not a namesake's."""
    same = not stop.workers or any(spec.id in stop.workers for spec in asked.workers)
    return stop.group == asked.group and same


class Launches:
    """The clients' side of the groups.

    Args:
        timing: the head's timers.
        emit: takes commands.
        nodes, clients, groups: the tables.
        allow: raises Refusal for a launch that must not be now, whenever it was asked for.
        dropped: see WaitingLaunches.
        embedded: whether this cluster is a driver's own.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        nodes: NodeTable,
        clients: ClientTable,
        groups: GroupTable,
        allow: Callable[[Launch], None],
        dropped: Callable[[bytes, int], None],
        embedded: bool,
    ) -> None:
        self._embedded = embedded
        self._timing = timing
        self._emit = emit
        self._nodes = nodes
        self._clients = clients
        self._groups = groups
        self._allow = allow
        self._waiting = WaitingLaunches(emit, clients, self._launch, dropped)
        self._finds = WaitingFinds(emit, clients, self._find, dropped)

    def launch(self, client: Client, peer: bytes, id: int, asked: Launch, now: float) -> Launched | None:
        """Reserve the name and start the workers; None: answered later, once the hardware is free.

        Raises:
            Refusal: the name is taken, a node is not there, a robot is in use, or the request makes no sense.
        """
        try:
            return self._launch(client, asked, now)
        except Refusal as refused:
            patience_s = max(asked.wait_s, self._groups.claims.settled - now)
            if refused.kind != IN_USE or patience_s <= 0:
                raise
            self._groups.retry = self._groups.retry or now < self._groups.claims.settled
            self._waiting.add(client, peer, id, asked, refused.text, patience_s, now)
            return None

    def _launch(self, client: Client, asked: Launch, now: float) -> Launched:
        own_namespace(client, asked.namespace)
        self._allow(asked)
        taken = self._groups.get(asked.namespace, asked.group)
        if taken is not None and not taken.launch.isdisjoint(spec.id for spec in asked.workers):
            return self._launch_again(taken, client, asked, now)
        if taken is not None and asked.get_if_exists and not taken.stopping and not taken.gone:
            return self._existing(taken, client, asked)
        if taken is not None and not self._groups.release(taken):
            raise Refusal(
                "name_in_use",
                f"a group named {asked.group!r} is {taken.summary} in namespace {asked.namespace!r}: "
                "give this one another name, or shut that one down first",
            )
        self._groups.names.check(asked.namespace, asked.group, now)
        by_rank = self._nodes.by_rank()
        check_launch(asked, lambda id: self._groups.of_worker(id) is not None, by_rank)
        if asked.outlives:
            check_outlives(asked, client, self._embedded, by_rank)
        self._groups.claims.check([claim for spec in asked.workers for claim in spec.claims], now)
        token = self._clients.token(asked.namespace)
        owner = (self._clients.driver_of(asked.namespace) if asked.detached else None) or client
        group = Group(asked.namespace, asked.group, asked.cls, owner.incarnation, asked.detail)
        if owner is not client:
            group.detached = True
            group.subscribers[client.incarnation] = None
        placed: dict[str, list[WorkerSpec]] = {}
        for spec in asked.workers:
            node = node_for(spec, by_rank)
            spec = msgspec.structs.replace(spec, token=token)
            placed.setdefault(node.id, []).append(spec)
            worker = WorkerRecord(spec, node.id, node.report.ip)
            self._groups.add(group, worker)
            self._groups.claims.take(group, worker, node, now)
        self._groups.enter(group)
        self._finds.launched(group.key)
        self._emit(of_group("group_launched", group, f"was launched: {group.cls}, ranks 0-{len(group.workers) - 1}"))
        for node_id, specs in placed.items():
            self._groups.start(node_id, group, specs)
        return Launched(group.state(token))

    def _launch_again(self, group: Group, client: Client, asked: Launch, now: float) -> Launched:
        """The answer to this launch was lost, with an earlier head or a connection: worker ids are a launch's own."""
        if group.stopping:
            raise Refusal("usage", f"group {group.name!r} is being stopped: launch it again when it has ended")
        check_workers(asked, lambda id: self._groups.of_worker(id) not in (None, group))
        by_rank, token = self._nodes.by_rank(), self._clients.token(asked.namespace)
        if client.incarnation != group.owner:
            group.subscribers[client.incarnation] = None
        try:
            wanted = [(node_for(spec, by_rank), spec) for spec in asked.workers if spec.id not in group.launch]
            self._groups.claims.check([claim for _, spec in wanted for claim in spec.claims], now, group)
        except Refusal as refused:
            if refused.kind != IN_USE or now >= self._groups.claims.settled:
                self._groups.stop_group(group, "not all its nodes, or robots, were there after the head was restarted")
            raise
        for node, spec in wanted:
            spec = msgspec.structs.replace(spec, token=token)
            worker = WorkerRecord(spec, node.id, node.report.ip)
            self._groups.adopt(group, worker)
            self._groups.claims.take(group, worker, node, now)
            self._groups.start(node.id, group, [spec])
        return Launched(group.state(token))

    def _existing(self, group: Group, client: Client, asked: Launch) -> Launched:
        """The group of that name, which the launch takes instead of its own."""
        if group.cls.rpartition(":")[2] != asked.cls.rpartition(":")[2]:
            raise Refusal(
                "name_in_use",
                f"the group named {asked.group!r} in namespace {asked.namespace!r} is of class {group.cls}, and not of "
                f"{asked.cls}: give this one another name, or shut that one down first",
            )
        return self._find(client, FindGroup(asked.namespace, asked.group))

    def detach(self, client: Client, asked: Detach) -> Done:
        """A group that was constructed is given up by its owner.

        Raises:
            Refusal: it is not there, or not the client's.
        """
        own_namespace(client, asked.namespace)
        group = self._groups.get(asked.namespace, asked.group)
        if group is None or group.gone or group.launch.isdisjoint(map(rank_id, asked.workers)):
            raise Refusal("not_found", f"group {asked.group!r} has ended and cannot be detached")
        if group.stopping:
            raise Refusal("usage", f"group {asked.group!r} is being stopped and cannot be detached")
        if group.owner == client.incarnation:
            driver = self._clients.driver_of(asked.namespace) if client.role == "worker" else None
            self._groups.give_to(group, driver.incarnation if driver is not None else "")
        elif not group.detached:
            raise Refusal("usage", f"group {asked.group!r} belongs to another client, which alone can detach it")
        group.subscribers[client.incarnation] = None
        return Done()

    def find(self, client: Client, peer: bytes, id: int, asked: FindGroup, now: float) -> Launched | None:
        """Describe a group and subscribe to it; None: answered later, once it was launched.

        Raises:
            Refusal: there is none of that name.
        """
        own_namespace(client, asked.namespace)
        try:
            return self._find(client, asked)
        except Refusal:
            if asked.wait_s <= 0:
                raise
            self._finds.add(client, peer, id, asked, now)
            return None

    def _find(self, client: Client, asked: FindGroup) -> Launched:
        namespace, name = asked.namespace, asked.group
        group = self._groups.get(namespace, name)
        if group is not None and asked.launch and all(launch_of(id) != asked.launch for id in group.workers):
            raise Refusal(
                "not_found",
                f"the group {name!r} of namespace {namespace!r} that was asked for has ended, and another one has its "
                "name: get a handle of that by WorkerGroup.from_group_name",
            )
        if group is None:
            ended = self._groups.ended(namespace, name, self._clients.token(namespace)) if asked.ended else None
            if ended is not None and asked.launch in ("", *(launch_of(one.id) for one in ended.workers)):
                return Launched(ended)
            there = sorted(group.name for group in self._groups.all() if group.namespace == namespace)
            known = f"there are {', '.join(map(repr, there))}" if there else "there is none at all"
            raise Refusal("not_found", f"no group named {name!r} is running in namespace {namespace!r}; {known}")
        if client.incarnation != group.owner:
            group.subscribers[client.incarnation] = None
        state = group.state(self._clients.token(namespace))
        return Launched(msgspec.structs.replace(state, workers=[*state.workers, *_absent(group)]))

    def stop(self, client: Client, peer: bytes, id: int, asked: StopGroup) -> None:
        """Stop a group; answered when its workers are gone, at once if there is none of that name, or a namesake."""
        own_namespace(client, asked.namespace)
        self._waiting.withdraw(client, asked)
        group = self._groups.get(asked.namespace, asked.group)
        if group is None or (asked.workers and group.launch.isdisjoint(map(rank_id, asked.workers))):
            self._emit(Answer(peer, id, Done()))
            return
        group.waiting.append((peer, id))
        self._groups.stop(group, asked.grace_s)

    def end(self, peer: bytes, id: int, asked: EndGroup) -> None:
        """End a group for a person; answered when its workers are gone.

        Raises:
            Refusal: there is none of that name.
        """
        group = self._groups.get(asked.namespace, asked.group)
        if group is None:
            raise Refusal("not_found", f"there is no group {asked.group!r} in namespace {asked.namespace!r}")
        if self._groups.release(group):
            self._emit(Answer(peer, id, Done()))
            return
        group.waiting.append((peer, id))
        self._groups.stop(group, asked.grace_s, f"{asked.by} ended it: {asked.reason or 'no reason was given'}")

    def stop_all(self) -> None:
        """Stop every group: the cluster ends."""
        self._waiting.refuse_all("the cluster is being stopped")
        self._finds.tick(math.inf)
        for group in self._groups.all():
            self._groups.stop(group, self._timing.stop_grace_s)

    def tick(self, now: float) -> None:
        """Launch what waited for hardware that is free by now."""
        freed = self._groups.claims.tick(now)
        if self._groups.retry and now >= self._groups.claims.settled:
            freed, self._groups.retry = True, False
        self._waiting.tick(freed, now)
        self._finds.tick(now)

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        claims = self._groups.claims
        settled = claims.settled if self._groups.retry else math.inf
        return min(claims.next_deadline(), self._waiting.next_deadline(), self._finds.next_deadline(), settled)


def _absent(group: Group) -> list[WorkerState]:
    """The ranks that a restarted head knows of by their number alone: their owner has not come back to tell of them."""
    known = group.ranks
    exit = ExitReport("node_lost", reason=NOBODY_HAS_IT)
    return [
        WorkerState("", rank, -1, "unknown", "gone", exit=exit) for rank in range(group.world_size) if rank not in known
    ]
