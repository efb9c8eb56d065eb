"""Find workers and templates that do not answer, and calls that take long. Loop thread only.

`HealthMonitor` sends probes to templates on a timer, and reports changes to the head. `HealthTable` decides; it is pure
and gets the time as argument. agentd.workers tells both about workers and answers.

House rules: a worker that does not answer is alive, and is only reported. Silence is measured by agentd's own clock,
less the time in which agentd stood still. For a worker, time in which its template stood still does not count either,
since the worker's answers then wait unread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors import procfs
from rlinf_actors.net.failure_detection import stalled_s
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import WorkersHealth
from rlinf_actors.wire.stack_values import stopped
from rlinf_actors.wire.template_protocol import Pong
from rlinf_actors.wire.values import WorkerHealth

if TYPE_CHECKING:
    from agentd.templates import TemplateProcess

LATE_S = 0.5  # seconds. A template that takes longer to answer a probe has stood still
REPORTS_S = 0.1  # seconds between two reports because of answers. A user's template may send any number of them
METHOD_CHARS = 200  # of a method's name in a report: one message has all workers whose health has changed
NO_ANSWER = "its I/O thread does not answer"
NO_TEMPLATE = "its template does not answer"
STATES = {
    "t": "a debugger has stopped its process",
    "D": "its main thread waits in the kernel for a device or file system, and its I/O thread does not answer",
}
"""Why a worker does not answer, by the state of its process in /proc; `stopped` is that of T."""


class HealthTimes(msgspec.Struct, frozen=True):
    """The times of the checks of workers' health, in seconds, from the configuration."""

    probe_s: float = 2.0  # between two probes
    unresponsive_s: float = 5.0
    long_call_s: float = 10.0


class _WorkerState(msgspec.Struct):
    """The health of one worker: its last answer, the health that was last reported to the head, the time `since` when
    the reported condition began, and the time `stopped_at` when it reached the breakpoint that it is in.
    """

    template: int
    answered_at: float
    pong: Pong
    reported: WorkerHealth
    since: float = 0.0
    stopped_at: float = 0.0


class HealthTable(msgspec.Struct):
    """Decides from the answers of workers and templates whether a worker is unresponsive or runs a long call. Pure.
    `workers` has the workers that are up.
    """

    silent_s: float = 5.0
    long_s: float = 10.0
    workers: dict[str, _WorkerState] = msgspec.field(default_factory=dict)
    _asked_at: dict[int, float] = msgspec.field(default_factory=dict)  # templates that owe an answer

    def worker_up(self, id: str, template: int, now: float) -> None:
        self.workers[id] = _WorkerState(template, now, Pong(id), WorkerHealth(id))

    def worker_ended(self, id: str) -> None:
        self.workers.pop(id, None)

    def why_silent(self, id: str) -> str:
        """Return why a worker that was asked has not answered, for people."""
        known = self.workers.get(id)
        return (known.reported.unresponsive if known is not None else "") or NO_ANSWER

    def template_ended(self, template: int) -> None:
        self._asked_at.pop(template, None)

    def to_probe(self, now: float) -> list[int]:
        """Return the pids of the templates to which a probe is sent now, and record that they owe an answer. These are
        the templates that have workers and have answered their last probe.
        """
        due = {worker.template for worker in self.workers.values()} - self._asked_at.keys()
        self._asked_at.update(dict.fromkeys(due, now))
        return sorted(due)

    def answered(self, template: int, pongs: Iterable[Pong], now: float) -> None:
        """Record that the template with pid *template* answered a probe. *pongs* are the answers of its workers that
        the template has received; those of other templates' workers do not count.
        """
        late = now - self._asked_at.pop(template, now)
        if late > LATE_S:
            for worker in self.workers.values():
                if worker.template == template:
                    worker.answered_at = min(worker.answered_at + late, now)
        for pong in pongs:
            known = self.workers.get(pong.id)
            if known is not None and known.template == template:
                known.stopped_at = known.stopped_at if known.pong.stop == pong.stop else now
                known.answered_at, known.pong = now, pong

    def stalled(self, seconds: float, now: float) -> None:
        """Record that agentd itself stood still for *seconds*. This time does not count as silence of workers or
        templates.
        """
        for worker in self.workers.values():
            worker.answered_at = min(worker.answered_at + seconds, now)
        self._asked_at = {template: min(at + seconds, now) for template, at in self._asked_at.items()}

    def changes(self, now: float) -> list[WorkerHealth]:
        """Return the health of each worker whose health has changed since the last call."""
        return [change for worker in self.workers.values() if (change := self._change(worker, now)) is not None]

    def _change(self, worker: _WorkerState, now: float) -> WorkerHealth | None:
        unresponsive, method, since, place, stop = "", "", 0.0, "", 0
        asked_at = self._asked_at.get(worker.template, math.inf)
        if now - asked_at >= self.silent_s:
            unresponsive, since = NO_TEMPLATE, asked_at
        elif min(now, asked_at) - worker.answered_at >= self.silent_s:  # later answers are with the template
            unresponsive, since = NO_ANSWER, worker.answered_at
        else:
            place, stop = worker.pong.breakpoint[:METHOD_CHARS], worker.pong.stop
        if not unresponsive and worker.pong.method and now - worker.pong.since >= self.long_s:
            method, since = worker.pong.method[:METHOD_CHARS], worker.pong.since
        reported = worker.reported
        known = (reported.unresponsive, reported.method, reported.breakpoint, reported.stop)
        same = known == (unresponsive, method, place, stop)
        if same and (not method or worker.since == since):
            return None
        waiting = worker.pong.waiting if method else 0
        worker.since = since
        for_s = now - since if since else 0.0
        stopped_s = now - worker.stopped_at if place else 0.0
        worker.reported = WorkerHealth(worker.pong.id, unresponsive, method, for_s, waiting, place, stopped_s, stop)
        return worker.reported


def silence_of(pid: int) -> str:
    """Return why a worker whose I/O thread does not answer is silent, by the state of its process *pid*, for people."""
    found = procfs.stat(pid) if pid else None
    if found is not None and found.state == "T":
        return stopped(pid)
    return STATES.get(found.state, NO_ANSWER) if found is not None else NO_ANSWER


class HealthMonitor:
    """Probes the templates that have workers, on a timer, and calls *report* when the health of workers changes.
    Without workers no timer runs.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Callable[[WorkersHealth], None], times: HealthTimes
    ) -> None:
        self._loop = loop
        self._report = report
        self._probe_s = times.probe_s
        self._table = HealthTable(times.unresponsive_s, times.long_call_s)
        self._templates: dict[int, TemplateProcess] = {}
        self._pids: dict[str, int] = {}
        self._reported_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def worker_up(self, id: str, template: TemplateProcess, pid: int) -> None:
        self._pids[id] = pid
        self._templates[template.pid] = template
        self._table.worker_up(id, template.pid, self._loop.time())
        if self._timer is None:
            self._set_timer()

    def why_silent(self, id: str) -> str:
        """Return why a worker that was asked has not answered, for people."""
        why = self._table.why_silent(id)
        return silence_of(self._pids.get(id, 0)) if why == NO_ANSWER else why

    def worker_ended(self, id: str) -> None:
        self._table.worker_ended(id)
        self._pids.pop(id, None)
        if not self._table.workers:
            self.close()

    def template_ended(self, template: TemplateProcess) -> None:
        self._templates.pop(template.pid, None)
        self._table.template_ended(template.pid)

    def answered(self, template: TemplateProcess, packet: template_protocol.Pulses) -> None:
        now = self._loop.time()
        self._table.answered(template.pid, packet.pongs, now)
        if now - self._reported_at >= REPORTS_S:  # else the next probe's timer reports them
            self._report_changes(now)

    def close(self) -> None:
        """Stop probing templates. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        due = self._loop.time() + self._probe_s
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = max(self._loop.time(), due)  # uvloop's clock is coarser than its time()
        if stall := stalled_s(due, now):
            self._table.stalled(stall, now)
        self._report_changes(now)
        for pid in self._table.to_probe(now):
            if pid in self._templates:
                self._templates[pid].send(template_protocol.Probe())
        self._set_timer()

    def _report_changes(self, now: float) -> None:
        if changes := self._table.changes(now):
            self._reported_at = now
            self._report(WorkersHealth([self._explained(change) for change in changes]))

    def _explained(self, change: WorkerHealth) -> WorkerHealth:
        if change.unresponsive != NO_ANSWER:
            return change
        return msgspec.structs.replace(change, unresponsive=silence_of(self._pids.get(change.id, 0)))
