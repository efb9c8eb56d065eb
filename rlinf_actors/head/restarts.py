"""Which workers that failed are started again, and when. Pure.

House rules: only an end that the worker's agent reported counts, so a rank never runs twice at once. A worker whose
node is lost is not restarted: nobody knows whether it has ended.

The first cause among many: when the workers of a group end one after the other, which one was the first. Pure.

Groups that have ended: how their workers did, for who names one too late. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import msgspec

from rlinf_actors.head.records import Group, WorkerLife, WorkerRecord
from rlinf_actors.model.restart import next_id
from rlinf_actors.wire.values import ExitReport, GroupState, ending

_FAILURES = ("exited", "signalled", "start_failed")


class Restarts:
    """The restarts of all groups, in the past (as far as they count) and to come."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, str], dict[int, deque[float]]] = {}
        self._due: dict[str, tuple[float, Group, WorkerRecord]] = {}

    def ended(self, group: Group, worker: WorkerRecord, now: float) -> WorkerRecord | None:
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
        successor = WorkerRecord(spec, worker.node_id, worker.node_ip, WorkerLife.RESTARTING, exit=exit)
        self._due[successor.id] = (now + delay_s, group, successor)
        return successor

    def take_due(self, now: float) -> list[tuple[Group, WorkerRecord]]:
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


TOGETHER_S = 30.0
"""Ends of one group that are no further apart may have one cause: the others of a collective fail by its timeout at the
latest, or at once.
"""


class FirstEnds:
    """The first end of each group, as long as it may be the cause of others."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[float, int, str]] = {}

    def noted(self, group: Group, worker: WorkerRecord, node: str, exit: ExitReport, now: float) -> ExitReport:
        """How a worker ended, with the end that came before it in its group, where that may be why.

        Args:
            group: of the worker.
            worker: it.
            node: its node's name, for people.
            exit: as its agent says.
            now: the time.
        """
        if group.stopping or exit.kind == "stopped" or exit.exit_code == 0:
            return exit
        rank = worker.spec.rank
        at, first_rank, first = self._first.get(group.key, (-math.inf, rank, ""))
        if now - at > TOGETHER_S:
            self._first[group.key] = (now, rank, f"{worker.spec.group}:{rank} on {node}, which {ending(exit)}")
        if now - at > TOGETHER_S or first_rank == rank:  # the same rank: an earlier incarnation is no cause
            return exit
        before = f"the first of its group to end, {now - at:.1f} s before, was {first}"
        return msgspec.structs.replace(exit, reason="; ".join(filter(None, [exit.reason, before])))

    def forget(self, group: Group) -> None:
        """A group has ended."""
        self._first.pop(group.key, None)


class EndedGroups:
    """The last groups that ended, by namespace and name.

    Args:
        limit: workers of all of them together; beyond that the oldest groups of the job that has most are forgotten,
            the last one never.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._states: dict[tuple[str, str], GroupState] = {}
        self._workers: Counter[str] = Counter()

    def add(self, state: GroupState) -> None:
        """Remember a group whose last worker is gone."""
        key = (state.namespace, state.name)
        self.forget(key)
        self._states[key] = msgspec.structs.replace(state, detail="")
        self._workers[state.namespace] += len(state.workers)
        while sum(self._workers.values()) > self._limit and len(self._states) > 1:
            older = list(self._states)[:-1]
            self.forget(max(older, key=lambda key: self._workers[key[0]]))  # the first of the job that has most

    def get(self, key: tuple[str, str], token: str) -> GroupState | None:
        """How it ended; None if there was none of that name, or too long ago."""
        state = self._states.get(key)
        return None if state is None else msgspec.structs.replace(state, token=token)

    def forget(self, key: tuple[str, str]) -> None:
        """The name is used again."""
        state = self._states.pop(key, None)
        if state is not None:
            self._workers[key[0]] -= len(state.workers)
            if not self._workers[key[0]]:
                del self._workers[key[0]]

    def forget_job(self, namespace: str) -> None:
        """Nobody is left in this namespace: who comes next has nothing to do with it."""
        for key in [key for key in self._states if key[0] == namespace]:
            self.forget(key)
