"""Asking templates whether their workers answer: the timer around `agentd.pulses`. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentd.pulses import Pulses
from rlinf_actors.wire import spawn
from rlinf_actors.wire.agents import WorkersHealth

if TYPE_CHECKING:
    from agentd.templates import Template

STALL_S = 0.5
"""A timer that comes later than this says that we stood still ourselves."""


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

    def said(self, template: Template, packet: spawn.Pulses) -> None:
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
        if now - due > STALL_S:
            self._pulses.stalled(now - due, now)
        self._tell(now)
        for pid in self._pulses.to_ask(now):
            if pid in self._templates:
                self._templates[pid].send(spawn.Probe())
        self._again()

    def _tell(self, now: float) -> None:
        changes = self._pulses.look(now)
        if changes:
            self._report(WorkersHealth(changes))
