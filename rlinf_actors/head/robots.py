"""Robot workers: whose lease is over because of whom, and the emergency stop. Pure.

Agents renew the leases of their robot workers themselves, by the head's answers to their beats. The
head ends one sooner where nobody vouches for the owner any more, or somebody presses the emergency
stop; and it tells the owner of those that must have ended unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import (
    Answer,
    Emit,
    LogEvent,
    Persist,
    Refusal,
    Snapshot,
    StopPressed,
    StopReleased,
    Timing,
)
from rlinf_actors.head.event_log import of_group, of_worker
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.records import Client, Group, Node, NodeLife, WorkerRecord
from rlinf_actors.head.validation import check_names
from rlinf_actors.wire.client_messages import EStop, EStopped, Launch
from rlinf_actors.wire.values import RobotStop

OWNER_PART = 0.8
"""Part of the robot lease after which an owner that is out of touch loses its robots: 1.6 s of 2 s, as the guard of a
worker without renewals acts. It answers eight times in the lease, and an answer is known with the one after it.
"""
ALL = "*"
"""Key of the emergency stop of every namespace; none is called that."""
MAX_STOPS = 1000
"""Namespaces of which the robots are stopped: these are kept, in the head's file too, until somebody releases them."""
STOP_NOT_KEPT = (
    "the robots were told to stop and none may start, but the head could not write that down: one that is restarted "
    "will not know of it. Its log and `rlinf-actors status` say why"
)
RELEASE_NOT_KEPT = (
    "the emergency stop is released, but the head could not write that down: one that is restarted will stop the "
    "robots again. Its log and `rlinf-actors status` say why"
)


class RobotTable:
    """What is special about groups with claims.

    Args:
        timing: the head's timers.
        emit: takes commands.
        nodes, clients, groups: the other tables.
        before: what an earlier head at this place knew: an emergency stop is in force until it is released.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        nodes: NodeTable,
        clients: ClientTable,
        groups: GroupTable,
        before: Snapshot,
    ) -> None:
        self._lease_s = timing.robot_lease_s
        self._emit = emit
        self._nodes = nodes
        self._clients = clients
        self._groups = groups
        self._unvouched: dict[tuple[str, str], float] = {}
        self._began: dict[tuple[str, str], float] = {}
        self._stops = dict(before.stops)

    # --- silence ---

    def tick(self, now: float) -> None:
        """Time has passed: end what nobody vouches for, and tell of what has ended where we cannot see."""
        groups = list(self._robot_groups())
        known = {group.key for group in groups}
        self._unvouched = {key: at for key, at in self._unvouched.items() if key in known}
        self._began = {key: at for key, at in self._began.items() if key in known}
        for group in groups:
            if not group.stopping and now >= self._owned_until(group, now):
                why = self._silence(group, now)
                self._emit(of_group("lease_lost", group, f"loses its robots: {why}"))
                self._groups.stop_group(group, why)
            for worker in self._robots(group):
                node = self._nodes.get(worker.node_id)
                if node is not None and now >= node.last_seen + self._lease_s:
                    silent = now - node.last_seen
                    why = f"its agentd was silent for {silent:.1f} s, and so the lease of {titles(worker)} is over"
                    self._emit(of_worker("lease_lost", worker, node.report.hostname, f"loses its robots: {why}"))
                    self._groups.lose(worker, node, f"node {node.name}: {why}", now)

    def stalled(self, seconds: float) -> None:
        """The head stood still: nobody was silent."""
        self._unvouched = {key: at + seconds for key, at in self._unvouched.items()}
        self._began = {key: at + seconds for key, at in self._began.items()}

    def next_deadline(self, now: float) -> float:
        """When `tick` has something to do, infinity for never."""
        times = [math.inf]
        for group in self._robot_groups():
            if not group.stopping:
                times.append(self._owned_until(group, now))
            nodes = (self._nodes.get(worker.node_id) for worker in self._robots(group))
            times += [node.last_seen + self._lease_s for node in nodes if node is not None]
        return min(times)

    def _owned_until(self, group: Group, now: float) -> float:
        """When the owner loses the group's robots if nothing more is heard."""
        client = self._clients.get(group.owner)
        if client is None:  # a restarted head waits for its return
            return self._unvouched.setdefault(group.key, now) + self._lease_s
        self._unvouched.pop(group.key, None)
        in_touch = max(client.answered, self._began.setdefault(group.key, now))
        watchers = [node.last_seen for node in self._watchers(group, client)]
        return max(in_touch + OWNER_PART * self._lease_s, *(seen + self._lease_s for seen in watchers), 0.0)

    def _watchers(self, group: Group, owner: Client) -> list[Node]:
        """The nodes whose agents see the owner's process, if that suffices to keep the robots."""
        if any(self._must_answer(worker, owner) for worker in self._robots(group)):
            return []
        return [node for node in map(self._nodes.get, owner.watchers) if node is not None]

    def _must_answer(self, worker: WorkerRecord, owner: Client) -> bool:
        node = self._nodes.get(worker.node_id)
        elsewhere = node is None or node.report.host != owner.host
        return worker.spec.owner_must_answer == "always" or (worker.spec.owner_must_answer == "elsewhere" and elsewhere)

    def _silence(self, group: Group, now: float) -> str:
        client = self._clients.get(group.owner)
        if client is None:
            return f"its owner was silent for {now - self._unvouched[group.key]:.1f} s"
        if client.last_seen - client.answered > self._lease_s / 2:
            return f"its owner did not hear the head for {now - client.answered:.1f} s: the network from here is cut"
        seen = max([client.last_seen, *(node.last_seen for node in self._watchers(group, client))])
        return f"its owner was silent for {now - seen:.1f} s"

    def _robot_groups(self) -> Iterator[Group]:
        return (group for group in self._groups.with_robots() if self._robots(group))

    def _robots(self, group: Group) -> list[WorkerRecord]:
        return [group.workers[id] for id in sorted(group.living) if group.workers[id].spec.claims]

    # --- the emergency stop ---

    def estop(self, peer: bytes, id: int, asked: EStop) -> None:
        """Stop the robots of a namespace, or all, at once; or allow them again. Answered when that is durable.

        Raises:
            Refusal: more namespaces than there can be are stopped one by one.
        """
        key = asked.namespace if asked.namespace is not None else ALL
        answer = self._released(asked) if asked.release else self._pressed(asked)
        change = StopReleased(key) if asked.release else StopPressed(key, self._stops[key])
        failed = msgspec.structs.replace(answer, warning=RELEASE_NOT_KEPT if asked.release else STOP_NOT_KEPT)
        self._emit(Persist(change, Answer(peer, id, answer), Answer(peer, id, failed)))

    def _released(self, asked: EStop) -> EStopped:
        key = asked.namespace if asked.namespace is not None else ALL
        released = self._stops.pop(key, None)
        text = f"{asked.by} released the emergency stop: {released or 'there was none'}"
        self._emit(LogEvent("estop_released", text, namespace=asked.namespace or ""))
        return EStopped([], self.stopped(), lifted=released or "")

    def _pressed(self, asked: EStop) -> EStopped:
        key = asked.namespace if asked.namespace is not None else ALL
        check_names(namespace=key)
        if len(self._stops) >= MAX_STOPS and key not in (ALL, *self._stops):
            raise Refusal("usage", f"emergency stops of {MAX_STOPS} namespaces are in force: stop all robots instead")
        where = f"namespace {asked.namespace!r}" if asked.namespace is not None else "all namespaces"
        because = f": {asked.reason}" if asked.reason else ""
        self._stops.setdefault(key, f"emergency stop by {asked.by}{because} ({where})")
        self._emit(
            LogEvent("estop", f"emergency stop by {asked.by}{because} ({where})", namespace=asked.namespace or "")
        )
        self._groups.retry_waiting()  # none of them may start: they are refused now, and not when a robot is free
        reason = f"emergency stop by {asked.by}{because}"
        return EStopped(self._stop(lambda worker: key in (ALL, worker.spec.namespace), reason), self.stopped())

    def stopped(self) -> list[str]:
        """The emergency stops in force, a line each."""
        return list(self._stops.values())

    def check(self, asked: Launch) -> None:
        """Refuse a launch that an emergency stop forbids.

        Raises:
            Refusal: says whose stop it is, and how it is lifted.
        """
        robots = sorted({claim.title for spec in asked.workers for claim in spec.claims})
        stop = self._in_force(asked.namespace)
        if robots and stop:
            option = "" if ALL in self._stops else f" --namespace {asked.namespace}"
            raise Refusal(
                "emergency_stop",
                f"group {asked.group!r} uses {', '.join(robots)}, and robots are stopped: {stop}. When it is safe, "
                f"release it with `rlinf-actors estop --release{option}`",
            )

    def node_back(self, node: Node) -> None:
        """An agent said hello: its robot workers may not have heard of an emergency stop."""
        for namespace in {group.namespace for group in self._robot_groups()}:
            stop = self._in_force(namespace)
            if stop:
                self._stop(lambda worker: worker.node_id == node.id and worker.spec.namespace == namespace, stop)  # noqa: B023

    def _in_force(self, namespace: str) -> str:
        return self._stops.get(ALL) or self._stops.get(namespace, "")

    def _stop(self, chosen: Callable[[WorkerRecord], bool], reason: str) -> list[RobotStop]:
        hits = []
        for group in list(self._robot_groups()):
            robots = [worker for worker in self._robots(group) if chosen(worker)]
            self._groups.stop_workers(robots, 0.0, reason)
            for worker in robots:
                node = self._nodes.get(worker.node_id)
                hits.append(
                    RobotStop(
                        f"{group.name}:{worker.spec.rank}",
                        group.namespace,
                        [claim.title for claim in worker.spec.claims],
                        node.name if node is not None else worker.node_ip,
                        node is not None and node.life is not NodeLife.SUSPECT,
                    )
                )
        return hits


def titles(worker: WorkerRecord) -> str:
    """The robots of a worker, for people."""
    return ", ".join(claim.title for claim in worker.spec.claims)
