"""Events about breakpoints of workers: that one was reached, by whom it is debugged, and that the worker goes on. Pure.

Many ranks reach a breakpoint together, and one in a loop is reached again and again. So of each place in a group's code
the event log gets one event of a kind in a minute, the last one, with its time and the number of those before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.event_log import of_worker
from rlinf_actors.head.owners import owner_of
from rlinf_actors.head.records import Node, WorkerRecord
from rlinf_actors.head.refusal_log import RepetitionLog
from rlinf_actors.shown import printable
from rlinf_actors.wire.debug_values import WAITS, DebugAnswer, DebugQuestion, attach_command
from rlinf_actors.wire.event_values import EventKind
from rlinf_actors.wire.values import WorkerPulse

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

PLACE_CHARS = 200
"""Most characters of the place of a breakpoint in an event."""


class BreakpointLog:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._events = RepetitionLog(head, "breakpoints")

    def changed(self, node: Node, worker: WorkerRecord, before: WorkerPulse, now: WorkerPulse) -> None:
        """Log that a worker has left the breakpoint of *before*, and has reached that of *now*. A step of the debugger
        is no event.
        """
        spec, place, left = worker.spec, now.breakpoint[:PLACE_CHARS], before.breakpoint[:PLACE_CHARS]
        if bool(place) == bool(left) and now.stop == before.stop:
            return
        if left:
            self._note("breakpoint_left", node, worker, left, f"goes on after a breakpoint at {left}")
        if place:
            owning = self._head.groups.of_worker(worker.id)
            owner = owner_of(self._head, owning) if owning is not None else ""
            how = attach_command(f"{spec.group}:{spec.rank}", spec.namespace)
            text = f"waits in a breakpoint at {place}{f', for {owner}' if owner else ''}: {how}"
            self._note("breakpoint_reached", node, worker, place, text)

    def asked(self, node: Node, question: DebugQuestion, answer: DebugAnswer) -> None:
        """Log that a person attaches to a worker in a breakpoint, if this is the first question of an attachment."""
        worker = self._head.groups.worker_on(node, question.worker)
        if worker is not None and not question.number and answer.state == WAITS:
            place = printable(answer.place)[:PLACE_CHARS]
            self._note("breakpoint_attached", node, worker, place, f"is debugged at {place} by {question.by}")

    def _note(self, kind: EventKind, node: Node, worker: WorkerRecord, place: str, text: str) -> None:
        event = replace(of_worker(kind, worker, self._head.nodes.named(node.id), text), at=self._head.wall)
        self._events.note(worker.spec.namespace, f"{kind} {worker.spec.group} {place}", event)
