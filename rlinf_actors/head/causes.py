"""The first cause among many: when the workers of a group end one after the other, which one was the first. Pure."""

from __future__ import annotations

import math

import msgspec

from rlinf_actors.head.records import Group, Worker
from rlinf_actors.wire.endings import ending
from rlinf_actors.wire.values import ExitReport

TOGETHER_S = 30.0
"""Ends of one group that are no further apart may have one cause: the others of a collective fail by its timeout at the
latest, or at once.
"""


class FirstEnds:
    """The first end of each group, as long as it may be the cause of others."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[float, int, str]] = {}

    def noted(self, group: Group, worker: Worker, node: str, exit: ExitReport, now: float) -> ExitReport:
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
