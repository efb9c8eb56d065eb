"""One worker of agentd.workers: its template, its pidfd, and the signals and timers that end it. Loop thread only."""

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
        spec: its specification from the head.
        plan: interpreter, environment and log files.
        template: the template that forks it.
        asked: True once the template has the request to fork it.
        pid: 0 before the worker runs.
        pidfd: -1 before the worker runs and after `release`.
        stopping: True once agentd was told to stop the worker.
        reason: why the worker is stopped; "" if its owner wanted that.
        swept: True once a Sweep kills the worker and all processes that it started.
        term_timer: sends SIGTERM to a robot worker whose template does not pass on the end of the lease.
        kill_timer: sends SIGKILL after the grace.
        kill_due: time of the loop at which kill_timer fires, since uvloop's handles do not all know theirs.
        silence_timer: starts a Sweep if the template does not report how the worker ended.
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
        """True if this worker holds a robot lease, and so has time to make its robots safe before it is killed."""
        return bool(self.spec.claims)

    @property
    def ended(self) -> bool:
        """True if this worker's process has certainly ended or never ran."""
        return self.pidfd < 0 or procfs.has_ended(self.pidfd)

    def started(self) -> int:
        """Return the start of this worker's process in clock ticks since boot; 0 if its pid may be reused by now.

        The pid of an ended worker stays its own until its template, or this agentd as its parent, reaps it.
        """
        ended = self.ended
        stat = procfs.stat(self.pid)
        return stat.started if stat is not None and (not ended or stat.state in "ZX") else 0

    def stop(self, loop: asyncio.AbstractEventLoop, grace_s: float, reason: str) -> None:
        """Send SIGTERM, or end a robot worker's lease; send SIGKILL after *grace_s*. See Workers.stop."""
        if self.has_robots:
            self._revoke(loop, reason)
            self._kill_at(loop, loop.time() + max(grace_s, template_protocol.ROBOT_END_S))
        else:
            if grace_s > 0:
                self.signal(signal.SIGTERM)
            self._kill_at(loop, loop.time() + grace_s)

    def _revoke(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """End this robot worker's lease; send SIGTERM after TERM_S in case its template stands still."""
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
        """Send a signal to this worker's process group; do nothing if the worker has ended."""
        if self.ended:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # too young to be a group leader yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def _kill_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Send SIGKILL at time *when* of the loop, or earlier if an earlier SIGKILL is scheduled."""
        if self.kill_timer is not None:
            if self.kill_due <= when:
                return
            self.kill_timer.cancel()
        self.kill_due, self.kill_timer = when, loop.call_at(when, self.signal, signal.SIGKILL)

    def kill_if_due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill a worker that was forked only after its grace was over; a robot worker still gets ROBOT_END_S."""
        if self.kill_timer is not None and self.kill_due <= loop.time():
            wait_s = template_protocol.ROBOT_END_S if self.has_robots else 0.0
            self.kill_timer = loop.call_later(wait_s, self.signal, signal.SIGKILL)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel this worker's timers and close its pidfd."""
        for timer in (self.kill_timer, self.silence_timer, self.term_timer):
            if timer is not None:
                timer.cancel()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def why(self, exit: ExitReport) -> dict[str, str]:
        """Return the fields of *exit* to replace because agentd stopped this worker.

        If the owner of a robot worker did not want the stop, the worker's own report stays: it says what became of its
        robots.
        """
        if not (self.reason and self.has_robots):
            return {"kind": "stopped", "reason": self.reason}
        return {} if exit.reason else {"reason": self.reason}

    def ended_with_template(self, status: int | None) -> ExitReport:
        """Return the exit report of this worker if its template has ended or does not answer.

        *status* is the worker's wait status (os.waitpid), None if unknown.
        """
        if not self.template.gone:
            return ExitReport("exited", reason="how it ended is not known: its template does not answer")
        reason = f"the template process that it came from ended ({self.template.last_words()})"
        code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        kind = "start_failed" if not self.pid else "signalled" if code < 0 else "exited"
        return ExitReport(kind, code if code >= 0 else None, -code if code < 0 else None, reason=reason)
