"""Which workers an agent has, and which ends and what health of theirs the head may not know yet. Pure.

The leases of this node's robot workers: renewed by the head's answers, enforced here. Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from rlinf_actors.wire.agent_messages import StartWorkers, WorkerExited, WorkerReady, WorkersHealth
from rlinf_actors.wire.values import RunningWorker, WorkerHealth, WorkerSpec

EXITS_KEPT = 4096
"""Ends that are told again in a hello: a head that was restarted may have missed them."""


class Roster:
    """The workers of one agent.

    Attributes:
        running: those that have not ended, by their ids.
    """

    def __init__(self) -> None:
        self.running: dict[str, RunningWorker] = {}
        self._ended: dict[str, RunningWorker] = {}
        self._sent: dict[str, float] = {}
        self._health: dict[str, tuple[WorkerHealth, float]] = {}

    def listed(self) -> list[RunningWorker]:
        """What a hello says: every worker, and the ends that the head may have missed."""
        return [*self.running.values(), *self._ended.values()]

    def adopt(self, workers: Iterable[RunningWorker]) -> None:
        """Take over those of an earlier agentd."""
        for worker in workers:
            (self.running if worker.exit is None else self._ended)[worker.spec.id] = worker

    def add(self, order: StartWorkers) -> list[WorkerSpec]:
        """Take on those that are new; returns them."""
        specs = [spec for spec in order.workers if spec.id not in self.running and spec.id not in self._ended]
        for spec in specs:
            self.running[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return specs

    def give_to(self, order: StartWorkers) -> list[WorkerSpec]:
        """Take over who owns those that run already, of a group whose owner gave it up; returns those that changed."""
        changed = []
        for spec in order.workers if order.detached else ():
            known = self.running.get(spec.id)
            if known is not None and (known.owner, known.detached) != (order.owner, True):
                self.running[spec.id] = msgspec.structs.replace(known, owner=order.owner, detached=True)
                changed.append(known.spec)
        return changed

    def ends_among(self, order: StartWorkers) -> list[WorkerExited]:
        """Those that have ended already: the head has not heard of it."""
        ended = [self._ended[spec.id] for spec in order.workers if spec.id in self._ended]
        return [WorkerExited(one.spec.id, one.exit) for one in ended if one.exit is not None]

    def owned_by(self, client: str) -> list[str]:
        """Return the ids of the running workers that end with this client."""
        return [id for id, worker in self.running.items() if worker.owner == client and not worker.detached]

    def up(self, report: WorkerReady) -> None:
        """A worker's runtime listens."""
        if report.id in self.running:
            self.running[report.id] = msgspec.structs.replace(
                self.running[report.id],
                pid=report.pid,
                endpoint=report.endpoint,
                port=report.port,
                master_port=report.master_port,
            )

    def end(self, report: WorkerExited, keep: bool) -> list[str]:
        """A worker has ended; *keep*: until the head knows. Returns whose ends need not be known any more."""
        known = self.running.pop(report.id, None)
        self._health.pop(report.id, None)
        if known is None:
            return []
        if not keep:
            return [report.id]
        self._ended[report.id] = msgspec.structs.replace(known, exit=report.exit)
        return self.settle([next(iter(self._ended))]) if len(self._ended) > EXITS_KEPT else []

    def settle(self, ids: Iterable[str]) -> list[str]:
        """The head knows how these ended, or need not know. Returns those of them whose ends were kept."""
        known = []
        for id in ids:
            self._sent.pop(id, None)
            if self._ended.pop(id, None) is not None:
                known.append(id)
        return known

    def settle_all(self) -> list[str]:
        """No head will ask how they ended; as `settle`."""
        return self.settle(list(self._ended))

    def beat_sent(self, now: float) -> None:
        """All ends so far were told to the head before the beat of *now*."""
        for id in self._ended:
            self._sent.setdefault(id, now)

    def beat_answered(self, at: float) -> list[str]:
        """The head has answered the beat of *at*: it knows what was told before. As `settle`."""
        return self.settle([id for id, sent in self._sent.items() if sent <= at])

    def say_health(self, report: WorkersHealth, now: float, joined: bool) -> None:
        """How workers are, as it is told to a head that knows us (*joined*), or is to be told once it does."""
        for one in report.workers:
            self._health.pop(one.id, None)
            if _notable(one) or not joined:
                self._health[one.id] = (one, now)

    def welcomed(self, now: float) -> WorkersHealth | None:
        """A head has taken us: how workers are, as far as it is to be told that; ends are to be told again."""
        self._sent = {}
        health = [msgspec.structs.replace(one, for_s=one.for_s + now - at) for one, at in self._health.values()]
        self._health = {id: told for id, told in self._health.items() if _notable(told[0])}
        return WorkersHealth(health) if health else None


def _notable(one: WorkerHealth) -> bool:
    """Whether it is other than a head takes a worker to be anyway."""
    return bool(one.unresponsive or one.method)


BEATS = 4
"""Beats in a robot lease: three may be late."""


class RobotLeases:
    """One lease for all robot workers of a node.

    It lasts `lease_s` from when a beat was sent that the head answered: the head was there then, whenever the answer
    came. A worker that the lease was lost for is not given one again.

    Attributes:
        lease_s: as the head said.
        until: the end of the lease.
    """

    def __init__(self) -> None:
        self.lease_s = 2.0
        self.until = 0.0
        self._held: set[str] = set()

    @property
    def beat_s(self) -> float:
        """How often the head is to be told; infinity without robot workers."""
        return self.lease_s / BEATS if self._held else math.inf

    @property
    def deadline(self) -> float:
        """When `expired` has something to say, infinity for never."""
        return self.until if self._held else math.inf

    def started(self, id: str, now: float) -> None:
        """A robot worker is to be started: the head said so, which counts as its word where no beat is fresh."""
        if self.until < now + self.lease_s / 2:
            self.until = now + self.lease_s
        self._held.add(id)

    def ended(self, id: str) -> None:
        """A worker has ended, or is told to."""
        self._held.discard(id)

    def answered(self, at: float, now: float) -> bool:
        """The head answered a beat sent at that time. Returns whether the lease lasts longer now."""
        if not self._held or not now < self.until < at + self.lease_s:
            return False  # too late: those that held it are told to stop
        self.until = at + self.lease_s
        return True

    def expired(self, now: float) -> list[str]:
        """The workers that have lost it; each is named once."""
        if now < self.deadline:
            return []
        lost, self._held = sorted(self._held), set()
        return lost
