"""Clients that wait until there are enough nodes. Pure; each is answered once: by nodes, or at its deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlinf_actors.head.commands import Answer, Emit, Refuse
from rlinf_actors.placement.node_order import missing_ranks
from rlinf_actors.wire.clients import GetNodes, Nodes
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
