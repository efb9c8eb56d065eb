"""One worker as agentd sees it: its template, its pidfd, its timers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from dataclasses import dataclass

from agentd.templates import Template
from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import ExitReport, WorkerSpec


@dataclass
class Child:
    """A worker from the request to start it to its end.

    Attributes:
        fork: what its template is told.
        asked: its template was told.
        pid: 0 before it runs.
        pidfd: -1 before it runs and after `release`.
        stopping: somebody asked for its end.
        kill_timer: SIGKILL after the grace.
        silence_timer: its template has that long to say how it ended.
    """

    spec: WorkerSpec
    fork: spawn.Fork
    template: Template
    asked: bool = False
    pid: int = 0
    pidfd: int = -1
    stopping: bool = False
    kill_timer: asyncio.TimerHandle | None = None
    silence_timer: asyncio.TimerHandle | None = None

    def signal(self, number: int) -> None:
        """Signal its process group, as long as the pid is certainly still its own."""
        if self.pidfd < 0 or select.select([self.pidfd], [], [], 0)[0]:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # so young that it is no group leader yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """SIGKILL at that time of the loop, or earlier if it was to be earlier."""
        if self.kill_timer is not None:
            if self.kill_timer.when() <= when:
                return
            self.kill_timer.cancel()
        self.kill_timer = loop.call_at(when, self.signal, signal.SIGKILL)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Its end: no timer and no fd of it stays."""
        for timer in (self.kill_timer, self.silence_timer):
            if timer is not None:
                timer.cancel()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def ended_with_template(self, status: int | None) -> ExitReport:
        """How it ended when its template did first; *status* as waitpid gave it, None if nobody knows."""
        reason = f"the template process that it came from ended ({self.template.last_words()})"
        code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        kind = "start_failed" if not self.pid else "signalled" if code < 0 else "exited"
        return ExitReport(kind, code if code >= 0 else None, -code if code < 0 else None, reason=reason)
