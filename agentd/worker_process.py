"""One worker of agentd.workers: its template, its pidfd, and the signals and timers that end it. Loop thread only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import msgspec

from agentd.launch_plan import LaunchPlan, Site
from agentd.templates import TemplateProcess
from agentd.users import User
from rlinf_actors import procfs
from rlinf_actors.cgroups.worker_cgroup import Cgroup, cgroup_of
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.endings import LEFT
from rlinf_actors.wire.values import ExitReport, RunningWorker, WorkerSpec
from rlinf_actors.wire.worker_questions import RecordTrace

log = logging.getLogger(__name__)

TERM_S = 0.25  # seconds that a robot worker's template has to pass on Revoke before agentd sends the worker SIGTERM


class WorkerProcess(msgspec.Struct):
    """agentd's record of one worker, from the order to start the worker until its end: its template, pidfd, timers, and
    whether agentd stops it.
    """

    spec: WorkerSpec
    plan: LaunchPlan
    template: TemplateProcess
    site: Site  # the settings of its user's workers
    report_s: float = 0.0  # seconds that its profiler has to write its report, 0 without one
    asked: bool = False  # True once the template has the request to fork
    up: bool = False  # True once the worker listens
    pid: int = 0  # 0 before the worker runs
    pidfd: int = -1  # -1 before the worker runs and after `release`
    stopping: bool = False  # True once agentd was told to stop the worker
    reason: str = ""  # why the worker is stopped; "" if its owner asked for that
    swept: bool = False  # True once a Sweep kills the worker and all processes that it started
    term_timer: asyncio.TimerHandle | None = None  # sends SIGTERM to a robot worker that does not react to Revoke
    kill_timer: asyncio.TimerHandle | None = None  # sends SIGKILL after the grace
    kill_due: float = 0.0  # time of the loop at which kill_timer fires (uvloop's timers do not all tell)
    silence_timer: asyncio.TimerHandle | None = None  # starts a Sweep if the template does not send Exited
    cgroup: Cgroup = Cgroup()  # made by agentd if the worker runs as another user; otherwise the template makes one

    def __post_init__(self) -> None:
        self.report_s = self.site.rules.profile_grace_s if self.spec.profiler is not None else 0.0

    @property
    def has_robots(self) -> bool:
        """True if this worker claims robots. Such a worker holds a robot lease, and gets time to make its robots safe
        before it is killed.
        """
        return bool(self.spec.claims)

    @property
    def ended(self) -> bool:
        """True if this worker's process has ended or was never forked."""
        return self.pidfd < 0 or procfs.has_ended(self.pidfd)

    @property
    def user(self) -> User | None:
        """As whom this worker runs; None for agentd's own user."""
        return self.site.rules.user

    def order(self, trace: RecordTrace, until: float = 0.0, lease_s: float = 0.0) -> template_protocol.Fork:
        """Return the packet that orders the template to start this worker.

        *trace* is what it records from its start, *until* and *lease_s* are the end and length of a robot lease.

        If the worker runs as another user, make its cgroup, which that user cannot change. Raise OSError if that fails.
        """
        place = msgspec.structs.replace(
            self.site.place,
            out_path=self.plan.out_path,
            err_path=self.plan.err_path,
            trace_path=trace.path,
            trace_events=trace.events,
            lease_until=until,
            lease_s=lease_s,
        )
        if self.user is not None:
            self._find_cgroup()
            self.cgroup.make(self._limits())
        return template_protocol.Fork(self.spec, place, self.plan.env, list(self.plan.wrapper), self.report_s)

    def watch(self, loop: asyncio.AbstractEventLoop, pid: int, pidfd: int) -> None:
        """Take *pid* as the worker's process from now on. A worker under a profiler had the profiler's pid before."""
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
        self.pid, self.pidfd = pid, pidfd
        if self.user is not None:  # it runs no code of the driver before agentd has reported that it is ready
            self._find_cgroup()
            try:
                self.cgroup.enter(pid)
            except ProcessLookupError:  # it has ended
                pass
            except OSError as error:
                log.error("%s:%d runs outside its cgroup: %s", self.spec.group, self.spec.rank, error)
                if self._limits() and not self.spec.limits_best_effort:
                    self.stopping, self.reason = True, f"its limits cannot hold: it cannot enter its cgroup ({error})"
                    self.stop(loop, 0.0, self.reason)

    def _limits(self) -> dict[str, int]:
        return self.site.rules.cgroups.limits(self.spec.memory_limit, self.spec.pids_limit)

    def _find_cgroup(self) -> None:
        template = procfs.stat(self.template.pid)
        if template is not None:
            self.cgroup = cgroup_of(self.site.rules.cgroups, template, self.spec.id)

    def end_cgroup(self) -> None:
        """Kill what is left in the cgroup that agentd has made for this worker, and remove the cgroup."""
        if self.cgroup.directories:
            self.cgroup.kill()
            self.cgroup.remove()

    def started(self) -> int:
        """Return the start of the worker's process in clock ticks since boot, or 0 if another process may have the pid
        by now.

        The pid stays the worker's until the process is reaped, by its template or by agentd.
        """
        ended = self.ended
        stat = procfs.stat(self.pid)
        return stat.started if stat is not None and (not ended or stat.ended) else 0

    def stop(self, loop: asyncio.AbstractEventLoop, grace_s: float, reason: str) -> None:
        """Send the worker SIGTERM, and SIGKILL after *grace_s* seconds. *reason* is for people; it is "" if the
        worker's owner asked for the stop.

        If the worker has robots, end its lease instead of sending SIGTERM. It then has at least ROBOT_END_S to make its
        robots safe.
        """
        if self.has_robots:
            text = (reason or "its group was shut down")[: template_protocol.TEXT_CHARS]
            self.template.send(template_protocol.Revoke(self.spec.id, text, orderly=not reason))
            if self.term_timer is None:  # its template may stand still
                self.term_timer = loop.call_later(TERM_S, self._terminate)
            self._kill_at(loop, loop.time() + max(grace_s, template_protocol.ROBOT_END_S))
        else:
            if grace_s > 0:
                self.signal(signal.SIGTERM)
            self._kill_at(loop, loop.time() + grace_s)

    def has_obeyed(self) -> None:
        """Note that the watchdog of this robot worker has ended its lease: SIGTERM would only disturb the hook."""
        if self.term_timer is not None:
            self.term_timer.cancel()

    def _terminate(self) -> None:
        if not self.ended:  # itself alone: it may need a process of its own to reach the robot
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and its template has reaped it
                signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send the signal *number* to the process group of this worker, unless the worker has ended."""
        if self.ended:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # too young to be a group leader yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def _kill_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Schedule SIGKILL for time *when* of the loop, unless SIGKILL is scheduled for an earlier time."""
        if self.kill_timer is not None:
            if self.kill_due <= when:
                return
            self.kill_timer.cancel()
        self.kill_due, self.kill_timer = when, loop.call_at(when, self.signal, signal.SIGKILL)

    def kill_if_due(self, loop: asyncio.AbstractEventLoop) -> None:
        """Kill this worker, which has just been forked, if it was stopped before and its grace is over. If it has
        robots, it is killed after ROBOT_END_S instead.
        """
        if self.kill_timer is not None and self.kill_due <= loop.time():
            wait_s = template_protocol.ROBOT_END_S if self.has_robots else 0.0
            self.kill_timer = loop.call_later(wait_s, self.signal, signal.SIGKILL)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel this worker's timers and close its pidfd. The process itself is not touched."""
        for timer in (self.kill_timer, self.silence_timer, self.term_timer):
            if timer is not None:
                timer.cancel()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def why(self, exit: ExitReport) -> dict[str, str]:
        """Return, by name, new values for fields of the exit report *exit*: they say that agentd stopped this worker.

        If the worker has robots and was stopped by anyone but its owner, *exit* says what became of the robots. So only
        its reason is replaced, and only if it is empty.

        That a process is left stays in the reason: the head counts on it.
        """
        if not (self.reason and self.has_robots):
            left = [LEFT] if LEFT in exit.reason else []
            return {"kind": "stopped", "reason": "; ".join([*filter(None, [self.reason]), *left])}
        return {} if exit.reason else {"reason": self.reason}

    def ended_with_template(self, status: int | None, left: bool) -> ExitReport:
        """Return an exit report made by agentd, because the worker's template has ended or is silent and so sends none.
        *status* is the worker's wait status, None if unknown; *left* is True if a process could not be killed.
        """
        more = f"; {LEFT}" if left else ""
        if not self.template.gone:
            return ExitReport("exited", reason=f"how it ended is not known: its template does not answer{more}")
        reason = f"the template process that it came from ended ({self.template.last_words()}){more}"
        code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        kind = "start_failed" if not self.pid else "signalled" if code < 0 else "exited"
        return ExitReport(kind, code if code >= 0 else None, -code if code < 0 else None, reason=reason)


def running(ordered: RunningWorker, found: template_protocol.SurvivingWorker) -> RunningWorker:
    """Return the worker *ordered*, from the head's orders on disk, with what its template says of it."""
    up = found.up
    listens = {} if up is None else {"endpoint": up.endpoint, "port": up.port, "master_port": up.master_port}
    spec = msgspec.structs.replace(ordered.spec, token=found.token or ordered.spec.token)
    return msgspec.structs.replace(ordered, spec=spec, pid=found.pid, exit=found.exit, **listens)
