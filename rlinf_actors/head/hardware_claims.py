"""Exclusive hardware: which group holds which robot, until when, and who waits for one. Pure.

House rules: a piece is held as long as any worker that claims it may be running. A worker's end that
its agent told frees what it held; one whose node was lost holds it until that node comes back
without it, or until the time has passed after which nothing of a cut-off node can be running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import Refusal
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.records import Group, Node, WorkerRecord
from rlinf_actors.wire.template_protocol import ROBOT_END_S
from rlinf_actors.wire.values import Claim, LeaseState

SETTLE_S = 0.5
"""What is added to ROBOT_END_S before workers that nobody tells of are taken to be gone, in seconds."""
IN_USE = "hardware_in_use"
"""The kind of such a refusal; see messages.Failed."""
ADVICE = ". Shut that group down, use another one of this type, or wait: launch(..., wait_for_hardware=SECONDS)"


@dataclass
class HardwareClaim:
    """One worker's hold on one piece. `lost` is when its node was lost, None while the node is there; it is free at
    `until` then at the latest.
    """

    claim: Claim
    group: Group
    worker: WorkerRecord
    node: str
    since: float
    lost: float | None = None
    until: float = math.inf

    @property
    def worker_name(self) -> str:
        """For people."""
        return f"{self.group.name}:{self.worker.spec.rank}"


class ClaimTable:
    """All holds on exclusive hardware.

    Args:
        hold_s: how long a lost node's workers may still be running.
        owner: says who owns a group, as a clause about it.
        settled: when every node that may hold a piece has said so, or its workers' leases are over.
    """

    def __init__(self, hold_s: float, owner: Callable[[Group], str], settled: float) -> None:
        self._hold_s = hold_s
        self._owner = owner
        self.settled = settled
        self._freed = False
        self._holds: dict[str, dict[str, HardwareClaim]] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._lost: dict[tuple[str, str], HardwareClaim] = {}

    # --- looking ---

    def check(self, claims: Iterable[Claim], now: float, group: Group | None = None) -> None:
        """Refuse a launch that wants what is held.

        Args:
            claims: what its workers claim.
            now: the time.
            group: the one that they are of, if it has workers already: they share what they have.

        Raises:
            Refusal: a piece is held; names it and who holds it. Or this head has just started, and does not know.
        """
        claims = list({claim.key: claim for claim in claims}.values())
        if claims and now < self.settled:
            raise Refusal(
                IN_USE,
                f"the head has just started, and {claims[0].title} may be in use on a node that it has not heard of "
                f"yet; it knows in {self.settled - now:.1f} s",
            )
        for claim in claims:
            for hold in self._holds.get(claim.key, {}).values():
                if hold.group is not group:
                    raise Refusal(IN_USE, self._refusal(hold, now))

    def states(self, now: float) -> list[LeaseState]:
        """Every piece that is held, by key."""
        return [self._state(list(holds.values()), now) for _, holds in sorted(self._holds.items())]

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((hold.until for hold in self._lost.values()), default=math.inf)

    # --- what happens ---

    def take(self, group: Group, worker: WorkerRecord, node: Node, now: float) -> HardwareClaim | None:
        """A worker that runs, or is about to, holds what it claims.

        Returns:
            A hold of another group on one of these pieces: two that run contradict one another. None without one.
        """
        other = None
        for claim in worker.spec.claims:
            holds = self._holds.setdefault(claim.key, {})
            first = next(iter(holds.values()), None)
            if other is None and first is not None and first.group.key != group.key:
                other = first
            holds[worker.id] = HardwareClaim(claim, group, worker, node.name, now)
            self._lost.pop((claim.key, worker.id), None)
            self._workers[worker.id] = worker
        return other

    def free(self, worker: WorkerRecord) -> None:
        """A worker's process has ended for certain."""
        self._workers.pop(worker.id, None)
        for claim in worker.spec.claims:
            holds = self._holds.get(claim.key, {})
            self._lost.pop((claim.key, worker.id), None)
            if holds.pop(worker.id, None) is not None and not holds:
                del self._holds[claim.key]
                self._freed = True

    def ended(self, worker_id: str, node_id: str) -> None:
        """The agent of a node tells of the end of a worker that was lost with it."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.node_id == node_id:
            self.free(worker)

    def lose(self, worker: WorkerRecord, certain: bool, now: float) -> None:
        """A worker's node is gone: unless that is *certain*, the worker may go on for a while."""
        if certain:
            self.free(worker)
        for claim in worker.spec.claims:
            hold = self._holds.get(claim.key, {}).get(worker.id)
            if hold is not None:
                hold.lost, hold.until = now, now + self._hold_s
                self._lost[claim.key, worker.id] = hold

    def node_is_back(self, node_id: str, running: Collection[str], known: bool, now: float) -> None:
        """A node says which workers it has: what others of it held when it was lost is free.

        At once if its agent is *known*, the one that had them. A new one says nothing of what the earlier one's
        templates still have: those workers are making their robots safe, and are then killed.
        """
        for hold in self._lost.values():
            if hold.worker.node_id == node_id and hold.worker.id not in running:
                hold.until = now if known else min(hold.until, now + ROBOT_END_S + SETTLE_S)
        self._expire(now)

    def tick(self, now: float) -> bool:
        """Time has passed: what a node held that was lost long enough ago is free.

        Returns:
            Whether anything became free since the last tick.
        """
        self._expire(now)
        freed, self._freed = self._freed, False
        return freed

    # --- inside ---

    def _expire(self, now: float) -> None:
        for hold in [hold for hold in self._lost.values() if now >= hold.until]:
            self.free(hold.worker)

    def _refusal(self, hold: HardwareClaim, now: float) -> str:
        held = (
            f"{hold.claim.title} is held by group {hold.group.name!r} of namespace {hold.group.namespace!r}, "
            f"{self._owner(hold.group)}; its worker {hold.worker_name} on node {hold.node} "
            f"has had it for {now - hold.since:.0f} s"
        )
        if hold.lost is None:
            return f"{held}{ADVICE}"
        left = hold.until - now
        return (
            f"{held}. That node was lost {now - hold.lost:.0f} s ago and the worker may still be moving it, so it is "
            f"given to nobody until the node is back without that worker, or for {left:.0f} s{ADVICE}"
        )

    def _state(self, holds: list[HardwareClaim], now: float) -> LeaseState:
        first = holds[0]
        lost = [hold.lost for hold in holds if hold.lost is not None]
        return LeaseState(
            key=first.claim.key,
            title=first.claim.title,
            namespace=first.group.namespace,
            group=first.group.name,
            owner=self._owner(first.group),
            workers=[hold.worker_name for hold in holds],
            nodes=list(dict.fromkeys(hold.node for hold in holds)),
            state="lost" if len(lost) == len(holds) else "held",
            held_s=now - min(hold.since for hold in holds),
            free_in_s=max(hold.until for hold in holds) - now if len(lost) == len(holds) else None,
        )


def owner_of(group: Group, clients: ClientTable, nodes: NodeTable, of_worker: Mapping[str, Group]) -> str:
    """Who owns a group, as a clause about it."""
    client = clients.get(group.owner)
    if client is None:
        why = clients.ended(group.owner)
        return f"whose owner has ended ({why})" if why else "whose owner this head has not heard of since it started"
    node = next((node for node in nodes.alive() if node.report.host == client.host), None)
    where = f"on node {node.name}" if node is not None else "on a machine without an agentd"
    who = "driver"
    if client.worker_id in of_worker:
        owning = of_worker[client.worker_id]
        who = f"worker {owning.name}:{owning.workers[client.worker_id].spec.rank}"
    return f"owned by {who}, process {client.pid} {where}"


def contradiction(hold: HardwareClaim, group: Group) -> str:
    """A line about a group that has what another one holds."""
    return f"{hold.claim.title} is held by two groups, {hold.group.key} and {group.key}: the second is stopped"
