"""Restart policies of workers, the first failure of each group, and the final states of ended groups. Pure.

House rules: a worker is restarted only if its agentd reported its end, so a rank never runs twice at once. A worker
whose node is lost is not restarted, because it may still run. A worker with robots has lost its lease, by whatever it
failed: a person looks at the robot before it moves again, unless the policy says otherwise.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec.structs import replace

from rlinf_actors.head.heaviest import Heaviest
from rlinf_actors.head.records import Group, WorkerLife, WorkerRecord
from rlinf_actors.model.restart import next_id, rank_id
from rlinf_actors.plurals import counted
from rlinf_actors.wire.endings import ending
from rlinf_actors.wire.values import ExitReport, GroupState

_FAILURES = ("exited", "signalled", "start_failed")
LEASE_LOST = (
    "it lost its lease of {}, and is not started again by itself: see that the robot may move, and launch the group "
    "again. RestartPolicy(after_lease_lost=True) restarts such ranks unattended"
)


class Restarts:
    """Decides whether an ended worker is restarted, and when, by the worker's restart policy.

    Keeps the times of each rank's restarts, as far as they count for the policy.
    """

    def __init__(self) -> None:
        self._past: dict[tuple[str, str], dict[int, deque[float]]] = {}

    def after(self, group: Group, worker: WorkerRecord, now: float) -> tuple[WorkerRecord, float] | None:
        """Return the next incarnation of an ended worker and the time to start it; None if it is not restarted.

        The caller has set the worker's `exit`, and has not changed its `life` yet. If the rank was restarted too often,
        or has robots, the reason in `exit` says so afterwards.
        """
        exit, policy = worker.exit, worker.spec.restart
        if exit is None or policy is None or not policy.restarts:
            return None
        if 0 < group.size <= worker.spec.rank or worker.spec.resizes < 0:  # it leaves the group, or is being added
            return None
        if group.stopping or worker.life is WorkerLife.STOPPING or not _is_failure(exit, worker.spec.incarnation):
            return None
        if worker.spec.claims and not policy.after_lease_lost:
            robots = ", ".join(claim.title for claim in worker.spec.claims)
            worker.exit = _with_reason(exit, LEASE_LOST.format(robots))
            return None
        past = self._past.setdefault(group.key, {}).setdefault(worker.spec.rank, deque())
        while past and now - past[0] >= policy.within_s:
            past.popleft()
        if len(past) >= policy.max_restarts:
            times = f"{counted(len(past), 'time')} within {policy.within_s:g} s"
            worker.exit = _with_reason(exit, f"it was restarted {times}, and is not again")
            return None
        delay_s = min(policy.backoff_s * 2.0 ** min(len(past), 60), policy.backoff_max_s)
        past.append(now)
        incarnation = worker.spec.incarnation + 1
        spec = replace(worker.spec, id=next_id(worker.id, incarnation), incarnation=incarnation)
        successor = WorkerRecord(spec, worker.node_id, worker.node_ip, WorkerLife.RESTARTING, exit=exit)
        return successor, now + delay_s

    def forget(self, group: Group) -> None:
        self._past.pop(group.key, None)


def not_restarted(exit: ExitReport | None, why: str) -> ExitReport:
    """Return a copy of *exit* that also says *why* the planned restart of the worker was cancelled."""
    return _with_reason(exit or ExitReport("exited"), f"it is not started again: {why}")


def _with_reason(exit: ExitReport, more: str) -> ExitReport:
    return replace(exit, reason="; ".join(filter(None, [exit.reason, more])))


def _is_failure(exit: ExitReport, incarnation: int) -> bool:
    if exit.kind == "start_failed":
        return incarnation > 0  # a group that cannot come up the first time is ended by its owner
    return exit.kind in _FAILURES and exit.exit_code != 0


TOGETHER_S = 30.0
"""Seconds within which failures in one group may have one cause: in a collective all ranks fail after the first."""


class FirstFailures:
    """The first failure of each group, kept for TOGETHER_S, because it may be the cause of the failures that follow."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[float, int, str]] = {}

    def annotate(self, group: Group, worker: WorkerRecord, node: str, exit: ExitReport, now: float) -> ExitReport:
        """Return *exit* with a mention of the group's first failure, if that may be the cause of this failure.

        *exit* is the report of the worker's agentd, *node* the name of the worker's node.
        """
        if group.stopping or exit.kind == "stopped" or exit.exit_code == 0:
            return exit
        rank = worker.spec.rank
        at, first_rank, first = self._first.get(group.key, (-math.inf, rank, ""))
        if now - at > TOGETHER_S:
            self._first[group.key] = (now, rank, f"{worker.spec.group}:{rank} on {node}, which {ending(exit)}")
        if now - at > TOGETHER_S or first_rank == rank:  # the same rank: an earlier incarnation is no cause
            return exit
        return _with_reason(exit, f"the first of its group to end, {now - at:.1f} s before, was {first}")

    def forget(self, group: Group) -> None:
        self._first.pop(group.key, None)


class EndedGroups:
    """The final states of the groups that ended last, for clients that ask after the end.

    Args:
        limit: largest number of workers in all these groups together. Beyond the limit, the oldest group of the job
            with the most workers is dropped; the newest group never is.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._total = 0
        self._states: dict[tuple[str, str], GroupState] = {}
        self._ranks: dict[tuple[str, str], frozenset[str]] = {}  # ids without incarnation numbers, made when asked for
        self._of_job: dict[str, dict[tuple[str, str], None]] = {}
        self._weights: Heaviest[str] = Heaviest()  # numbers of workers, by job

    def add(self, state: GroupState) -> None:
        """Add the final state of a group whose last worker is gone. Beyond the limit, drop older groups."""
        key = (state.namespace, state.name)
        self.forget(key)
        self._states[key] = replace(state, detail="")
        self._of_job.setdefault(state.namespace, {})[key] = None
        self._count(state.namespace, 1, len(state.workers))
        while self._total > self._limit and len(self._states) > 1:
            self.forget(self._to_drop(key))

    def _to_drop(self, newest: tuple[str, str]) -> tuple[str, str]:
        """Return the oldest group of the job with the most workers; never the group *newest*."""
        only = len(self._of_job[newest[0]]) == 1
        most = self._weights.top(newest[0] if only else None)
        assert most is not None  # there is another group
        return next(iter(self._of_job[most]))

    def _count(self, job: str, groups: int, workers: int) -> None:
        self._total += workers
        # a group whose workers are all being added has none yet, and must not be forgotten here for that
        self._weights.set(job, self._weights.get(job) + workers + groups / 2)

    def has(self, key: tuple[str, str], worker_id: str) -> bool:
        """Return True if the last group with this *key* had this worker, or another incarnation of its rank."""
        state = self._states.get(key)
        if state is not None and key not in self._ranks:
            self._ranks[key] = frozenset(rank_id(worker.id) for worker in state.workers)
        return rank_id(worker_id) in self._ranks.get(key, ())

    def get(self, key: tuple[str, str], token: str) -> GroupState | None:
        """Return the final state of the last group with this *key*, its (namespace, name); None if it is unknown.

        The state contains *token*, the job's token.
        """
        state = self._states.get(key)
        return None if state is None else replace(state, token=token)

    def forget(self, key: tuple[str, str]) -> None:
        """Drop the final state of the group with this *key*, its (namespace, name), because the name is used again."""
        state = self._states.pop(key, None)
        if state is not None:
            self._ranks.pop(key, None)
            self._count(key[0], -1, -len(state.workers))
            del self._of_job[key[0]][key]
            if not self._of_job[key[0]]:
                del self._of_job[key[0]]

    def forget_job(self, namespace: str) -> None:
        """Drop the final states of a job that has ended; a later job of the same namespace must not see them."""
        for key in list(self._of_job.get(namespace, ())):
            self.forget(key)
