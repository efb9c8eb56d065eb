"""Leases of robot workers, and the emergency stop. Pure.

An agentd renews the leases of its robot workers whenever the head answers its heartbeat. The head ends a lease sooner
if the owner of the group is silent, or if a person triggers an emergency stop. If an agentd is silent for one lease,
its robot workers must have lost their leases: the head reports them to their owners as lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head import commands
from rlinf_actors.head.event_log import of_group, of_worker
from rlinf_actors.head.records import Client, Group, Node, WorkerRecord
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.wire.client_messages import EStop, EStopped, Launch
from rlinf_actors.wire.endings import LEFT
from rlinf_actors.wire.template_protocol import ROBOT_END_S
from rlinf_actors.wire.values import RobotStop

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

OWNER_PART = 0.8
"""Fraction of the robot lease for which an owner keeps its robots after the last message that it confirmed.

Like the workers' own guard, which acts at the same fraction, this ends 0.4 s before a lease of 2 s. An owner of robots
sends eight heartbeats in one lease (runtime.head_session.OWNER_BEATS), and each confirms the head's last message.
"""
ALL = "*"
"""Key of the emergency stop of every namespace; no namespace has that name."""
STOP_NOT_KEPT = (
    "the robots were told to stop and none may start, but the head could not write that down: one that is restarted "
    "will not know of it. Its log and `rlinf-actors status` say why"
)
RELEASE_NOT_KEPT = (
    "the emergency stop is released, but the head could not write that down: one that is restarted will stop the "
    "robots again. Its log and `rlinf-actors status` say why"
)


class _OwnerWatch(msgspec.Struct, eq=False):
    """What the head knows of the owner of a group with robots. All times are monotonic seconds.

    Attributes:
        owner_missing_since: when the head first noticed that the owner has no session; None while it has a session.
        began: when the head first saw this group while its owner had a session; None before.
    """

    group: Group
    owner_missing_since: float | None = None
    began: float | None = None
    timer: HeapTimer | None = None


class RobotTable:
    """The leases of groups with robot workers, and the emergency stops in force. Stops groups that lose their lease.

    Attributes:
        left: by id, the robot workers that have ended but left a process that could not be killed and may move a robot.
    """

    def __init__(self, head: Coordinator, before: commands.Snapshot) -> None:
        self._head = head
        self._lease_s = head.timing.robot_lease_s
        self._watches: dict[tuple[str, str], _OwnerWatch] = {}
        self._stops = dict(before.stops)
        self._unreported = {node.report.node_id for node in before.nodes}  # they may have robot workers
        self.left: dict[str, WorkerRecord] = {}
        self._waiting: dict[tuple[bytes, int], tuple[str, float]] = {}  # requests, by key and the end of the wait

    # --- silence ---

    def owner_changed(self, incarnation: str) -> None:
        """Compute the leases of this client's groups anew at the next flush.

        Called when the client has reconnected, or when another set of agentds watches it.
        """
        for group in self._head.groups.of_owner(incarnation):
            self._head.groups.robots_changed[group.key] = group

    def flush(self) -> None:
        """Schedule the end of the lease of each group whose robot workers or owner have changed since last time."""
        changed, self._head.groups.robots_changed = self._head.groups.robots_changed, {}
        for group in changed.values():
            watch = self._watches.get(group.key)
            if watch is not None and watch.group is not group:
                self._forget(watch)
                watch = None
            if group.living and self._robots(group):
                self._arm(watch or self._watches.setdefault(group.key, _OwnerWatch(group)))
            elif watch is not None:
                self._forget(watch)
        for (peer, id), (key, until) in list(self._waiting.items()):
            answer = self._unconfirmed(key)
            if not answer.hits or self._head.now >= until:
                del self._waiting[peer, id]
                self._head.emit(commands.Answer(peer, id, answer))

    def stalled(self, seconds: float) -> None:
        for watch in self._watches.values():
            if watch.owner_missing_since is not None:
                watch.owner_missing_since += seconds
            if watch.began is not None:
                watch.began += seconds

    def _forget(self, watch: _OwnerWatch) -> None:
        self._head.timers.cancel(watch.timer)
        del self._watches[watch.group.key]

    def _arm(self, watch: _OwnerWatch) -> None:
        self._head.timers.cancel(watch.timer)
        group = watch.group
        nodes = (self._head.nodes.get(worker.node_id) for worker in self._robots(group))
        times = [node.last_seen + self._lease_s for node in nodes if node is not None]
        if not group.stopping:
            times.append(self._owned_until(watch))
        watch.timer = self._head.timers.at(min(times), lambda: self._time_passed(watch)) if times else None

    def _time_passed(self, watch: _OwnerWatch) -> None:
        """If the group's owner is silent, stop the group. Declare each robot worker lost whose agentd is silent."""
        group, now = watch.group, self._head.now
        if not group.stopping and now >= self._owned_until(watch):
            why = self._silence(watch)
            self._head.emit(of_group("lease_lost", group, f"loses its robots: {why}"))
            self._head.groups.stop_group(group, why)
        for worker in self._robots(group):
            node = self._head.nodes.get(worker.node_id)
            if node is not None and now >= node.last_seen + self._lease_s:
                silent = now - node.last_seen
                why = f"its agentd was silent for {silent:.1f} s, and so the lease of {titles(worker)} is over"
                name = self._head.nodes.named(node.id)
                self._head.emit(of_worker("lease_lost", worker, name, f"loses its robots: {why}"))
                self._head.groups.lose(worker, node, f"node {node.name}: {why}")
        self._head.groups.robots_changed[group.key] = group

    def _owned_until(self, watch: _OwnerWatch) -> float:
        """Return the time at which the group loses its robots unless the head hears from its owner before."""
        client, now = self._head.clients.get(watch.group.owner), self._head.now
        if client is None:  # a restarted head waits for its return
            if watch.owner_missing_since is None:
                watch.owner_missing_since = now
            return watch.owner_missing_since + self._lease_s
        watch.owner_missing_since = None
        if watch.began is None:
            watch.began = now
        in_touch = max(client.answered, watch.began)
        # an agentd with robots beats twice as often as others, and loses its own leases after OWNER_PART too
        part = OWNER_PART if client.worker_id else 1.0
        vouched = [node.last_seen + part * self._lease_s for node in self._watchers(watch.group, client)]
        until = max(in_touch + OWNER_PART * self._lease_s, *vouched, 0.0)
        launcher = self._launcher(client)
        node = self._head.nodes.get(launcher.node_id) if launcher is not None and launcher.spec.claims else None
        return min(until, node.last_seen + part * self._lease_s) if node is not None else until  # it has a lease itself

    def _watchers(self, group: Group, owner: Client) -> list[Node]:
        """Return the nodes whose agentds watch the owner's process, and so vouch for the owner while it is silent.

        Return none if a robot worker demands that the owner itself answers.
        """
        if any(self._must_answer(worker, owner) for worker in self._robots(group)):
            return []
        launcher = self._launcher(owner)
        own = [launcher.node_id] if launcher is not None else []
        return [node for node in map(self._head.nodes.get, [*owner.watchers, *own]) if node is not None]

    def _launcher(self, owner: Client) -> WorkerRecord | None:
        group = self._head.groups.of_worker(owner.worker_id)
        return group.workers[owner.worker_id] if group is not None else None

    def _must_answer(self, worker: WorkerRecord, owner: Client) -> bool:
        node = self._head.nodes.get(worker.node_id)
        elsewhere = node is None or node.report.host != owner.host
        return worker.spec.owner_must_answer == "always" or (worker.spec.owner_must_answer == "elsewhere" and elsewhere)

    def _silence(self, watch: _OwnerWatch) -> str:
        client, now = self._head.clients.get(watch.group.owner), self._head.now
        if client is None:
            assert watch.owner_missing_since is not None  # `_owned_until` has just set it
            return f"its owner was silent for {now - watch.owner_missing_since:.1f} s"
        if client.last_seen - client.answered > self._lease_s / 2:
            return f"its owner did not hear the head for {now - client.answered:.1f} s: the network from here is cut"
        seen = max([client.last_seen, *(node.last_seen for node in self._watchers(watch.group, client))])
        who = "its owner, or the agentd of that robot worker," if client.worker_id else "its owner"
        return f"{who} was silent for {now - seen:.1f} s"

    def _robot_groups(self) -> Iterator[Group]:
        return (group for group in self._head.groups.with_robots() if self._robots(group))

    def _robots(self, group: Group) -> list[WorkerRecord]:
        return [worker for id, worker in sorted(group.robots.items()) if id in group.living]

    # --- the emergency stop ---

    def estop(self, event: commands.RequestReceived, asked: EStop) -> None:
        """Stop all robots, or the robots of one namespace; or release an emergency stop.

        The orders to stop go out at once; the request is answered when the change is on disk. A request that waits is
        answered by `flush`.
        """
        key = ALL if asked.namespace is None else asked.namespace
        if asked.wait:
            until = self._head.now + self._unconfirmed(key).wait_s
            self._waiting[event.peer, event.id] = key, until
            self._head.timers.at(until, lambda: None)
            return
        change: commands.Change
        if asked.release:
            answer, change, warning = self._release(key, asked), commands.StopReleased(key), RELEASE_NOT_KEPT
        else:
            answer, change, warning = (
                self._press(key, asked),
                commands.StopPressed(key, self._stops[key]),
                STOP_NOT_KEPT,
            )
        answers = (commands.Answer(event.peer, event.id, replace(answer, warning=text)) for text in ("", warning))
        self._head.emit(commands.Persist(change, *answers))

    def _release(self, key: str, asked: EStop) -> EStopped:
        released = self._stops.pop(key, "")
        for worker in self._may_run(key):
            self.left.pop(worker.id, None)  # a person has looked
        self._head.groups.claims.expire()
        text = f"{asked.by} released the emergency stop: {released or 'there was none'}"
        self._head.emit(commands.LogEvent("estop_released", text, namespace=asked.namespace or ""))
        return EStopped([], self.stopped(), lifted=released)

    def _press(self, key: str, asked: EStop) -> EStopped:
        if not self._knows(key):
            jobs = ", ".join(sorted({group.namespace for group in self._robot_groups()}))
            raise commands.Refused("not_found", f"it has no job {key!r}; jobs with robots: {jobs or 'none'}")
        where = f"job {asked.namespace!r}" if asked.namespace is not None else "all jobs"
        because = f": {asked.reason}" if asked.reason else ""
        reason = f"emergency stop by {asked.by}{because}"
        self._stops.setdefault(key, f"{reason} ({where})")
        self._head.emit(commands.LogEvent("estop", f"{reason} ({where})", namespace=asked.namespace or ""))
        self._head.launches.retry_waiting()  # launches that wait for a robot are refused at once
        answer, workers = self._unconfirmed(key), self._may_run(key)
        self._head.groups.stop_workers([worker for worker in workers if not worker.gone], 0.0, reason)
        return replace(answer, stopped=self.stopped())

    def _may_run(self, key: str) -> list[WorkerRecord]:
        """Return the robot workers of a job, or of all jobs, whose end no node has confirmed."""
        living = (worker for group in self._robot_groups() for worker in self._robots(group))
        all = {one.id: one for one in (*living, *self._head.groups.claims.workers.values(), *self.left.values())}
        return [worker for worker in all.values() if key in (ALL, worker.spec.namespace)]

    def _unconfirmed(self, key: str) -> EStopped:
        """Return the robot workers of a job, or of all jobs, that are not certain to have ended."""
        hits, wait_s, now, nodes = [], 0.0, self._head.now, self._head.nodes
        for worker in self._may_run(key):
            node, spec = nodes.known(worker.node_id), worker.spec
            lease_s = max(0.0, node.last_seen + self._lease_s - now) if node is not None else 0.0
            wait_s = max(wait_s, lease_s + ROBOT_END_S)
            robots = [claim.title for claim in spec.claims]
            name = node.name if node is not None else worker.node_ip
            reached = not worker.gone and lease_s > self._lease_s / 2
            why = worker.exit.reason if worker.gone and worker.exit is not None else ""
            why = LEFT if worker.id in self.left else why
            hits.append(RobotStop(f"{spec.group}:{spec.rank}", spec.namespace, robots, name, reached, lease_s, why))
        for node in filter(None, map(nodes.known, sorted(self._unreported))):
            lease_s = max(0.0, self._head.started_at + self._lease_s - now)
            wait_s = max(wait_s, self._head.started_at + self._head.timing.patience_s - now)
            hits.append(RobotStop("", "", [], node.name, False, lease_s))
        return EStopped(hits, self.stopped(), wait_s=wait_s)

    def _knows(self, key: str) -> bool:
        """Return True if the job *key* is there, or may be on a node that has not come back to a restarted head."""
        groups = self._head.groups.of_job(key)
        return key in (ALL, *self._stops) or key in self._head.jobs or bool(groups or self._unconfirmed(key).hits)

    def stopped(self) -> list[str]:
        """Return one line of text for each emergency stop in force, with the command that releases it."""
        return [f"{text}; lift it with {_release_of(key)}" for key, text in self._stops.items()]

    def check(self, asked: Launch) -> None:
        """Raise Refused if the launch uses robots and an emergency stop is in force for its namespace."""
        stop = self.in_force(asked.namespace)
        robots = sorted({claim.title for spec in asked.workers for claim in spec.claims}) if stop else []
        if robots:
            lift = _release_of(ALL if ALL in self._stops else asked.namespace)
            raise commands.Refused(
                "emergency_stop",
                f"group {asked.group!r} uses {', '.join(robots)}, and robots are stopped: {stop}. When it is safe, "
                f"release it with {lift}",
            )

    def node_back(self, node: Node) -> None:
        """If an emergency stop is in force for robot workers of a reconnected node, order them to stop again.

        The first order may have been lost with the previous connection.
        """
        self._unreported.discard(node.id)
        for group, workers in self._head.groups.on_node(node.id) if self._stops else ():
            stop, robots = self.in_force(group.namespace), [worker for worker in workers if worker.spec.claims]
            if stop and robots:
                self._head.groups.stop_workers(robots, 0.0, stop)

    def in_force(self, namespace: str) -> str:
        """Return the text of the emergency stop in force for a job, "" without one."""
        return self._stops.get(ALL) or self._stops.get(namespace, "")


def _release_of(key: str) -> str:
    return f"`rlinf-actors estop --release{'' if key == ALL else f' --job {key}'}`"


def titles(worker: WorkerRecord) -> str:
    return ", ".join(claim.title for claim in worker.spec.claims)
