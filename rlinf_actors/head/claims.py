"""Claims of workers on robots, and group names reserved for workers that were lost with their node. Pure.

House rules: a worker holds its robots and the name of its group as long as it may be running. When its agentd reports
its end, both are free. When its node is lost, both stay held until the node comes back without the worker, or until
`Timing.rank_hold_s` has passed, after which no worker of a cut-off node can be running.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.owners import owner_clause
from rlinf_actors.head.records import Group, Index, Node, WorkerRecord
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.model.readable import duration
from rlinf_actors.wire.template_protocol import ROBOT_GONE_S
from rlinf_actors.wire.values import Claim, LeaseState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

SETTLE_S = 0.5
"""Seconds after ROBOT_GONE_S at which a robot worker that a new agentd does not report counts as ended."""
IN_USE = "hardware_in_use"
"""Error kind of a launch that is refused because another group holds its robots."""
SHOWN = 2000
"""Most robots in a status, which has those of all jobs: one job could fill an answer to all others."""
ADVICE = ". Shut that group down, use another one of this type, or wait: launch(..., wait_for_hardware=SECONDS)"


class HardwareClaim(msgspec.Struct, eq=False):
    """One worker's claim on one robot. All times are monotonic seconds.

    Attributes:
        node: name of the worker's node, for people.
        since: when the worker got the robot.
        lost: when the worker's node was lost; None if the node is not lost.
        until: when the robot becomes free if the lost node stays away; infinity if the node is not lost.
    """

    claim: Claim
    group: Group
    worker: WorkerRecord
    node: str
    since: float
    lost: float | None = None
    until: float = math.inf
    timer: HeapTimer | None = None

    @property
    def worker_name(self) -> str:
        return f"{self.group.name}:{self.worker.spec.rank}"


class ClaimTable:
    """Records which worker holds which robot, so that no two groups use one robot.

    Groups of one namespace may share a robot if the claims of both allow it, as those of programs written for RLinf do.
    A group that a robot's worker has launched inherits its claims, and holds the robot with it.

    Attributes:
        workers: by id, the workers that hold robots: those that run, and those that were lost and may still run.
        settled: the time from which new workers may get robots, in monotonic seconds. By then each node has reported
            its robot workers to this head, or the leases of those workers have ended.
    """

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self.settled = head.now + head.timing.robot_settle_s
        self._claims: dict[str, dict[str, HardwareClaim]] = {}  # by robot, then by worker
        self.workers: dict[str, WorkerRecord] = {}
        self._lost: dict[tuple[str, str], HardwareClaim] = {}
        self._lost_on: Index[HardwareClaim] = Index()  # by node

    def check(self, claims: Iterable[Claim], namespace: str, group: Group | None = None) -> None:
        """Raise Refused if another group than *group* holds one of these robots, or if the head has just started.

        *namespace* is that of the group that needs the robots. *group* is this group if some of its workers run
        already, else None. A head that has just started does not know yet which robots are in use.
        """
        now = self._head.now
        claims = list({claim.key: claim for claim in claims}.values())
        if claims and now < self.settled:
            raise Refused(
                IN_USE,
                f"the head has just started, and {claims[0].title} may be in use on a node that it has not heard of "
                f"yet; it knows in {self.settled - now:.1f} s",
            )
        for claim in claims:
            for held in self._claims.get(claim.key, {}).values():
                if held.group is not group and not _together(held, claim, namespace):
                    raise Refused(IN_USE, self._refusal(held, claim), robot=claim.key)

    def states(self, now: float) -> list[LeaseState]:
        """Return the states of the first SHOWN robots that groups hold, sorted by the robot's key."""
        return [self._state(list(claims.values()), now) for _, claims in sorted(self._claims.items())[:SHOWN]]

    def take(self, group: Group, worker: WorkerRecord, node: Node) -> HardwareClaim | None:
        """Record that *worker*, which runs or is about to start on *node*, holds all robots that it claims.

        Returns:
            The claim of another group that already holds one of these robots, which is a conflict; None without a
            conflict.
        """
        other = None
        for claim in worker.spec.claims:
            claims = self._claims.setdefault(claim.key, {})
            others = (held for held in claims.values() if held.group.key != group.key)
            apart = (held for held in others if not _together(held, claim, group.namespace, worker.id))
            other = other or next(apart, None)
            self._forget_loss(claim.key, worker.id)
            claims[worker.id] = HardwareClaim(claim, group, worker, node.name, self._head.now)
            self.workers[worker.id] = worker
        return other

    def free(self, worker: WorkerRecord) -> None:
        """Free the robots of a worker whose process has certainly ended."""
        self.workers.pop(worker.id, None)
        for claim in worker.spec.claims:
            claims = self._claims.get(claim.key, {})
            self._forget_loss(claim.key, worker.id)
            if claims.pop(worker.id, None) is not None and not claims:
                del self._claims[claim.key]
                self._head.launches.robot_free(claim.key)
        if worker.spec.claims:
            self._head.groups.robots_left()

    def busy(self, group: Group, worker: WorkerRecord) -> bool:
        """Return True if a worker of another group holds a robot of *worker*, and does not share it."""
        return any(
            held.group is not group and not _together(held, claim, group.namespace, worker.id)
            for claim in worker.spec.claims
            for held in self._claims.get(claim.key, {}).values()
        )

    def ended(self, worker_id: str, node_id: str) -> None:
        """Free the robots of a worker that was lost with this node, because the node's agentd now reports its end."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.node_id == node_id:
            self.free(worker)

    def lose(self, worker: WorkerRecord, certain: bool) -> None:
        """Free the robots of a lost worker: at once if its end is *certain*, else after `Timing.rank_hold_s`.

        During that time the worker may still be running, cut off from its agentd or from the head.
        """
        if certain:
            self.free(worker)
        for claim in worker.spec.claims:
            held = self._claims.get(claim.key, {}).get(worker.id)
            if held is not None:
                held.lost = self._head.now
                self._lost[claim.key, worker.id] = held
                self._lost_on.add(worker.node_id, (claim.key, worker.id), held)
                self._free_at(held, self._head.now + self._head.timing.rank_hold_s)

    def node_is_back(self, node_id: str, running: Collection[str], known: bool) -> None:
        """Free the robots of this node's lost workers, except the workers that its agentd reports as *running*.

        If this incarnation of agentd has registered before (*known* is True), the robots are free at once. Otherwise
        they become free after ROBOT_GONE_S + SETTLE_S at the latest: a new agentd does not know the workers that
        templates of the earlier agentd still have. Those workers make their robots safe, and are then killed.
        """
        for held in self._lost_on.of(node_id):
            if held.worker.id not in running:
                if known:
                    self.free(held.worker)
                else:
                    self._free_at(held, min(held.until, self._head.now + ROBOT_GONE_S + SETTLE_S))

    def _free_at(self, held: HardwareClaim, until: float) -> None:
        self._head.timers.cancel(held.timer)
        held.until, held.timer = until, self._head.timers.at(until, self.expire)

    def expire(self) -> None:
        """Free the robots of lost workers whose time is over, unless an emergency stop needs their nodes' word."""
        for held in list(self._lost.values()):
            if held.until <= self._head.now and not self._head.robots.in_force(held.worker.spec.namespace):
                self.free(held.worker)

    def _forget_loss(self, key: str, worker_id: str) -> None:
        held = self._lost.pop((key, worker_id), None)
        if held is not None:
            self._lost_on.discard(held.worker.node_id, (key, worker_id))
            self._head.timers.cancel(held.timer)

    def _refusal(self, held: HardwareClaim, asked: Claim) -> str:
        now = self._head.now
        known_as = "" if held.claim.title == asked.title else f" as {held.claim.title}"
        text = (
            f"{asked.title} is held by group {held.group.name!r} of job {held.group.namespace!r}{known_as}, "
            f"{owner_clause(self._head, held.group)}; its worker {held.worker_name} on node {held.node} "
            f"has had it for {duration(now - held.since)}"
        )
        if held.lost is None:
            return f"{text}{ADVICE}"
        return (
            f"{text}. That node was lost {duration(now - held.lost)} ago and the worker may still be moving it, so it "
            f"is given to nobody until the node is back without that worker, or for {held.until - now:.0f} s{ADVICE}"
        )

    def _state(self, claims: list[HardwareClaim], now: float) -> LeaseState:
        first = claims[0]
        lost = all(held.lost is not None for held in claims)
        return LeaseState(
            key=first.claim.key,
            title=first.claim.title,
            namespace=first.group.namespace,
            group=first.group.name,
            owner=owner_clause(self._head, first.group),
            workers=[held.worker_name for held in claims],
            nodes=list(dict.fromkeys(held.node for held in claims)),
            state="lost" if lost else "held",
            held_s=now - min(held.since for held in claims),
            free_in_s=max(held.until for held in claims) - now if lost else None,
        )


def _together(held: HardwareClaim, claim: Claim, namespace: str, worker_id: str = "") -> bool:
    """Return True if a group of *namespace* may claim the robot beside *held*.

    It may if one of both has inherited the claim from the other, or both from one worker; or if both share it, which a
    lost worker does not. *worker_id* is the worker that claims it, "" for a new one.
    """
    if (held.claim.by or held.worker.id) == (claim.by or worker_id):
        return True
    return held.claim.shared and claim.shared and held.lost is None and held.group.namespace == namespace


def contradiction(held: HardwareClaim, group: Group) -> str:
    """Return the log text for a robot that *group* uses although another group holds it."""
    return f"{held.claim.title} is held by two groups, {held.group.key} and {group.key}: the second is stopped"


class _LostWorker(msgspec.Struct, frozen=True):
    name: str
    node_id: str
    node: str
    until: float
    timer: HeapTimer
    group: Group


class NameReservations:
    """Reserves the names of groups that lost a worker with its node, because the worker may still be running."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._lost: dict[tuple[str, str], dict[str, _LostWorker]] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._on_node: Index[str] = Index()  # ids of the lost workers

    def lost(self, group: Group, worker: WorkerRecord, node: Node) -> None:
        """Reserve the name of *group* for `Timing.rank_hold_s`, because *worker* may still run on its lost *node*."""
        until = self._head.now + self._head.timing.rank_hold_s
        timer = self._head.timers.at(until, lambda: self._free(worker.id))
        one = _LostWorker(f"{group.name}:{worker.spec.rank}", node.id, node.name, until, timer, group)
        self._lost.setdefault(group.key, {})[worker.id] = one
        self._keys[worker.id] = group.key
        self._on_node.add(node.id, worker.id, worker.id)

    def ended(self, worker_id: str, node_id: str) -> None:
        """End the reservation for a lost worker of this node, because the node's agentd reports the worker's end."""
        key = self._keys.get(worker_id)
        if key is not None and self._lost[key][worker_id].node_id == node_id:
            self._free(worker_id)

    def node_is_back(self, node_id: str, running: Container[str]) -> None:
        """End the reservations for lost workers of a returned node, except those that its agentd lists in *running*."""
        for id in self._on_node.of(node_id):
            if id not in running:
                self._free(id)

    def check(self, namespace: str, name: str) -> None:
        lost = self._lost.get((namespace, name))
        if lost:
            one = max(lost.values(), key=lambda one: one.until)
            raise Refused(
                "name_in_use",
                f"the name {name!r} of job {namespace!r} is held for {one.until - self._head.now:.0f} s at most: "
                f"worker {one.name} of the group before, {owner_clause(self._head, one.group)}, was lost with node "
                f"{one.node} and may still run there. The name is free as soon as that node is back; give this group "
                "another name, or launch it later",
            )

    def _free(self, worker_id: str) -> None:
        key = self._keys.pop(worker_id)
        lost = self._lost[key]
        one = lost.pop(worker_id)
        self._on_node.discard(one.node_id, worker_id)
        self._head.timers.cancel(one.timer)
        if not lost:
            del self._lost[key]
