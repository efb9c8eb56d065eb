"""Workers that do not answer, or are in one call for long: shown and told, never killed. Pure."""

from __future__ import annotations

from rlinf_actors.head.commands import Emit
from rlinf_actors.head.groups import GroupTable
from rlinf_actors.head.happenings import of_worker
from rlinf_actors.head.records import Node, Worker
from rlinf_actors.wire.agents import WorkersHealth
from rlinf_actors.wire.values import WorkerHealth, WorkerPulse


class HealthNotes:
    """Keeps what agents say of their workers beside the workers' life cycle.

    Args:
        emit: takes commands.
        groups: the workers.
    """

    def __init__(self, emit: Emit, groups: GroupTable) -> None:
        self._emit = emit
        self._groups = groups

    def said(self, node: Node, body: WorkersHealth, wall: float) -> None:
        """An agent has seen changes; *wall* is the time in seconds since the epoch."""
        for one in body.workers:
            worker = self._groups.worker_on(node, one.id)
            if worker is not None:
                self._note(node, worker, one, wall)
                self._groups.changed(worker)

    def _note(self, node: Node, worker: Worker, said: WorkerHealth, wall: float) -> None:
        before, name = worker.pulse, node.report.hostname
        notable = said.unresponsive or said.method
        pulse = WorkerPulse(said.unresponsive, said.method, wall - said.for_s, said.waiting) if notable else None
        worker.pulse = pulse
        was = before.unresponsive if before is not None else ""
        if said.unresponsive and not was:
            text = f"is unresponsive: {said.unresponsive}, for {said.for_s:.0f} s now; it is not killed for that"
            self._emit(of_worker("worker_unresponsive", worker, name, text))
        elif was and not said.unresponsive and before is not None:
            text = f"answers again after {wall - before.since:.0f} s"
            self._emit(of_worker("worker_responsive", worker, name, text))
