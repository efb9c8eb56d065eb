"""One worker process as its template has it: its pipes, its control socket, what it said, how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping

from rlinf_actors.cgroups.worker import Cgroup
from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import ExitReport
from rlinf_actors.worker.drain import Drain
from rlinf_actors.worker.lease import Lease

GUARD_S = 0.2
"""How long a guard has, at least, from when its template sees that the lease is over, in seconds."""
KILL_MARGIN = 0.05
"""Part of the lease that is kept for the kill of a robot worker whose guard cannot run: 0.1 s of 2 s."""


class Worker:
    """One worker process, with its cgroup. Raises OSError when there are no fds left or the cgroup cannot be made."""

    def __init__(self, fork: spawn.Fork, cgroup: Cgroup, limits: Mapping[str, int], log_bytes: int = 0) -> None:
        self.fork = fork
        self.cgroup = cgroup
        self.id = fork.spec.id
        self.pid = 0
        self.up: spawn.Up | None = None
        self.failure = ""
        self.status: os.waitid_result | None = None
        self.deadline = 0.0
        self.kill_at = 0.0  # when, 0 for never
        self.lease = Lease(fork.place.lease_until, fork.place.lease_s)
        self.guard_due = 0.0  # its guard must have said LeaseLost by then, 0 while its lease lasts
        self.lease_lost = False  # its guard has said so
        self.told = self.watched = False
        self.outgoing: deque[bytes] = deque()
        self.unanswered = 0  # probes since the last Pong
        self.pong: spawn.Pong | None = None  # agentd does not know of it yet
        self.unread = self.announced = False  # more in the files than agentd read; Grew sent since the last Read
        with contextlib.ExitStack() as stack:
            self.out = Drain(fork.place.out_path, log_bytes)
            stack.callback(self.out.close)
            self.err = Drain(fork.place.err_path, log_bytes)
            stack.callback(self.err.close)
            self.control, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self.control.close)
            stack.callback(self.child.close)
            self.control.setblocking(False)
            cgroup.make(limits)
            stack.pop_all()
        self.read = (self.out.began, self.err.began)  # what agentd has read of its files
        self.asked: spawn.LockDevices | None = None
        self.asked_at = 0.0
        self.granted = False

    @property
    def has_robots(self) -> bool:
        """Whether it holds a lease of robots."""
        return bool(self.fork.spec.claims)

    def renew(self, until: float, now: float) -> None:
        """Extend the lease to *until*. A renewal that is too old to extend it leaves the guard's time as it was."""
        self.lease.renew(until)
        if self.lease.left(now):
            self.guard_due = 0.0

    def said_lease_lost(self, now: float) -> None:
        """Its guard runs, and makes the robots safe: the process has the time for that."""
        self.lease_lost, self.guard_due = True, 0.0
        self.kill_at = min(self.kill_at or math.inf, now + spawn.ROBOT_END_S)

    def due(self, now: float) -> float:
        """When the process must be killed, or its lease be looked at again; infinity for never."""
        end = now + self.lease.left(now) if self._lease_counts else math.inf
        return min(self.guard_due or end, self.kill_at or math.inf)

    def must_die(self, now: float) -> bool:
        """True if the process must be killed now. Notices the end of its lease.

        The guard tells its template first that the lease is over, before it calls any code of the user's. A guard that
        says nothing cannot run (C code holds the interpreter's lock), and then nobody else stops the robot.
        """
        if self._lease_counts and not self.guard_due and not self.lease.left(now):
            self.guard_due = max(now + GUARD_S, self.lease.until - KILL_MARGIN * self.lease.lease_s)
        return bool((self.guard_due and self.guard_due <= now) or (self.kill_at and self.kill_at <= now))

    @property
    def _lease_counts(self) -> bool:
        return self.has_robots and self.lease.lease_s > 0 and not self.lease_lost

    def note(self, text: str) -> None:
        """A line of ours in its stderr file."""
        self.err.note(text)
        self.unread = True

    def started(self, pid: int) -> None:
        """It runs: its ends of everything are its own now."""
        self.pid = pid
        self.out.close_writer()
        self.err.close_writer()
        self.child.close()

    def close(self) -> None:
        """Close all that is open of it here."""
        self.out.close()
        self.err.close()
        self.control.close()
        self.child.close()

    def locks(self, packet: spawn.LockDevices | spawn.UnlockDevices) -> None:
        """It asks for its accelerators, or gives them back: an agentd that comes must know."""
        if isinstance(packet, spawn.LockDevices):
            self.asked, self.asked_at, self.granted = packet, time.monotonic(), False
        elif self.asked is not None and self.asked.request == packet.request:
            self.asked = None

    def kept(self, exit: ExitReport | None = None) -> spawn.Kept:
        """What an agentd that takes it over needs to know."""
        return spawn.Kept(
            self.id,
            self.pid,
            self.up,
            exit,
            self.fork.place.out_path,
            self.fork.place.err_path,
            *self.read,
            self.asked.request if self.asked is not None else 0,
            self.granted,
            self.asked_at,
        )

    def report(self, oom: str, left: bool) -> ExitReport:
        """How it ended, for `status` as waitid gave it."""
        assert self.status is not None
        code = self.status.si_status
        exited = self.status.si_code == os.CLD_EXITED
        reasons = [self.failure] if self.failure else []
        if not self.up and not self.failure:
            how = f"exit code {code}" if exited else signal.strsignal(code) or f"signal {code}"
            reasons.append(f"it ended ({how}) before it was ready")
        if left:
            reasons.append("a process that it left behind could not be killed")
        reasons += [f"output was lost: {drain.fault}" for drain in (self.out, self.err) if drain.fault]
        return ExitReport(
            kind=("exited" if exited else "signalled") if self.up else "start_failed",
            exit_code=code if exited else None,
            signal=None if exited else code,
            oom=oom,
            stderr_tail=self.err.tail.lines(),
            reason="; ".join(reasons),
        )
