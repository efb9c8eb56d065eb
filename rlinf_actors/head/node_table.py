"""Nodes: who registered, who is silent, which ranks they have, and who waits for them. Pure.

Clients that wait until there are enough nodes. Pure; each is answered once: by nodes, or at its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.client_table import PING
from rlinf_actors.head.commands import (
    NODE,
    REPLACED,
    Answer,
    Emit,
    ForgetNode,
    KnownNode,
    Notify,
    Persist,
    Refusal,
    Refuse,
    Snapshot,
    Timing,
)
from rlinf_actors.head.event_log import of_node
from rlinf_actors.head.quotas import Tombstones
from rlinf_actors.head.records import Node, NodeLife
from rlinf_actors.placement.node_order import missing_ranks, order_nodes
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.settings import NODE_RANK
from rlinf_actors.wire.agent_messages import AgentHello, Beat
from rlinf_actors.wire.client_messages import GetNodes, Nodes
from rlinf_actors.wire.protocol import agreed
from rlinf_actors.wire.values import NodeState

NAMED = 20
"""Missing ranks that a refusal names."""


@dataclass(frozen=True)
class _Waiting:
    peer: bytes
    id: int
    num_nodes: int
    since: float
    deadline: float


class NodeWaits:
    """All that wait.

    Args:
        emit: takes commands.
        order: what every usable node's rank would be, by id.
        freeze: gives nodes those ranks for good; returns their states, by rank.
        name: what people call the node of this id.
        seen: by rank, what is known of the nodes that had it: a clause about each.
    """

    def __init__(
        self,
        emit: Emit,
        order: Callable[[], dict[str, int]],
        freeze: Callable[[Mapping[str, int], float], list[NodeState]],
        name: Callable[[str], str],
        seen: Callable[[float], dict[int, str]],
    ) -> None:
        self._emit = emit
        self._order = order
        self._freeze = freeze
        self._name = name
        self._seen = seen
        self._waiting: list[_Waiting] = []

    def add(self, peer: bytes, id: int, asked: GetNodes, now: float) -> None:
        """Answer when there are enough nodes, or at the asker's deadline."""
        patience = math.inf if asked.timeout_s is None else asked.timeout_s
        self._waiting.append(_Waiting(peer, id, asked.num_nodes, now, now + patience))
        self.settle(now)

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody waits there any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.peer != peer]

    def settle(self, now: float) -> None:
        """Answer those for whom there are enough nodes now."""
        if not self._waiting:
            return
        still, order = [], self._order()  # who is answered changes no rank of it
        for waiting in self._waiting:
            if waiting.num_nodes > len(order) or missing_ranks(order, waiting.num_nodes):
                still.append(waiting)
            else:
                self._answer(waiting, order, now)
        self._waiting = still

    def tick(self, now: float) -> None:
        """Time has passed: give up on those whose time is over."""
        late = [waiting for waiting in self._waiting if now >= waiting.deadline]
        if late:
            self._waiting = [waiting for waiting in self._waiting if now < waiting.deadline]
            order, seen = self._order(), self._seen(now)
            for waiting in late:
                self._time_out(waiting, missing_ranks(order, waiting.num_nodes), seen, now)

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)

    def _answer(self, waiting: _Waiting, order: Mapping[str, int], now: float) -> None:
        chosen = {key: rank for key, rank in order.items() if not waiting.num_nodes or rank < waiting.num_nodes}
        rest = [self._name(key) for key in order if key not in chosen]
        warnings = []
        if rest:
            warnings.append(
                f"{len(order)} nodes have registered and num_nodes is {waiting.num_nodes}; "
                f"not used: {', '.join(sorted(rest))}"
            )
        self._emit(Answer(waiting.peer, waiting.id, Nodes(self._freeze(chosen, now), warnings)))

    def _time_out(self, waiting: _Waiting, missing: list[int], seen: Mapping[int, str], now: float) -> None:
        ranks = ", ".join(f"{rank} ({seen.get(rank, 'never seen')})" for rank in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        self._emit(
            Refuse(
                waiting.peer,
                waiting.id,
                "timeout",
                f"{waiting.num_nodes - len(missing)} of {waiting.num_nodes} nodes after {now - waiting.since:.0f} s; "
                f"missing rank{'s' * (len(missing) > 1)} {ranks}{more}. Does agentd run there, with --connect to this "
                "head?",
                tuple(missing),
            )
        )


class NodeTable:
    """All nodes.

    Args:
        timing: the head's timers.
        emit: takes commands.
        on_lost: called with a node whose workers are gone with it, why, whether that is certain: it said so itself,
            and the hello of the agentd that takes its place, None if there is none.
        before: what an earlier head at this place knew.
        now: when this one started.

    Attributes:
        drained: by id why a node takes no new workers, whether or not it is here.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        on_lost: Callable[[Node, str, bool, AgentHello | None], None],
        before: Snapshot,
        now: float,
    ) -> None:
        self._timing = timing
        self._emit = emit
        self._on_lost = on_lost
        self._kept = {node.report.node_id: node for node in before.nodes}
        self._nodes = {id: _awaited(node, now) for id, node in self._kept.items()}
        self._by_peer: dict[bytes, Node] = {}
        self._ranks = {id: node.rank for id, node in self._kept.items() if node.rank is not None}
        self.drained = dict(before.drained)
        for id in self.drained.keys() & self._nodes.keys():
            self._nodes[id].draining = self.drained[id]
        self._waits = NodeWaits(emit, self._order, self._freeze, lambda id: self._nodes[id].name, self._seen_ranks)
        self._lost = Tombstones(NODE, emit, before)
        self._replaced = Tombstones(REPLACED, emit, before)

    # --- looking ---

    def of_peer(self, peer: bytes) -> Node | None:
        """The living node that this peer is the agent of."""
        return self._by_peer.get(peer)

    def get(self, node_id: str) -> Node | None:
        """The living node of this id."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.alive else None

    def known(self, node_id: str) -> Node | None:
        """The node of this id, a lost one too."""
        return self._nodes.get(node_id)

    def alive(self) -> Iterable[Node]:
        """All living nodes."""
        return self._by_peer.values()

    def all(self) -> Iterable[Node]:
        """All nodes that are known, lost ones too."""
        return self._nodes.values()

    def missing(self) -> list[Node]:
        """Nodes of an earlier head that have not come back to this one yet."""
        return [node for node in self._nodes.values() if node.life is NodeLife.REGISTERING]

    def by_rank(self) -> dict[int, Node]:
        """Living nodes by their ranks."""
        found = {rank: self.get(node_id) for node_id, rank in self._ranks.items()}
        return {rank: node for rank, node in found.items() if node is not None}

    def rank(self, node: Node) -> int:
        """Its rank, -1 as long as it has none."""
        return self._ranks.get(node.id, -1)

    def states(self, now: float) -> list[NodeState]:
        """All nodes, lost ones too, those with a rank first."""
        found = [node.state(self.rank(node), now) for node in self._nodes.values()]
        return sorted(found, key=lambda state: (state.rank < 0, state.rank, state.report.node_id))

    def hostname(self, node_id: str) -> str:
        """What people call a node, as long as anything is known of it."""
        node = self._nodes.get(node_id)
        return node.report.hostname if node is not None else node_id

    # --- coming and going ---

    def hello(self, peer: bytes, hello: AgentHello, now: float, member: Member = LOCAL) -> Node:
        """An agent registers, or says again that it is there.

        Raises:
            Refusal: this incarnation has ended, the peer is another node's, or the node's rank cannot be.
        """
        lost = self._lost.get(hello.incarnation)
        if lost is not None:
            raise Refusal("node_lost", f"incarnation {hello.incarnation} of this node {lost}; come back as a new one")
        replaced = self._replaced.get(hello.incarnation)
        if replaced is not None:
            raise Refusal("config", f"{replaced}: two agentds run as one node; give each its own --node-id")
        other = self._by_peer.get(peer)
        if other is not None and other.id != hello.node.node_id:
            raise Refusal("protocol", f"this connection is node {other.name}'s; another node's agentd has its own")
        known = self._nodes.get(hello.node.node_id)
        protocol = agreed(hello.protocol, hello.newest)
        node = Node(
            hello.node, hello.incarnation, peer, hello.is_head, now, now, hello.keeps, member=member, protocol=protocol
        )
        if known is not None:
            node.jobs = known.jobs
        self._release(now)
        self._check_rank(node, now)
        if known is not None and known.incarnation != hello.incarnation:
            self._replaced.add(known.incarnation, f"node {known.name} is served by a newer agentd", by=member)
            if known.alive:
                self._end(known, "replaced", "its agentd was started anew", now, hello)
        elif known is not None and known.alive:
            self._by_peer.pop(known.peer, None)
            node.life, node.since, node.log_name = known.life, known.since, known.log_name
            self._end_suspicion(known, now)
        node.step("hello", now)
        if node.id in self.drained:
            node.draining = self.drained[node.id]
            node.step("drain", now)
        self._nodes[node.id] = self._by_peer[peer] = node
        if node.report.rank is not None:
            self._ranks[node.id] = node.report.rank
        self._keep(node)
        self._waits.settle(now)
        return node

    def heard(self, peer: bytes, now: float) -> None:
        """An agent said something, whatever it was."""
        node = self._by_peer[peer]
        self._end_suspicion(node, now)
        node.last_seen = now
        node.step("heard", now)

    def _end_suspicion(self, node: Node, now: float) -> None:
        if node.life is NodeLife.SUSPECT:
            self._emit(of_node("node_heard", node, f"is heard again after {now - node.last_seen:.1f} s"))

    def drain(self, node_id: str, why: str, now: float) -> None:
        """Count a known node among those to be used no more, also when it is away and comes back."""
        self.drained[node_id] = why
        node = self._nodes[node_id]
        node.draining = why
        if node.alive:
            node.step("drain", now)

    def undrain(self, node_id: str, now: float) -> None:
        """A node that was drained may be used again."""
        del self.drained[node_id]
        node = self._nodes.get(node_id)
        if node is not None:
            node.draining = ""
            if node.alive:
                node.step("undrain", now)
                self._waits.settle(now)

    def left(self, node: Node, reason: str, now: float) -> None:
        """An agent said goodbye: its workers are gone and its rank is free."""
        self._end(node, "left", reason or "its agentd was stopped", now)
        self._lost.add(node.incarnation, "said goodbye", certain=True, by=node.member)
        self._forget(node)

    def give_up_missing(self, waited_s: float, now: float) -> None:
        """Nodes of an earlier head that did not come back in time are lost."""
        for node in self.missing():
            reason = f"it did not come back within {waited_s:.0f} s after the head was restarted"
            self._lost.add(node.incarnation, f"was declared lost: {reason}")
            self._end(node, "expired", reason, now)

    def tick(self, now: float) -> None:
        """Time has passed: suspect, lose, give up waiting."""
        for node in list(self._by_peer.values()):
            if now >= node.last_seen + self._timing.lease_s:
                silence = now - node.last_seen
                lost = f"was declared lost after {silence:.0f} s of silence"
                self._lost.add(node.incarnation, lost, by=node.member)
                self._end(node, "expired", f"it was silent for {silence:.0f} s", now)
            elif node.life is NodeLife.READY and now >= node.last_seen + self._timing.suspect_s:
                node.step("silent", now)
                self._emit(of_node("node_suspect", node, f"was silent for {now - node.last_seen:.1f} s"))
                self._emit(Notify(node.peer, Beat(PING)))
        self._release(now)
        self._waits.settle(now)
        self._waits.tick(now)

    def revoked(self, node: Node, reason: str, now: float) -> None:
        """The agent's key is not good any more: nothing that it says counts, and its workers end by themselves."""
        self._lost.add(node.incarnation, f"was declared lost: {reason}", by=node.member)
        self._end(node, "expired", reason, now)

    def unreachable(self, peer: bytes, now: float) -> None:
        """An agent is not connected: one that is silent as well has ended. One that was just heard is reconnecting.

        Where workers outlive their agentd it has one lease to be started again.
        """
        node = self._by_peer.get(peer)
        if node is not None and node.life is NodeLife.SUSPECT and not node.keeps:
            lost = "was declared lost: it was silent and its connection closed"
            self._lost.add(node.incarnation, lost, by=node.member)
            self._end(
                node, "expired", f"its agentd was silent for {now - node.last_seen:.0f} s and is not connected", now
            )

    def stalled(self, seconds: float, now: float) -> None:
        """The head stood still: nobody was silent."""
        for node in self._by_peer.values():
            node.last_seen = self._timing.after_stall(node.last_seen, seconds, now)

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        times = [self._waits.next_deadline()]
        for node in self._nodes.values():
            if node.life is NodeLife.READY:
                times.append(node.last_seen + self._timing.suspect_s)
            elif node.alive:
                times.append(node.last_seen + self._timing.lease_s)
            elif node.life is NodeLife.LOST:
                times.append(node.since + self._timing.rank_hold_s)
        return min(times)

    def _end(self, node: Node, event: str, reason: str, now: float, next: AgentHello | None = None) -> None:
        node.step(event, now)
        self._keep(node)
        self._by_peer.pop(node.peer, None)
        self._on_lost(node, reason, event == "left", next)

    # --- ranks ---

    def _release(self, now: float) -> None:
        """Forget lost nodes whose workers have certainly ended: their ranks are free."""
        for node in [n for n in self._nodes.values() if n.life is NodeLife.LOST]:
            if now >= node.since + self._timing.rank_hold_s:
                self._forget(node)

    def _keep(self, node: Node) -> None:
        """Have a restarted head know this node, and its rank if it is frozen."""
        member = node.member.name if node.member.role == "agent" else ""
        known = KnownNode(node.report, node.incarnation, node.is_head, self._ranks.get(node.id), not node.alive, member)
        if self._kept.get(node.id) != known:
            self._kept[node.id] = known
            self._emit(Persist(known))

    def _forget(self, node: Node) -> None:
        self._ranks.pop(node.id, None)
        del self._nodes[node.id]
        if self._kept.pop(node.id, None) is not None:
            self._emit(Persist(ForgetNode(node.id)))

    def _check_rank(self, node: Node, now: float) -> None:
        """Refuse a node whose RLINF_NODE_RANK cannot be.

        An agent with a key tries again: whoever else came first with a rank that is wrong keeps it out no longer than
        he is there himself. One without has but its own configuration to blame, and ends.
        """
        others = [other for other in self._by_peer.values() if other.id != node.id]
        for holder in self._nodes.values():
            if holder.alive or holder.id == node.id:
                continue
            lost = holder.life is NodeLife.LOST
            ago = f"{now - holder.since:.0f} s ago"
            where = f"was lost {ago}" if lost else f"a head that was restarted {ago} awaits"
            if node.report.rank is not None and self.rank(holder) == node.report.rank:
                left = holder.since + self._timing.rank_hold_s - now
                raise Refusal(
                    "unreachable",
                    f"rank {node.report.rank} belongs to node {holder.name}, which {where}; its workers may still be "
                    f"running, so it is given to another in {left:.0f} s at the earliest",
                )
            if not lost and (node.report.rank is None) != (holder.report.rank is None):
                stated = "not set" if node.report.rank is None else "set"
                raise Refusal(
                    "unreachable", f"{NODE_RANK} is {stated} here, unlike on node {holder.name}, which {where}"
                )
        try:
            order_nodes([other.registered() for other in [*others, node]], self._ranks, complete=False)
        except ConfigError as error:
            if node.member == LOCAL:
                raise Refusal("config", str(error.args[0]), error.path) from None
            raise Refusal("unreachable", f"{error.path} {error.args[0]}") from None

    def _usable(self) -> list[Node]:
        return [node for node in self._by_peer.values() if node.usable]

    def _order(self) -> dict[str, int]:
        """What every usable node's rank would be, by id."""
        return order_nodes([node.registered() for node in self._usable()], self._ranks, complete=False)

    # --- waiting for nodes ---

    def wait(self, peer: bytes, id: int, asked: GetNodes, now: float) -> None:
        """Answer when there are enough nodes, or at the asker's deadline."""
        self._waits.add(peer, id, asked, now)

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody waits there any more."""
        self._waits.forget(peer)

    def _freeze(self, ranks: Mapping[str, int], now: float) -> list[NodeState]:
        self._ranks.update(ranks)
        for id in ranks:
            self._keep(self._nodes[id])
        return [self._nodes[id].state(rank, now) for id, rank in sorted(ranks.items(), key=lambda item: item[1])]

    def _seen_ranks(self, now: float) -> dict[int, str]:
        found: dict[int, str] = {}
        for node in self._nodes.values():
            draining = node.life is NodeLife.DRAINING
            how = f" is {node.condition}" if draining else f", last seen {now - node.last_seen:.0f} s ago"
            found.setdefault(self.rank(node), f"{node.name}{how}")
        return found


def _awaited(known: KnownNode, now: float) -> Node:
    """A node of an earlier head, as long as it has not come back to this one."""
    member = Member("agent", known.member) if known.member else LOCAL
    node = Node(known.report, known.incarnation, b"", known.is_head, now, now, member=member)
    if known.lost:
        node.step("expired", now)
    return node
