"""The requests of drivers that wait for enough nodes. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head import commands
from rlinf_actors.head.heaviest import STALE
from rlinf_actors.head.records import Index, NodeLife
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.plurals import counted
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.client_messages import GetNodes, Nodes
from rlinf_actors.wire.values import NodeState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator
    from rlinf_actors.head.node_table import NodeTable

NAMED = 20
"""Largest number of nodes or ranks that a text for people names."""


class _NodeRequest(msgspec.Struct, eq=False):
    """A GetNodes request that waits for nodes until its timer fires. It came at `since`, in monotonic seconds.

    `answering` is True while the nodes are there and the answer is made, in slices.
    """

    peer: bytes
    id: int
    num_nodes: int
    since: float
    timer: HeapTimer
    answering: bool = False


class NodeRequests:
    """The GetNodes requests that have no answer yet.

    Each change of the nodes gives a node to one rank at most. So requests that lacked ten nodes are examined after ten
    changes: a thousand nodes that join while drivers wait for them are not sorted a thousand times.
    """

    def __init__(self, head: Coordinator, nodes: NodeTable) -> None:
        self._head = head
        self._nodes = nodes
        self._requests: dict[int, dict[_NodeRequest, None]] = {}  # by the number of nodes asked for
        self._of_peer: Index[_NodeRequest] = Index()
        self._changes = 0  # number of calls of `nodes_changed`
        self._due: list[tuple[int, int]] = []  # heap of that number when to examine requests, and nodes asked for
        self._due_of: dict[int, int] = {}  # number of nodes asked for -> the entry in `_due` that counts
        self._first_lacking: dict[int, int] = {}  # number of nodes asked for -> lowest rank without a node

    def wait(self, peer: bytes, id: int, asked: GetNodes) -> None:
        """Answer a request for nodes when enough nodes have registered; refuse it when the client's timeout is over."""
        patience = math.inf if asked.timeout_s is None else asked.timeout_s
        now = self._head.now
        request = _NodeRequest(
            peer, id, asked.num_nodes, now, self._head.timers.at(now + patience, lambda: self._time_out(request))
        )
        alike = self._requests.setdefault(asked.num_nodes, {})
        known = bool(alike) and not next(iter(alike)).answering  # how many nodes lack
        alike[request] = None
        self._of_peer.add(peer, request, request)
        if not known:
            self._examine(asked.num_nodes)

    def forget(self, peer: bytes) -> None:
        for request in self._of_peer.of(peer):
            self._remove(request)

    def _remove(self, request: _NodeRequest) -> None:
        self._head.timers.cancel(request.timer)
        self._of_peer.discard(request.peer, request)
        same = self._requests[request.num_nodes]
        del same[request]
        if not same:
            del self._requests[request.num_nodes]
            self._first_lacking.pop(request.num_nodes, None)
            self._due_of.pop(request.num_nodes, None)

    def nodes_changed(self) -> None:
        """Note that one more node may have a rank now, and answer the requests that have enough nodes."""
        self._changes += 1
        due = []
        while self._due and self._due[0][0] <= self._changes:
            at, num_nodes = heapq.heappop(self._due)
            if self._due_of.get(num_nodes) == at:
                del self._due_of[num_nodes]
                due.append(num_nodes)
        for num_nodes in due:
            if self._certainly_lacks(num_nodes):
                self._examine_after(num_nodes, 1)
            else:
                self._examine(num_nodes)

    def _examine_after(self, num_nodes: int, changes: int) -> None:
        at = self._changes + changes
        self._due_of[num_nodes] = at
        heapq.heappush(self._due, (at, num_nodes))
        # Entries of requests that have ended leave the heap at its top. So many nodes may never come.
        if len(self._due) > STALE + 4 * len(self._due_of):
            self._due = [(at, num_nodes) for num_nodes, at in self._due_of.items()]
            heapq.heapify(self._due)

    def _certainly_lacks(self, num_nodes: int) -> bool:
        """Return True if the rank that was the first to lack a node still belongs to a node that is not there."""
        rank = self._first_lacking.get(num_nodes, -1)
        holder = self._nodes.ranked(rank)
        if holder is None:
            return rank >= 0 and self._nodes.state_ranks  # all nodes state their ranks, and none states this one
        return not holder.usable

    def _examine(self, num_nodes: int) -> None:
        """Answer the requests for so many nodes if they are there."""
        lacking = num_nodes - self._nodes.count()
        if lacking > 0:  # known without the ranks
            self._first_lacking.pop(num_nodes, None)
            self._examine_after(num_nodes, lacking)
            return
        missing = self._missing(num_nodes)
        if missing:
            self._first_lacking[num_nodes] = missing[0]
            self._examine_after(num_nodes, len(missing))
            return
        ready = [request for request in self._requests[num_nodes] if not request.answering]
        for request in ready:
            request.answering = True
        if ready:
            self._head.slices.start(self._answer_all(ready), speaker=self._member(ready[0]))

    def _member(self, request: _NodeRequest) -> Member:
        client = self._head.clients.of_peer(request.peer)
        return client.member if client is not None else LOCAL

    def _missing(self, num_nodes: int) -> list[int]:
        """Return the ranks below *num_nodes* that no usable node has."""
        order = self._nodes.order()
        return [rank for rank in range(num_nodes) if rank not in order]

    def _answer_all(self, requests: Sequence[_NodeRequest]) -> Sliced[None]:
        for number, request in enumerate(requests):
            if number:
                yield
            yield from self._answer(request)

    def _answer(self, request: _NodeRequest) -> Sliced[None]:
        states: list[NodeState] = []
        order = self._nodes.order()
        ranks = range(request.num_nodes) if request.num_nodes else list(order)
        for some, more in pieces(ranks):
            order = self._nodes.order()  # nodes have come since, and another answer has fixed their ranks
            nodes = [(rank, self._nodes.get(order.get(rank, ""))) for rank in some]
            if request.num_nodes and not all(node for _, node in nodes):  # one was lost since `_examine`
                request.answering = False
                self._examine_after(request.num_nodes, 1)
                if request.timer.at <= self._head.now:
                    self._time_out(request)
                return
            for rank, node in nodes:
                if node is not None:
                    self._nodes.give_rank(node, rank)
            found = [node.state(rank, self._head.now) for rank, node in nodes if node is not None]
            states += self._head.admission.shown(found, self._head.clients.of_peer(request.peer), LOCAL)
            if more:
                yield
        if request not in self._requests.get(request.num_nodes, ()):
            return  # it has been refused, or its client has ended
        self._remove(request)
        warnings = []
        if request.num_nodes and request.num_nodes < len(order):
            rest = itertools.islice(order.values(), request.num_nodes, request.num_nodes + NAMED)
            names = ", ".join(sorted(node.name for node in map(self._nodes.get, rest) if node is not None))
            warnings.append(
                f"{len(order)} nodes have registered and num_nodes is {request.num_nodes}; not used: "
                f"{names}{_more(len(order) - request.num_nodes)}"
            )
        self._head.emit(commands.Answer(request.peer, request.id, Nodes(states, warnings)))

    def _time_out(self, request: _NodeRequest) -> None:
        if request.answering or request not in self._requests.get(request.num_nodes, ()):
            return
        self._remove(request)
        self._head.slices.start(self._refuse(request), speaker=self._member(request))

    def _refuse(self, request: _NodeRequest) -> Sliced[None]:
        if request.num_nodes > 10 * PIECE:
            yield  # other requests may be due at the same moment
        missing = self._missing(request.num_nodes)
        ranks = ", ".join(f"{rank} ({self._last_seen(rank)})" for rank in missing[:NAMED])
        text = (
            f"{request.num_nodes - len(missing)} of {counted(request.num_nodes, 'node')} after "
            f"{self._head.now - request.since:.0f} s; missing rank{'s' * (len(missing) > 1)} {ranks}"
            f"{_more(len(missing))}. Does agentd run there, with --connect to this head?"
        )
        self._head.emit(commands.Refuse(request.peer, request.id, "timeout", text, tuple(missing)))

    def _last_seen(self, rank: int) -> str:
        node = self._nodes.ranked(rank)
        if node is None:
            return "never seen"
        draining = node.life is NodeLife.DRAINING
        how = f" is {node.condition}" if draining else f", last seen {self._head.now - node.last_seen:.0f} s ago"
        return f"{node.name}{how}"


def _more(count: int) -> str:
    """Return the end of a list of names of which only the first NAMED are written out."""
    return f" and {count - NAMED} more" if count > NAMED else ""
