"""The workers, unacknowledged ends and robot lease in agentd's state (node_state). Pure; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from rlinf_actors.wire.agent_messages import StartWorkers, WorkerExited, WorkerReady, WorkersHealth
from rlinf_actors.wire.values import RunningWorker, WorkerHealth, WorkerSpec

EXITS_KEPT = 4096  # how many exit reports agentd keeps until the head acknowledges them
BEATS = 4  # beats in one robot lease: three of them may be late


class WorkerTable:
    """The workers of one agentd. `running` has the workers that have not ended, by id."""

    def __init__(self) -> None:
        self.running: dict[str, RunningWorker] = {}
        self._ended: dict[str, RunningWorker] = {}  # whose ends the head may not know
        self._sent_at: dict[str, float] = {}  # when an end was sent at the latest
        self._health: dict[str, tuple[WorkerHealth, float]] = {}

    def listed(self) -> list[RunningWorker]:
        """Return the running workers, and the ended workers whose exit reports the head may not have."""
        return [*self.running.values(), *self._ended.values()]

    def adopt(self, workers: Iterable[RunningWorker]) -> None:
        for worker in workers:
            (self.running if worker.exit is None else self._ended)[worker.spec.id] = worker

    def add(self, order: StartWorkers) -> list[WorkerSpec]:
        """Add those workers of a start order that are not known yet, and return them."""
        specs = [spec for spec in order.workers if spec.id not in self.running and spec.id not in self._ended]
        for spec in specs:
            self.running[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return specs

    def change_owner(self, order: StartWorkers) -> list[WorkerSpec]:
        """Give running workers of a detached group to the order's owner. Return the workers that changed."""
        changed = []
        for spec in order.workers if order.detached else ():
            known = self.running.get(spec.id)
            if known is not None and (known.owner, known.detached) != (order.owner, True):
                self.running[spec.id] = msgspec.structs.replace(known, owner=order.owner, detached=True)
                changed.append(known.spec)
        return changed

    def ends_among(self, order: StartWorkers) -> list[WorkerExited]:
        """Return the exit reports of the order's workers that have ended already."""
        ended = [self._ended[spec.id] for spec in order.workers if spec.id in self._ended]
        return [WorkerExited(one.spec.id, one.exit) for one in ended if one.exit is not None]

    def owned_by(self, client: str) -> list[str]:
        """Return the ids of the running workers that must end with this client."""
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
        """Remove a running worker; keep its exit report if *keep*. Return the ids whose exit reports are dropped."""
        known = self.running.pop(report.id, None)
        self._health.pop(report.id, None)
        if known is None:
            return []
        if not keep:
            return [report.id]
        self._ended[report.id] = msgspec.structs.replace(known, exit=report.exit)
        return self._forget([next(iter(self._ended))]) if len(self._ended) > EXITS_KEPT else []

    def forget_ends(self) -> list[str]:
        """Drop all exit reports. Return the ids of their workers."""
        return self._forget(list(self._ended))

    def beat_sent(self, now: float) -> None:
        """Record that all exit reports so far were sent before the beat of time *now*."""
        for id in self._ended:
            self._sent_at.setdefault(id, now)

    def beat_answered(self, at: float) -> list[str]:
        """Drop the exit reports sent before the beat of time *at*, which the head has answered; return their ids."""
        return self._forget([id for id, sent in self._sent_at.items() if sent <= at])

    def _forget(self, ids: Iterable[str]) -> list[str]:
        forgotten = []
        for id in ids:
            self._sent_at.pop(id, None)
            if self._ended.pop(id, None) is not None:
                forgotten.append(id)
        return forgotten

    def note_health(self, report: WorkersHealth, now: float, joined: bool) -> None:
        """Keep health that a next head must learn: notable health always, all other only while no head is *joined*."""
        for one in report.workers:
            self._health.pop(one.id, None)
            if _is_notable(one) or not joined:
                self._health[one.id] = (one, now)

    def registered(self, now: float) -> WorkersHealth | None:
        """Reset delivery state after a registration. Return the health report to send, None if there is none."""
        self._sent_at = {}
        health = [msgspec.structs.replace(one, for_s=one.for_s + now - at) for one, at in self._health.values()]
        self._health = {id: noted for id, noted in self._health.items() if _is_notable(noted[0])}
        return WorkersHealth(health) if health else None


def _is_notable(one: WorkerHealth) -> bool:
    """True if this health differs from what a head assumes of every worker: responsive, without a long call."""
    return bool(one.unresponsive or one.method)


class RobotLeases:
    """The one lease of all robot workers of a node.

    It ends `lease_s` after agentd sent a beat that the head answered: the head was there then, however late its answer
    came. A worker whose lease has expired never gets another.

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
        """Seconds between two beats that keep the lease alive; infinity without robot workers."""
        return self.lease_s / BEATS if self._holders else math.inf

    @property
    def deadline(self) -> float:
        """Time at which the lease expires; infinity without robot workers."""
        return self.until if self._holders else math.inf

    def started(self, id: str, now: float) -> None:
        """Add a robot worker. Unless half the lease is left, the head's order extends it like an answered beat."""
        if self.until < now + self.lease_s / 2:
            self.until = now + self.lease_s
        self._holders.add(id)

    def ended(self, id: str) -> None:
        self._holders.discard(id)

    def answered(self, at: float, now: float) -> bool:
        """Extend the lease by a beat sent at *at*, which the head has answered. Return True if it got longer."""
        if not self._holders or not now < self.until < at + self.lease_s:
            return False  # too late: the holders are told to end
        self.until = at + self.lease_s
        return True

    def expired(self, now: float) -> list[str]:
        """Remove the workers whose lease has expired, and return their ids."""
        if now < self.deadline:
            return []
        lost, self._holders = sorted(self._holders), set()
        return lost
