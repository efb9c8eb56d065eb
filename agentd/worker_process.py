"""One worker as agentd sees it: its template, its pidfd, and the signals and timers of its end. Loop thread only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

from agentd.launch_plan import LaunchPlan
from agentd.templates import TemplateProcess
from rlinf_actors import procfs
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import ExitReport, WorkerSpec

TERM_S = 0.25
"""Seconds that a robot worker's template has to pass on the end of its lease before agentd sends SIGTERM."""


@dataclass
class WorkerProcess:
    """A worker from the request to start it to its end.

    Attributes:
        plan: how it is started.
        asked: True once its template was asked to start it.
        pid: 0 before it runs.
        pidfd: -1 before it runs and after `release`.
        stopping: True once its end was asked for.
        reason: why, "" if its owner wanted that.
        swept: True once a sweep kills it and all that it started.
        term_timer: SIGTERM to a robot worker whose template does not reach it.
        kill_timer: SIGKILL after the grace.
        kill_due: when that is; uvloop's handles do not all know.
        silence_timer: a sweep, if its template does not say how it ended.
    """

    spec: WorkerSpec
    plan: LaunchPlan
    template: TemplateProcess
    asked: bool = False
    pid: int = 0
    pidfd: int = -1
    stopping: bool = False
    reason: str = ""
    swept: bool = False
    term_timer: asyncio.TimerHandle | None = None
    kill_timer: asyncio.TimerHandle | None = None
    kill_due: float = 0.0
    silence_timer: asyncio.TimerHandle | None = None

    @property
    def has_robots(self) -> bool:
        """True if it holds a robot lease: it then has time to make its robots safe."""
        return bool(self.spec.claims)

    @property
    def ended(self) -> bool:
        """True if it certainly does not run any more, or never did."""
        return self.pidfd < 0 or procfs.has_ended(self.pidfd)

    def started(self) -> int:
        """Return when its process began, for Sweep; 0 if it has ended and its pid may be another process's by now.

        A worker that has ended stays unreaped while its template lives, and afterwards if it is a child of ours.
        """
        ended = self.ended
        stat = procfs.stat(self.pid)
        return stat.started if stat is not None and (not ended or stat.state in "ZX") else 0

    def stop(self, loop: asyncio.AbstractEventLoop, grace_s: float, reason: str) -> None:
        """Send SIGTERM, or end its lease, and SIGKILL after the grace; see Workers.stop."""
        if self.has_robots:
            self._revoke(loop, reason)
            self._kill_at(loop, loop.time() + max(grace_s, template_protocol.ROBOT_END_S))
        else:
            if grace_s > 0:
                self.signal(signal.SIGTERM)
            self._kill_at(loop, loop.time() + grace_s)

    def _revoke(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """End a robot worker's lease; SIGTERM follows in case its template stands still."""
        text = reason or "its group was shut down"
        self.template.send(
            template_protocol.Revoke(self.spec.id, text[: template_protocol.TEXT_CHARS], orderly=not reason)
        )
        if self.term_timer is None:
            self.term_timer = loop.call_later(TERM_S, self._terminate)

    def _terminate(self) -> None:
        if not self.ended:  # itself alone: it may need a process of its own to reach the robot
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and its template has reaped it
                signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Signal its process group if the pid is certainly still its own."""
        if self.ended:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # too young to be a group leader yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def _kill_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Send SIGKILL at that time of the loop, or earlier if that was planned."""
        if self.kill_timer is not None:
            if self.kill_due <= when:
                return
            self.kill_timer.cancel()
        self.kill_due, self.kill_timer = when, loop.call_at(when, self.signal, signal.SIGKILL)

    def kill_if_due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill a worker that runs only now and whose grace is over; a robot worker still gets its time."""
        if self.kill_timer is not None and self.kill_due <= loop.time():
            wait_s = template_protocol.ROBOT_END_S if self.has_robots else 0.0
            self.kill_timer = loop.call_later(wait_s, self.signal, signal.SIGKILL)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel its timers and close its pidfd."""
        for timer in (self.kill_timer, self.silence_timer, self.term_timer):
            if timer is not None:
                timer.cancel()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def why(self, exit: ExitReport) -> dict[str, str]:
        """Return the fields to change in the exit report of a worker that was stopped.

        A robot worker whose owner did not want the stop keeps its own report, which says what became of its robot.
        """
        if not (self.reason and self.has_robots):
            return {"kind": "stopped", "reason": self.reason}
        return {} if exit.reason else {"reason": self.reason}

    def ended_with_template(self, status: int | None) -> ExitReport:
        """Return how it ended if its template ended first, or does not answer.

        *status* is waitpid's, None if unknown.
        """
        if not self.template.gone:
            return ExitReport("exited", reason="how it ended is not known: its template does not answer")
        reason = f"the template process that it came from ended ({self.template.last_words()})"
        code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        kind = "start_failed" if not self.pid else "signalled" if code < 0 else "exited"
        return ExitReport(kind, code if code >= 0 else None, -code if code < 0 else None, reason=reason)
