"""Nodes: registration, leases, ranks, and the requests of drivers that wait for enough nodes. Pure.

A node is suspect after a few missed heartbeats, and lost when its lease ends. A lost node keeps its rank for
`Timing.rank_hold_s`, until none of its workers can be running; then its record is dropped. The head fixes a node's rank
when the node's configuration sets the rank, or when a driver first gets the node.

A hello does not take over a node that lives: `head.rivals`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlinf_actors.errors import ConfigError
from rlinf_actors.head import commands
from rlinf_actors.head.client_ends import PING
from rlinf_actors.head.event_log import of_node
from rlinf_actors.head.node_requests import NAMED, NodeRequests
from rlinf_actors.head.owners import first_of
from rlinf_actors.head.quotas import Quota, Tombstones, label
from rlinf_actors.head.records import Index, Node, NodeLife
from rlinf_actors.head.rivals import check_only_node, check_rival, proof_of
from rlinf_actors.head.slices import Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.model.readable import duration
from rlinf_actors.net.link import is_older
from rlinf_actors.placement.node_order import order_nodes
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.settings import NODE_RANK
from rlinf_actors.wire.agent_messages import AgentHello, Beat
from rlinf_actors.wire.values import NodeState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

TICK_S = 0.1
"""A node becomes suspect up to so many seconds late. The check is due for each node all the time, so checks of many
nodes share one timer."""


class NodeTable:
    """All nodes with their leases and ranks, and the drivers that wait for nodes.

    Attributes:
        drained: node id -> why the node takes no new workers. Nodes that are away are included.
        requests: the drivers that wait for nodes.
        missing: ids of the nodes that were registered with the earlier head and have not registered with this head.
    """

    def __init__(self, head: Coordinator, before: commands.Snapshot) -> None:
        self._head = head
        self._timing = head.timing
        self._by_peer: dict[bytes, Node] = {}
        self._nodes: dict[str, Node] = {}
        self._known = {node.report.node_id: node for node in before.nodes}  # what is on disk
        self._ranks = {id: node.rank for id, node in self._known.items() if node.rank is not None}
        self._ranked = {rank: id for id, rank in self._ranks.items()}
        self._timers: dict[str, HeapTimer] = {}
        self.requests = NodeRequests(head, self)
        self._ordered: Mapping[int, str] | None = None  # cache of `order`
        self._stated: dict[str, None] = {}  # ids of the living and awaited nodes that state their rank
        self._silent: dict[str, None] = {}  # ids of those that do not
        self._lost = Tombstones(commands.NODE, head.emit, before)
        self._replaced = Tombstones(commands.REPLACED, head.emit, before)
        self._of_member = Quota("nodes")
        self._on_host: Index[Node] = Index()
        self._of_key: Index[Node] = Index()  # by public key
        self._of_name: Index[Node] = Index()  # by host name
        self._of_holder: Index[Node] = Index()  # by the label of the member
        self._in_job: Index[str] = Index()  # ids of the nodes that have, or had, workers of a job
        self.drained = dict(before.drained)
        self.missing: set[str] = set()
        for id, known in self._known.items():
            member = Member("agent", known.member, user=known.user) if known.member else LOCAL
            node = Node(
                known.report,
                known.incarnation,
                b"",
                known.is_head,
                head.now,
                head.now,
                member=member,
                proof=known.proof,
            )
            node.draining = self.drained.get(id, "")
            if known.lost:
                node.step("expired", head.now)
            else:
                self.missing.add(id)
            self._put(node)

    # --- queries ---

    def of_peer(self, peer: bytes) -> Node | None:
        """Return the living node whose agentd has this connection, None without such a node."""
        return self._by_peer.get(peer)

    def get(self, node_id: str) -> Node | None:
        """Return the living node with this id, None if it is lost or unknown."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.alive else None

    def known(self, node_id: str) -> Node | None:
        """Return the node with this id, living or lost; None if it is unknown."""
        return self._nodes.get(node_id)

    def count(self) -> int:
        """Return the number of living nodes."""
        return len(self._by_peer)

    def alive(self) -> Iterable[Node]:
        return self._by_peer.values()

    def all(self) -> Iterable[Node]:
        """Return all nodes, living, awaited and lost."""
        return self._nodes.values()

    def on_host(self, host: str) -> list[Node]:
        """Return the living nodes on the machine with this host id."""
        return [node for node in self._on_host.of(host) if node.alive]

    def of_key(self, public: str) -> list[Node]:
        """Return the living nodes whose agentd has this public key."""
        return [node for node in self._of_key.of(public) if node.alive]

    def of_member(self, member: Member) -> list[Node]:
        """Return the nodes of a member with a key, living, awaited and lost."""
        return self._of_holder.of(label(member))

    def of_job(self, namespace: str) -> list[Node]:
        """Return the living nodes that have, or had, workers of this job."""
        return [node for node in map(self.get, self._in_job.of(namespace)) if node is not None]

    def has_job(self, node: Node, namespace: str) -> None:
        """Note that the node gets, or has, workers of this job."""
        node.jobs.add(namespace)
        self._in_job.add(namespace, node.id, node.id)

    def forget_job(self, namespace: str) -> None:
        """Drop what is known of a job that has ended."""
        for node in map(self._nodes.get, self._in_job.pop(namespace)):
            if node is not None:
                node.jobs.discard(namespace)

    def of_rank(self, rank: int) -> Node | None:
        """Return the living node whose rank is fixed to this number, None without such a node."""
        return self.get(self._ranked.get(rank, ""))

    def rank(self, node: Node) -> int:
        """Return the node's fixed rank, -1 if its rank is not fixed yet."""
        return self._ranks.get(node.id, -1)

    def states(self, nodes: Iterable[Node]) -> list[NodeState]:
        return [node.state(self.rank(node), self._head.now) for node in nodes]

    def named(self, node_id: str) -> tuple[str, int]:
        """Return this node's host name (its id, if it is unknown), and its rank if another node has the name, or -1."""
        node = self._nodes.get(node_id)
        name = node.report.hostname if node is not None else node_id
        return name, self._ranks.get(node_id, -1) if len(self._of_name.of(name)) > 1 else -1

    # --- registration ---

    def check_member(self, member: Member) -> None:
        """Raise Refused if this member already has as many nodes as the quota allows."""
        holder = label(member)
        held = lambda: first_of(self._of_holder.of(holder), self._seen)  # noqa: E731
        self._of_member.check(holder, str(member), held, kind="unreachable")  # its agentd tries again

    def _seen(self, node: Node) -> str:
        return f"{node.name}, {node.life.value} for {duration(self._head.now - node.since)}"

    def hello(self, peer: bytes, hello: AgentHello, member: Member) -> Node:
        """Register the node of an agentd. If it is registered already, use the new connection *peer* from now on.

        Raises:
            Refused: this incarnation was lost or replaced, or its rank is impossible.
        """
        now = self._head.now
        lost = self._lost.get(hello.incarnation)
        if lost is not None:
            raise commands.Refused(
                "node_lost", f"incarnation {hello.incarnation} of this node {lost}; come back as a new one"
            )
        replaced = self._replaced.get(hello.incarnation)
        if replaced is not None:
            raise commands.Refused("node_lost", f"{replaced}; come back as a new one")
        other = self._by_peer.get(peer)
        if other is not None and other.id != hello.node.node_id:
            raise commands.Refused(
                "protocol", f"this connection is node {other.name}'s; another node's agentd has its own"
            )
        known = self._nodes.get(hello.node.node_id)
        if known is not None and known.incarnation == hello.incarnation and is_older(peer, known.peer):
            raise commands.Refused("hello", f"the agentd of node {known.name} has replaced this connection")
        proof = proof_of(hello.secret)
        if known is not None:
            check_rival(self._head, known, hello, proof)
        check_only_node(self._head, hello, member)
        node = Node(
            hello.node, hello.incarnation, peer, hello.is_head, now, now, hello.keeps, member=member,
            proof=proof, pid=hello.pid, program=hello.program,
        )  # fmt: skip
        if known is not None:
            node.jobs, node.log_name, node.uncredited = known.jobs, known.log_name, known.uncredited
        self._check_rank(node)
        more = known is None or not known.usable or known.registered != node.registered
        if known is not None and known.incarnation != hello.incarnation:
            self._replaced.add(known.incarnation, f"node {known.name} is served by a newer agentd", by=member)
            if known.alive:
                self._end(known, "replaced", "its agentd was started anew", hello)
        elif known is not None and known.alive:
            self._by_peer.pop(known.peer, None)
            node.life, node.since = known.life, known.since
            self._end_suspicion(known)
        node.step("hello", now)
        if node.id in self.drained:
            node.draining = self.drained[node.id]
            node.step("drain", now)
        self.missing.discard(node.id)
        self._by_peer[peer] = node
        self._put(node)
        if node.report.rank is not None:
            self._fix_rank(node.id, node.report.rank)
        self._persist(node)
        if more:
            self._may_answer()
        return node

    def heard(self, node: Node) -> None:
        """Renew the lease of a node whose agentd has sent a message of any kind."""
        was_suspect = node.life is NodeLife.SUSPECT
        if was_suspect:
            self._end_suspicion(node)
        node.last_seen = self._head.now
        if was_suspect:
            node.step("heard", self._head.now)
            self._arm(node)

    def _end_suspicion(self, node: Node) -> None:
        if node.life is NodeLife.SUSPECT:
            silence = self._head.now - node.last_seen
            self._head.emit(of_node("node_heard", node, f"is heard again after {silence:.1f} s"))

    def drain(self, node_id: str, why: str) -> None:
        """Place no new workers on this node until `undrain`, even if the node is away now. *why* is for people."""
        self.drained[node_id] = why
        node = self._nodes[node_id]
        node.draining = why
        self._ordered = None
        if node.alive:
            node.step("drain", self._head.now)

    def undrain(self, node_id: str) -> None:
        del self.drained[node_id]
        node = self._nodes.get(node_id)
        if node is not None:
            node.draining = ""
            if node.alive:
                node.step("undrain", self._head.now)
                self._arm(node)
                self._may_answer()

    # --- ends ---

    def left(self, node: Node, reason: str) -> None:
        """Remove a node whose agentd said goodbye. Its workers have ended, and its rank becomes free."""
        self._end(node, "left", reason or "its agentd was stopped")
        self._lost.add(node.incarnation, "said goodbye", certain=True, by=node.member)
        self._forget(node)
        self._may_answer()

    def abandon_missing(self) -> Sliced[None]:
        """Declare every node lost that has not registered again since the head was restarted."""
        waited = self._head.now - self._head.started_at
        reason = f"it did not come back within {waited:.0f} s after the head was restarted"
        for ids, more in pieces([id for id in self._nodes if id in self.missing]):
            for id in ids:
                if id in self.missing:
                    node = self._nodes[id]
                    self._lost.add(node.incarnation, f"was declared lost: {reason}")
                    self._end(node, "expired", reason)
            if more:
                yield

    def revoked(self, node: Node, reason: str) -> None:
        """Declare a node lost because its agentd's key is no longer valid."""
        self._declare_lost(node, reason, f": {reason}")

    def unreachable(self, peer: bytes) -> None:
        """If a suspect node's agentd is no longer connected by *peer*, declare the node lost before its lease ends.

        Two kinds of node keep their lease: a node that is not suspect, because its agentd may be reconnecting; and a
        node whose workers may outlive its agentd, because the next agentd may take them over.
        """
        node = self._by_peer.get(peer)
        if node is not None and node.life is NodeLife.SUSPECT and not node.keeps:
            silence = self._head.now - node.last_seen
            reason = f"its agentd was silent for {silence:.0f} s and is not connected"
            self._declare_lost(node, reason, ": it was silent and its connection closed")

    def stalled(self, seconds: float) -> None:
        for node in self._by_peer.values():
            node.last_seen = self._timing.after_stall(node.last_seen, seconds, self._head.now)

    def _declare_lost(self, node: Node, reason: str, why: str) -> None:
        """Declare a node lost. *reason* goes to clients and the log; *why* goes to the agentd if it returns."""
        self._lost.add(node.incarnation, f"was declared lost{why}", by=node.member)
        self._end(node, "expired", reason)

    def _end(self, node: Node, event: str, reason: str, successor: AgentHello | None = None) -> None:
        node.step(event, self._head.now)
        self.missing.discard(node.id)
        self._persist(node)
        self._by_peer.pop(node.peer, None)
        self._ordered = None
        self._drop_statement(node)
        self._arm(node)
        self._head.node_lost(node, reason, event == "left", successor)

    # --- timers ---

    def _arm(self, node: Node) -> None:
        self._head.timers.cancel(self._timers.pop(node.id, None))
        due = self._due(node)
        if node.life is NodeLife.READY:  # one tick for all nodes that were last heard in the same part of a second
            due = math.ceil(due / TICK_S) * TICK_S
        if due < math.inf:
            self._timers[node.id] = self._head.timers.at(due, lambda: self._time_passed(node.id))

    def _due(self, node: Node) -> float:
        if node.life is NodeLife.READY:
            return node.last_seen + self._timing.suspect_s
        if node.life is NodeLife.LOST:
            return node.since + self._timing.rank_hold_s
        return node.last_seen + self._timing.lease_s if node.alive else math.inf

    def _time_passed(self, node_id: str) -> None:
        node, now = self._nodes[node_id], self._head.now
        silence = now - node.last_seen
        if now < self._due(node):
            self._arm(node)  # it was heard meanwhile
        elif node.life is NodeLife.LOST:
            self._forget(node)
            self._may_answer()
        elif now >= node.last_seen + self._timing.lease_s:
            self._declare_lost(node, f"it was silent for {silence:.0f} s", f" after {silence:.0f} s of silence")
        else:
            node.step("silent", now)
            self._head.emit(of_node("node_suspect", node, f"was silent for {silence:.1f} s"))
            self._head.emit(commands.Notify(node.peer, Beat(PING)))
            self._arm(node)

    # --- ranks ---

    def _put(self, node: Node) -> None:
        before = self._nodes.get(node.id)
        if before is not None:
            self._of_member.free(label(before.member))
            self._on_host.discard(before.report.host, node.id)
            self._of_name.discard(before.report.hostname, node.id)
            self._of_key.discard(before.member.key, node.id)
            self._of_holder.discard(label(before.member), node.id)
            self._drop_statement(before)
        if node.life is not NodeLife.LOST:
            (self._silent if node.report.rank is None else self._stated)[node.id] = None
        self._of_member.take(label(node.member))
        self._on_host.add(node.report.host, node.id, node)
        self._of_name.add(node.report.hostname, node.id, node)
        if node.member.key:
            self._of_key.add(node.member.key, node.id, node)
        if holder := label(node.member):
            self._of_holder.add(holder, node.id, node)
        self._nodes[node.id] = node
        self._arm(node)

    def _persist(self, node: Node) -> None:
        """If the record of this node or its fixed rank has changed, write it to disk for a restarted head."""
        member, user = (node.member.name, node.member.user) if node.member.role == "agent" else ("", "")
        known = commands.KnownNode(
            node.report, node.incarnation, node.is_head, self._ranks.get(node.id), not node.alive, member, user,
            node.proof,
        )  # fmt: skip
        if self._known.get(node.id) != known:
            self._known[node.id] = known
            self._head.emit(commands.Persist(known))

    def _forget(self, node: Node) -> None:
        self._head.timers.cancel(self._timers.pop(node.id, None))
        rank = self._ranks.pop(node.id, None)
        if rank is not None and self._ranked.get(rank) == node.id:
            del self._ranked[rank]
        self._of_member.free(label(node.member))
        self._on_host.discard(node.report.host, node.id)
        self._of_name.discard(node.report.hostname, node.id)
        self._of_key.discard(node.member.key, node.id)
        self._of_holder.discard(label(node.member), node.id)
        for namespace in node.jobs:
            self._in_job.discard(namespace, node.id)
        self._drop_statement(node)
        self._head.output.forget_node(node)
        del self._nodes[node.id]
        if self._known.pop(node.id, None) is not None:
            self._head.emit(commands.Persist(commands.ForgetNode(node.id)))

    def _drop_statement(self, node: Node) -> None:
        self._silent.pop(node.id, None)
        self._stated.pop(node.id, None)

    def _may_answer(self) -> None:
        """Note that one more node may have a rank now, for the drivers that wait for nodes."""
        self._ordered = None
        self.requests.nodes_changed()

    def give_rank(self, node: Node, rank: int) -> None:
        """Fix the rank that `order` gives the node, because a driver gets the node."""
        if self._ranked.get(rank) != node.id:
            self._fix_rank(node.id, rank)
            self._persist(node)

    def ranked(self, rank: int) -> Node | None:
        """Return the node, living, awaited or lost, whose rank is fixed to this number; None without such a node."""
        return self._nodes.get(self._ranked.get(rank, ""))

    @property
    def state_ranks(self) -> bool:
        """True if the configuration of the nodes sets their ranks."""
        return bool(self._stated)

    def _fix_rank(self, node_id: str, rank: int) -> None:
        before = self._ranks.get(node_id)
        if before is not None and self._ranked.get(before) == node_id:
            del self._ranked[before]
        self._ranks[node_id] = rank
        self._ranked[rank] = node_id

    def _check_rank(self, node: Node) -> None:
        """Raise Refused if the node's RLINF_NODE_RANK conflicts with the ranks of the other nodes.

        An agentd with a key gets an error after which it tries again, because the other node may have the wrong rank
        and may leave. An agentd without a key gets an error after which it exits, because its configuration must be
        corrected.
        """
        now, rivals = self._head.now, self._rivals(node)
        for holder in rivals:
            if holder.alive:
                continue
            lost = holder.life is NodeLife.LOST
            ago = f"{now - holder.since:.0f} s ago"
            where = f"was lost {ago}" if lost else f"a head that was restarted {ago} awaits"
            if node.report.rank is not None and self.rank(holder) == node.report.rank:
                left = holder.since + self._timing.rank_hold_s - now
                raise commands.Refused(
                    "unreachable",
                    f"rank {node.report.rank} belongs to node {holder.name}, which {where}; its workers may still be "
                    f"running, so it is given to another in {left:.0f} s at the earliest",
                )
            if not lost and (node.report.rank is None) != (holder.report.rank is None):
                stated = "not set" if node.report.rank is None else "set"
                raise commands.Refused(
                    "unreachable", f"{NODE_RANK} is {stated} here, unlike on node {holder.name}, which {where}"
                )
        others = [node, *(other for other in rivals if other.alive)]
        if len(others) == 1 and node.report.rank is None:
            return  # it has no rank yet, or keeps the one that it has
        ranks = {other.id: self._ranks[other.id] for other in others if other.id in self._ranks}
        try:
            order_nodes([*(other.registered for other in others[1:]), node.registered], ranks, complete=False)
        except ConfigError as error:
            if node.member == LOCAL:
                raise commands.Refused("config", str(error.args[0]), error.path) from None
            raise commands.Refused("unreachable", f"{error.path} {error.args[0]}") from None

    def _rivals(self, node: Node) -> list[Node]:
        """Return the other nodes with which the rank of *node* may conflict: at most a few, however many there are.

        They are the node that has its rank, and the first of those that state a rank if *node* states none, or the
        other way round.
        """
        unlike = self._silent if node.report.rank is not None else self._stated
        ids = list(itertools.islice((id for id in unlike if id != node.id), NAMED))
        if node.report.rank is not None and node.report.rank in self._ranked:
            ids.append(self._ranked[node.report.rank])
        return [self._nodes[id] for id in dict.fromkeys(ids) if id != node.id]

    def order(self) -> Mapping[int, str]:
        """Return the ids of the usable nodes by the ranks that they would get now, the lowest rank first."""
        if self._ordered is None:
            usable = [node.registered for node in self._by_peer.values() if node.usable]
            order = order_nodes(usable, self._ranks, complete=False)
            self._ordered = {rank: id for id, rank in sorted(order.items(), key=lambda item: item[1])}
        return self._ordered
