"""Asking templates whether their workers answer: the timer around `agentd.health`. Loop thread only.

Whether workers and templates answer, and which calls take long. Pure; time is an argument.

House rules: who does not answer is alive, and is only told of. Silence is counted by our own clock, and not while we
stood still ourselves, nor a worker's while its template did: what the worker answered lies there unread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlinf_actors.net.failure_detection import stalled_s
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import WorkersHealth
from rlinf_actors.wire.template_protocol import Pong
from rlinf_actors.wire.values import WorkerHealth

if TYPE_CHECKING:
    from agentd.templates import Template

LATE_S = 0.5
"""A template that takes longer to answer stood still meanwhile."""
NO_ANSWER = "its I/O thread does not answer"
NO_TEMPLATE = "its template does not answer"


@dataclass
class _Pulse:
    """One worker. `told` is what was said of it last, `since` when that began."""

    template: int
    answered: float
    pong: Pong
    told: WorkerHealth
    since: float = 0.0


@dataclass
class Pulses:
    """All workers that are up.

    Attributes:
        silent_s: after so many seconds without an answer a worker is unresponsive.
        long_s: a call that has been running for so long is told of.
    """

    silent_s: float = 5.0
    long_s: float = 10.0
    _workers: dict[str, _Pulse] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)

    def up(self, id: str, template: int, now: float) -> None:
        """A worker listens from now on."""
        self._workers[id] = _Pulse(template, now, Pong(id), WorkerHealth(id))

    def gone(self, id: str) -> None:
        """A worker has ended."""
        self._workers.pop(id, None)

    def template_gone(self, template: int) -> None:
        """It answers nobody any more; its workers end."""
        self._asked.pop(template, None)

    def to_ask(self, now: float) -> list[int]:
        """The templates that are to be asked now: those with workers that owe no answer."""
        due = {pulse.template for pulse in self._workers.values()} - self._asked.keys()
        self._asked.update(dict.fromkeys(due, now))
        return sorted(due)

    def answered(self, template: int, pongs: Iterable[Pong], now: float) -> None:
        """A template said which of its workers have answered."""
        late = now - self._asked.pop(template, now)
        if late > LATE_S:
            for pulse in self._workers.values():
                if pulse.template == template:
                    pulse.answered = min(pulse.answered + late, now)
        for pong in pongs:
            known = self._workers.get(pong.id)
            if known is not None:
                known.answered, known.pong = now, pong

    def stalled(self, seconds: float, now: float) -> None:
        """We stood still: nobody was silent."""
        for pulse in self._workers.values():
            pulse.answered = min(pulse.answered + seconds, now)
        self._asked = {template: min(at + seconds, now) for template, at in self._asked.items()}

    def look(self, now: float) -> list[WorkerHealth]:
        """What has changed since the last look."""
        return [change for pulse in self._workers.values() if (change := self._look(pulse, now)) is not None]

    def _look(self, pulse: _Pulse, now: float) -> WorkerHealth | None:
        unresponsive, method, since = "", "", 0.0
        asked = self._asked.get(pulse.template, math.inf)
        if now - asked >= self.silent_s:
            unresponsive, since = NO_TEMPLATE, asked
        elif min(now, asked) - pulse.answered >= self.silent_s:  # what came since is for the template to say
            unresponsive, since = NO_ANSWER, pulse.answered
        elif pulse.pong.method and now - pulse.pong.since >= self.long_s:
            method, since = pulse.pong.method, pulse.pong.since
        told = pulse.told
        same = (told.unresponsive, told.method) == (unresponsive, method)
        if same and (not method or pulse.since == since):
            return None
        waiting = pulse.pong.waiting if method else 0
        pulse.since = since
        pulse.told = WorkerHealth(pulse.pong.id, unresponsive, method, now - since if since else 0.0, waiting)
        return pulse.told


@dataclass(frozen=True)
class HealthTimes:
    """When to ask and what to tell, in seconds.

    Attributes:
        probe_s: between two questions.
        unresponsive_s: silence after which a worker is told to be unresponsive.
        long_call_s: how long a call runs before it is told of.
    """

    probe_s: float = 2.0
    unresponsive_s: float = 5.0
    long_call_s: float = 10.0


class HealthWatch:
    """Watches workers from their Up to their end; without any it does nothing.

    Args:
        loop: the agent's.
        report: takes what has changed.
        times: of probes.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Callable[[WorkersHealth], None], times: HealthTimes
    ) -> None:
        self._loop = loop
        self._report = report
        self._every_s = times.probe_s
        self._pulses = Pulses(times.unresponsive_s, times.long_call_s)
        self._templates: dict[int, Template] = {}
        self._watched: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def up(self, id: str, template: Template) -> None:
        """A worker of this template listens."""
        self._watched.add(id)
        self._templates[template.pid] = template
        self._pulses.up(id, template.pid, self._loop.time())
        if self._timer is None:
            self._again()

    def gone(self, id: str) -> None:
        """A worker has ended."""
        self._watched.discard(id)
        self._pulses.gone(id)
        if not self._watched:
            self.close()

    def template_gone(self, template: Template) -> None:
        """A template has ended."""
        self._templates.pop(template.pid, None)
        self._pulses.template_gone(template.pid)

    def said(self, template: Template, packet: template_protocol.Pulses) -> None:
        """A template's answer."""
        now = self._loop.time()
        self._pulses.answered(template.pid, packet.pongs, now)
        self._tell(now)

    def close(self) -> None:
        """Ask no more. Twice is fine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self) -> None:
        due = self._loop.time() + self._every_s
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = max(self._loop.time(), due)  # uvloop's clock is coarser than its time()
        if stall := stalled_s(due, now):
            self._pulses.stalled(stall, now)
        self._tell(now)
        for pid in self._pulses.to_ask(now):
            if pid in self._templates:
                self._templates[pid].send(template_protocol.Probe())
        self._again()

    def _tell(self, now: float) -> None:
        changes = self._pulses.look(now)
        if changes:
            self._report(WorkersHealth(changes))
