"""One worker as agentd sees it: its template, its pidfd, its timers.

Workers whose template has ended before them, or does not say how they ended: they end, with all that is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from agentd.keeper_client import KeeperClient
from agentd.launch_plan import Plan
from agentd.sweep import Sweep
from agentd.templates import Template
from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cgroups.worker_cgroup import leftovers
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.template_protocol import ROBOT_END_S
from rlinf_actors.wire.values import ExitReport, WorkerSpec

TERM_S = 0.25
"""How long a robot worker's template has to pass on the end of its lease before SIGTERM says it, in seconds."""


@dataclass
class WorkerProcess:
    """A worker from the request to start it to its end.

    Attributes:
        plan: how it is started.
        asked: its template was told.
        pid: 0 before it runs.
        pidfd: -1 before it runs and after `release`.
        stopping: somebody asked for its end.
        reason: why, where that was not its owner's wish.
        kill_timer: SIGKILL after the grace.
        kill_due: when that is; uvloop's handles do not all know.
        silence_timer: its template has that long to say how it ended.
        term_timer: SIGTERM to a robot worker that its template did not reach.
        swept: its template ended, and what it left is being looked for.
    """

    spec: WorkerSpec
    plan: Plan
    template: Template
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
        """Whether it holds a lease of robots: it is told of its end in words, and has time to make them safe."""
        return bool(self.spec.claims)

    @property
    def ended(self) -> bool:
        """Whether it certainly runs no more, or never did."""
        return self.pidfd < 0 or procfs.has_ended(self.pidfd)

    def started(self) -> int:
        """When its process began, for Sweep; 0 if that is gone, or if its pid may be another's by now.

        One that ended is unreaped as long as its template lives, and after that if it is a child of ours.
        """
        ended = self.ended
        stat = procfs.stat(self.pid)
        return stat.started if stat is not None and (not ended or stat.state in "ZX") else 0

    def stop(self, loop: asyncio.AbstractEventLoop, grace_s: float, reason: str) -> None:
        """SIGTERM, or the end of its lease, and SIGKILL after the grace; see Workers.stop."""
        if self.has_robots:
            self._revoke(loop, reason)
            self._kill_at(loop, loop.time() + max(grace_s, template_protocol.ROBOT_END_S))
        else:
            if grace_s > 0:
                self.signal(signal.SIGTERM)
            self._kill_at(loop, loop.time() + grace_s)

    def _revoke(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """Tell a robot worker that its lease is over; SIGTERM says it to one whose template stands still."""
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
        """Signal its process group, as long as the pid is certainly still its own."""
        if self.ended:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # so young that it is no group leader yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def _kill_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """SIGKILL at that time of the loop, or earlier if it was to be earlier."""
        if self.kill_timer is not None:
            if self.kill_due <= when:
                return
            self.kill_timer.cancel()
        self.kill_due, self.kill_timer = when, loop.call_at(when, self.signal, signal.SIGKILL)

    def kill_if_due(self, loop: asyncio.AbstractEventLoop) -> None:
        """It runs only now, and its time was over before: it has what a robot worker needs, or nothing."""
        if self.kill_timer is not None and self.kill_due <= loop.time():
            wait_s = template_protocol.ROBOT_END_S if self.has_robots else 0.0
            self.kill_timer = loop.call_later(wait_s, self.signal, signal.SIGKILL)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Its end: no timer and no fd of it stays."""
        for timer in (self.kill_timer, self.silence_timer, self.term_timer):
            if timer is not None:
                timer.cancel()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def why(self, exit: ExitReport) -> dict[str, str]:
        """Return the fields of the exit report of a worker that was stopped.

        A robot worker whose owner did not want the stop keeps how it ended: what became of its robot is in there.
        """
        if not (self.reason and self.has_robots):
            return {"kind": "stopped", "reason": self.reason}
        return {} if exit.reason else {"reason": self.reason}

    def ended_with_template(self, status: int | None) -> ExitReport:
        """How it ended when its template did first, or does not answer.

        *status* is as waitpid gave it, None if nobody knows.
        """
        if not self.template.gone:
            return ExitReport("exited", reason="how it ended is not known: its template does not answer")
        reason = f"the template process that it came from ended ({self.template.last_words()})"
        code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
        kind = "start_failed" if not self.pid else "signalled" if code < 0 else "exited"
        return ExitReport(kind, code if code >= 0 else None, -code if code < 0 else None, reason=reason)


TEMPLATE_SILENT_S = 5.0
"""How long after a worker's end its template may take to say how it ended."""


class Orphans:
    """Ends what templates left behind. Loop thread only.

    Args:
        loop: the agent's.
        cgroups: where workers' cgroups are made.
        keeping: says how those ended whose template was gone.
        on_end: called with each of them, and how it ended.
        on_done: called when there may be no more.

    Attributes:
        sweeps: how many go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cgroups: Roots,
        keeping: KeeperClient,
        on_end: Callable[[WorkerProcess, ExitReport], None],
        on_done: Callable[[], None],
    ) -> None:
        self.sweeps = 0
        self._loop = loop
        self._cgroups = cgroups
        self._keeping = keeping
        self._on_end = on_end
        self._on_done = on_done

    def ended(self, worker: WorkerProcess) -> None:
        """A worker has ended; its template says how within moments, unless that one is stopped or stuck."""
        if worker.template.gone:
            self._sweep([worker])
            return
        # What it started may still be at work on a robot or an accelerator: it goes before the end is told.
        worker.silence_timer = self._loop.call_later(TEMPLATE_SILENT_S, self._sweep, [worker])

    def left(self, workers: list[WorkerProcess]) -> None:
        """Their template has ended. Those with robots were told by their sockets to it, and make them safe."""
        robots = [worker for worker in workers if worker.has_robots and not worker.ended]
        self._sweep([worker for worker in workers if worker not in robots])
        self._loop.call_later(ROBOT_END_S, self._sweep, robots)

    def _sweep(self, workers: list[WorkerProcess]) -> None:
        """Kill what is left of them, and themselves."""
        workers = [worker for worker in workers if not worker.swept]
        if not workers:
            return
        for worker in workers:
            worker.swept = True
        self.sweeps += 1
        pids = {worker.pid: worker.started() for worker in workers if worker.pid}
        done = partial(self._on_swept, workers)
        reapers = (os.getpid(), self._keeping.pid)
        Sweep(self._loop, [worker.spec.id for worker in workers], pids, done, reapers)

    def _on_swept(self, workers: list[WorkerProcess], statuses: dict[int, int]) -> None:
        """Nothing of these workers is left. Ask how they ended: the keeper reaped them."""
        unknown = [one.pid for one in workers if one.pid and one.pid not in statuses and one.template.gone]
        self._keeping.when_ended(unknown, lambda more: self._tell(workers, {**statuses, **more}))

    def _tell(self, workers: list[WorkerProcess], statuses: dict[int, int]) -> None:
        self.sweeps -= 1
        for left in leftovers(self._cgroups):
            left.remove()  # of the template that is gone
        for worker in workers:
            self._on_end(worker, worker.ended_with_template(statuses.get(worker.pid)))
        self._on_done()
