"""The workers, unacknowledged ends and robot lease in agentd's state (node_state). Pure; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from rlinf_actors.wire.agent_messages import StartWorkers, WorkerExited, WorkerReady, WorkersHealth
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES
from rlinf_actors.wire.values import RunningWorker, WorkerHealth, WorkerSpec

EXITS_KEPT = 4096  # how many exit reports agentd keeps until the head acknowledges them
MAX_LISTED = MAX_ASKED_BYTES - (2 << 20)  # bytes of the workers in a hello, which also describes the node
BEATS = 4  # beats in one robot lease: three of them may be late


class WorkerTable:
    """The part of agentd's state that holds its workers, their health, and the exit reports that the head may not have.
    `running` has the workers that have not ended, by id.
    """

    def __init__(self) -> None:
        self.running: dict[str, RunningWorker] = {}
        self._ended: dict[str, RunningWorker] = {}  # whose ends the head may not know
        self._sent_at: dict[str, float] = {}  # when an end was sent at the latest
        self._health: dict[str, tuple[WorkerHealth, float]] = {}

    def listed(self) -> list[RunningWorker]:
        """Return the workers that agentd lists in a hello: those that run, and those that have ended and whose exit
        reports the head may not have. The first worker of a group alone has the group's description, which is long.
        """
        listed, described = [], set()
        for worker in (*self.running.values(), *self._ended.values()):
            key = (worker.spec.namespace, worker.spec.group, worker.detail)
            listed.append(msgspec.structs.replace(worker, detail="") if key in described else worker)
            described.add(key)
        return listed

    def adopt(self, workers: Iterable[RunningWorker]) -> None:
        for worker in workers:
            (self.running if worker.exit is None else self._ended)[worker.spec.id] = worker

    def add(self, order: StartWorkers) -> list[WorkerSpec]:
        """Add the workers of a start order to the running workers, except those that are known already. Return the
        added workers.
        """
        specs = [spec for spec in order.workers if spec.id not in self.running and spec.id not in self._ended]
        for spec in specs:
            self.running[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return specs

    def change_owner(self, order: StartWorkers) -> list[WorkerSpec]:
        """If the order is for a detached group, give those of its workers that run already to the order's owner. If
        the group was resized, store the specs of these workers. Return the specs of the workers that changed.
        """
        changed = []
        for spec in order.workers:
            known = self.running.get(spec.id)
            if known is None:
                continue
            new = msgspec.structs.replace(known, owner=order.owner, detached=True) if order.detached else known
            if spec.resizes > known.spec.resizes:
                new = msgspec.structs.replace(new, spec=spec, detail=order.detail)
            if new != known:
                self.running[spec.id] = new
                changed.append(new.spec)
        return changed

    def ends_among(self, order: StartWorkers) -> list[WorkerExited]:
        """Return the exit reports of those workers of a start order that have ended already."""
        ended = [self._ended[spec.id] for spec in order.workers if spec.id in self._ended]
        return [WorkerExited(one.spec.id, one.exit) for one in ended if one.exit is not None]

    def owned_by(self, client: str) -> list[str]:
        """Return the ids of the running workers that must end when *client* ends. Workers of detached groups are left
        out.
        """
        return [id for id, worker in self.running.items() if worker.owner == client and not worker.detached]

    def ready(self, report: WorkerReady) -> None:
        if report.id in self.running:
            self.running[report.id] = msgspec.structs.replace(
                self.running[report.id],
                pid=report.pid,
                endpoint=report.endpoint,
                port=report.port,
                master_port=report.master_port,
            )

    def end(self, report: WorkerExited, keep: bool) -> list[str]:
        """Remove an ended worker from the running workers; keep its exit report for the head if *keep*. Return the ids
        of the workers whose exit reports are dropped: this one if not *keep*, or the oldest if too many are kept.
        """
        known = self.running.pop(report.id, None)
        self._health.pop(report.id, None)
        if known is None:
            return []
        if not keep:
            return [report.id]
        self._ended[report.id] = msgspec.structs.replace(known, exit=report.exit)
        return self._forget([next(iter(self._ended))]) if len(self._ended) > EXITS_KEPT else []

    def forget_ends(self) -> list[str]:
        """Drop all exit reports that are kept for the head. Return the ids of their workers."""
        return self._forget(list(self._ended))

    def beat_sent(self, now: float) -> None:
        """Record that a beat was sent at time *now*. An answer to this beat acknowledges all exit reports that were
        sent before.
        """
        for id in self._ended:
            self._sent_at.setdefault(id, now)

    def beat_answered(self, at: float) -> list[str]:
        """Record that the head answered the beat of time *at*. Drop the exit reports that were sent before that beat,
        and return the ids of their workers.
        """
        return self._forget([id for id, sent in self._sent_at.items() if sent <= at])

    def _forget(self, ids: Iterable[str]) -> list[str]:
        forgotten = []
        for id in ids:
            self._sent_at.pop(id, None)
            if self._ended.pop(id, None) is not None:
                forgotten.append(id)
        return forgotten

    def note_health(self, report: WorkersHealth, now: float, joined: bool) -> None:
        """Keep the health of workers in *report* for the next registration with a head. An unresponsive worker and a
        long call are always kept. Other health is kept only while this node is not registered (*joined* is false),
        because a head with which it is registered gets the report at once.
        """
        for one in report.workers:
            self._health.pop(one.id, None)
            if _is_notable(one) or not joined:
                self._health[one.id] = (one, now)

    def registered(self, now: float) -> WorkersHealth | None:
        """Record that the head has registered this node: exit reports that were sent before are unacknowledged again.
        Return the recorded health of workers to send to this head, or None if none is recorded.
        """
        self._sent_at = {}
        health = [msgspec.structs.replace(one, for_s=one.for_s + now - at) for one, at in self._health.values()]
        self._health = {id: noted for id, noted in self._health.items() if _is_notable(noted[0])}
        return WorkersHealth(health) if health else None


def fitted(workers: list[RunningWorker]) -> tuple[list[RunningWorker], list[str]]:
    """Return *workers*, which a hello lists, in at most MAX_LISTED bytes, and the namespaces that had to be shortened.

    A hello that is too long for the head would cost all jobs of the node. So the jobs with most bytes are listed
    without environments, descriptions and texts; the head restarts none of their workers.
    """
    jobs: dict[str, list[int]] = {}
    sizes = [len(msgspec.msgpack.encode(worker)) for worker in workers]
    for index, worker in enumerate(workers):
        jobs.setdefault(worker.spec.namespace, []).append(index)
    left, fitting, shortened = sum(sizes), list(workers), list[str]()
    for job, its in sorted(jobs.items(), key=lambda item: -sum(sizes[index] for index in item[1])):
        if left <= MAX_LISTED:
            break
        for index in its:
            fitting[index] = _shortened(workers[index])
            left += len(msgspec.msgpack.encode(fitting[index])) - sizes[index]
        shortened.append(job)
    return fitting, shortened


def _shortened(worker: RunningWorker) -> RunningWorker:
    spec = msgspec.structs.replace(
        worker.spec, env={}, restart=None, preload=(), sys_path=(), code_paths=(), profiler=None
    )
    exit = worker.exit
    if exit is not None:
        exit = msgspec.structs.replace(exit, stderr_tail=[], reason=exit.reason[:200])
    return msgspec.structs.replace(worker, spec=spec, detail="", exit=exit)


def _is_notable(one: WorkerHealth) -> bool:
    """Return True if the worker is unresponsive or runs a long call. A head assumes neither of a worker of which it has
    no report.
    """
    return bool(one.unresponsive or one.method)


class RobotLeases:
    """The lease of the robot workers of a node, which all of them share.

    It ends `lease_s` after agentd sent the last beat that the head answered. The time at which the answer arrived does
    not matter. A worker whose lease has expired never gets another.

    Attributes:
        lease_s: length of the lease, as the head's Welcome says.
        until: time at which the lease ends.
    """

    def __init__(self) -> None:
        self.lease_s = 2.0
        self.until = 0.0
        self._holders: set[str] = set()

    @property
    def beat_s(self) -> float:
        """Seconds between beats to the head that keep the robot lease alive; infinity without robot workers."""
        return self.lease_s / BEATS if self._holders else math.inf

    @property
    def deadline(self) -> float:
        """Time at which the robot lease expires; infinity without robot workers."""
        return self.until if self._holders else math.inf

    def started(self, id: str, now: float) -> None:
        """Add the robot worker *id*, which the head ordered to start. If less than half of the lease is left, extend
        the lease to its full length from *now*, since the order proves that the head is there.
        """
        if self.until < now + self.lease_s / 2:
            self.until = now + self.lease_s
        self._holders.add(id)

    def ended(self, id: str) -> None:
        self._holders.discard(id)

    def answered(self, at: float, now: float) -> bool:
        """Extend the robot lease, because the head answered the beat that was sent at time *at*. Return True if the
        lease got longer.
        """
        if not self._holders or not now < self.until < at + self.lease_s:
            return False  # too late: the holders are told to end
        self.until = at + self.lease_s
        return True

    def expired(self, now: float) -> list[str]:
        """If the robot lease has expired, remove all robot workers from it and return their ids. Otherwise return an
        empty list.
        """
        if now < self.deadline:
            return []
        lost, self._holders = sorted(self._holders), set()
        return lost
