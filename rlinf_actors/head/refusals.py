"""What was refused, for the event log: at the head, and at the sockets of the nodes, as their agents say. Pure.

House rule: whoever is refused can make us write a line a minute, and not more: what a stranger sends must not push
everything else out of the log. What nodes tell has no part in what the head tells of itself.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rlinf_actors.head.commands import Emit, Record
from rlinf_actors.head.happenings import of_node, of_worker
from rlinf_actors.head.records import Node, Worker
from rlinf_actors.security.refusals import KINDS, Due, RefusalTally
from rlinf_actors.wire.agents import Refusal, RefusalReport

WINDOW_S = 60.0
KINDS_OF_NODE = 16
"""Of those that nodes tell, of one node: it leaves room for others."""

WorkerOf = Callable[[Node, str], "Worker | None"]
"""The worker of a node with that id, living or not; None for one that is not known."""


class Refusals:
    """All refusals of a cluster.

    Args:
        emit: takes commands.
        worker_of: whose socket an agent speaks of.
    """

    def __init__(self, emit: Emit, worker_of: WorkerOf) -> None:
        self._emit = emit
        self._worker_of = worker_of
        self._own: RefusalTally[Record] = RefusalTally(WINDOW_S)
        self._told: RefusalTally[Record] = RefusalTally(WINDOW_S, KINDS, KINDS_OF_NODE)

    @property
    def count(self) -> int:
        """So many by now, at the head itself."""
        return self._own.count

    def note(self, who: str, kind: str, text: str, now: float, times: int = 1) -> None:
        """The head has refused something, *times* times.

        Args:
            who: was refused; a refusal is a repetition of the one before if *who* and *kind* are the same.
            kind: of the refusal.
            text: one line for people.
            now: the time.
            times: how often.
        """
        if self._own.note(who, kind, Record("refused", text), now, times):
            self._say(self._own, now)

    def told(self, node: Node, report: RefusalReport, now: float) -> None:
        """An agent says whom sockets of its node have refused. It is believed of its own node alone."""
        due = False
        for one in report.refusals:
            due |= self._told.note(node.id, f"{one.worker} {one.text}", self._record(node, one), now, one.times)
        if due:
            self._say(self._told, now)

    def tick(self, now: float) -> None:
        """Time has passed: say how often what was said has happened since."""
        self._say(self._own, now)
        self._say(self._told, now)

    def next_deadline(self) -> float:
        """When `tick` has something to say, infinity for never."""
        return min(self._own.next_deadline(), self._told.next_deadline())

    def _record(self, node: Node, one: Refusal) -> Record:
        worker = self._worker_of(node, one.worker)
        if worker is not None:
            return replace(of_worker("refused", worker, node.report.hostname, f"refused {one.text}"), exit=None)
        where = " at the socket of a worker that has ended" if one.worker else ""
        return of_node("refused", node, f"refused{where} {one.text}")

    def _say(self, tally: RefusalTally[Record], now: float) -> None:
        for due in tally.take(now):
            self._emit(replace(due.what, text=_text(due)))


def _text(due: Due[Record]) -> str:
    text = due.what.text
    if due.others:
        return f"{due.times} more refusals of other kinds in the last {WINDOW_S:.0f} s, the last one: {text}"
    if due.again:
        return f"{text} ({due.times} more in the last {WINDOW_S:.0f} s)"
    return f"{text} ({due.times} times)" if due.times > 1 else text
