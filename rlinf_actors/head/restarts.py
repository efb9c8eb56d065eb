"""Which workers that failed are started again, and when. Pure.

House rules: only an end that the worker's agent reported counts, so a rank never runs twice at once. A worker whose
node is lost is not restarted: nobody knows whether it has ended.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from rlinf_actors.head.records import Group, Worker
from rlinf_actors.head.transitions import WorkerLife
from rlinf_actors.model.restart import next_id
from rlinf_actors.wire.values import ExitReport

_FAILURES = ("exited", "signalled", "start_failed")


class Restarts:
    """The restarts of all groups, in the past (as far as they count) and to come."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, str], dict[int, deque[float]]] = {}
        self._due: dict[str, tuple[float, Group, Worker]] = {}

    def ended(self, group: Group, worker: Worker, now: float) -> Worker | None:
        """What takes the place of a worker that has ended, None if nothing does. Says so in its exit report if there
        were too many.

        Args:
            group: of the worker.
            worker: it, in its last state alive; ``exit`` is how it ended.
            now: the time.
        """
        exit, policy = worker.exit, worker.spec.restart
        if exit is None or policy is None or not policy.restarts:
            return None
        if group.stopping or worker.life is WorkerLife.STOPPING or not _is_failure(exit, worker.spec.incarnation):
            return None
        past = self._past.setdefault(group.key, {}).setdefault(worker.spec.rank, deque())
        while past and now - past[0] >= policy.within_s:
            past.popleft()
        if len(past) >= policy.max_restarts:
            times = f"{len(past)} time{'s' * (len(past) != 1)} within {policy.within_s:g} s"
            reason = "; ".join(filter(None, [exit.reason, f"it was restarted {times}, and is not again"]))
            worker.exit = msgspec.structs.replace(exit, reason=reason)
            return None
        delay_s = min(policy.backoff_s * 2.0 ** min(len(past), 60), policy.backoff_max_s)
        past.append(now)
        incarnation = worker.spec.incarnation + 1
        spec = msgspec.structs.replace(worker.spec, id=next_id(worker.id, incarnation), incarnation=incarnation)
        successor = Worker(spec, worker.node_id, worker.node_ip, WorkerLife.RESTARTING, exit=exit)
        self._due[successor.id] = (now + delay_s, group, successor)
        return successor

    def take_due(self, now: float) -> list[tuple[Group, Worker]]:
        """Those whose time has come."""
        due = [id for id, (at, _, _) in self._due.items() if now >= at]
        return [(group, worker) for _, group, worker in map(self._due.pop, due)]

    def withdraw(self, worker_id: str) -> bool:
        """A worker is not to be started after all; whether it was to be."""
        return self._due.pop(worker_id, None) is not None

    def forget(self, group: Group) -> None:
        """A group has ended."""
        self._past.pop(group.key, None)

    def next_deadline(self) -> float:
        """When `take_due` has something, infinity for never."""
        return min((at for at, _, _ in self._due.values()), default=math.inf)


def not_restarted(exit: ExitReport | None, why: str) -> ExitReport:
    """How a worker ended that was to be started again, and is not."""
    exit = exit or ExitReport("exited")
    return msgspec.structs.replace(
        exit, reason="; ".join(filter(None, [exit.reason, f"it is not started again: {why}"]))
    )


def _is_failure(exit: ExitReport, incarnation: int) -> bool:
    if exit.kind == "start_failed":
        return incarnation > 0  # a group that cannot come up the first time is ended by its owner
    return exit.kind in _FAILURES and exit.exit_code != 0
