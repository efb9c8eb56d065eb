"""The workers of a template: their control sockets, leases, output and ends, and the processes that they leave behind.

A worker goes through these states: starting; up (the worker has sent WorkerUp); ended (a zombie, which keeps its pid
and process group); swept (all processes that it left behind are dead); told (the template has sent Exited to agentd);
reaped. All code here runs in the select loop of the template, on its only thread. Nothing blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from rlinf_actors import procfs
from rlinf_actors.cgroups import worker_cgroup as cgroups
from rlinf_actors.cgroups.worker_cgroup import Cgroup
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.unix_sockets import PacketQueue
from rlinf_actors.template.log_pump import LogPump
from rlinf_actors.template.wrapped_start import WrappedStart, exit_report
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.log_values import job_id
from rlinf_actors.wire.values import ExitReport
from rlinf_actors.wire.worker_questions import WorkerAnswered
from rlinf_actors.worker.leasepage import Lease
from rlinf_actors.worker.stopper import NAME as STOPPER

OWN_STALL_S, GRACE_S = 0.1, 0.3
"""If the template itself was late by more than the first, a watchdog gets the second, in seconds, to say something.

It also gets the second to end its worker after LeaseLost, before the template looks if it is stopped.
"""


class ForkedWorker:
    """The template's record of one worker process, with the template's ends of its pipes and control socket.

    `pid` is the template's child: the worker, or its profiler, or its watchdog as long as that runs.

    Args:
        fork: agentd's request for the worker.
        cgroup: the worker's cgroup, which the constructor makes.
        limits: the limits of the cgroup.
        log_bytes: size at which a log file of the worker is rotated, 0 for never.

    Raises:
        OSError: the cgroup cannot be made, or no descriptor is free.
    """

    def __init__(self, fork: packets.Fork, cgroup: Cgroup, limits: Mapping[str, int], log_bytes: int = 0) -> None:
        self.fork = fork
        self.cgroup = cgroup
        self.id = fork.spec.id
        self.pid = 0
        self.inner = 0  # pid of the worker itself, if `pid` is or was its profiler or watchdog; 0 as long as unknown
        self.is_reporting = False  # the worker has ended, and its profiler, which has reaped it, goes on
        self.start: WrappedStart | None = None  # of a worker under a profiler
        self.up: packets.WorkerUp | None = None
        self.failure = ""
        self.status: os.waitid_result | None = None
        self.deadline = 0.0
        self.kill_at = 0.0  # time, 0 for never
        self.lease = Lease(fork.place.lease_until, fork.place.lease_s)  # as it has confirmed it
        # end of the lease at which its watchdog was sent SIGCONT; infinite when it was looked at after LeaseLost
        self.continued = 0.0
        self.lease_lost = False  # its watchdog has sent LeaseLost
        self.grace = 0.0  # time before which its watchdog is not killed
        self.told = self.watched = False
        self.unanswered = 0  # probes since the last Pong
        self.pong: packets.Pong | None = None  # not yet sent to agentd
        self.unread, self.announced = False, not fork.spec.forward_logs  # output that is not read; LogsGrew sent
        with contextlib.ExitStack() as stack:
            self.out = LogPump(fork.place.out_path, log_bytes, fork.spec.keep_logs, job_id(fork.spec.token))
            stack.callback(self.out.close)
            self.err = LogPump(fork.place.err_path, log_bytes, fork.spec.keep_logs, job_id(fork.spec.token))
            stack.callback(self.err.close)
            self.control, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.outgoing = PacketQueue(self.control)
            stack.callback(self.control.close)
            stack.callback(self.child.close)
            self.control.setblocking(False)
            self.link: socket.socket | None = None  # to the watchdog
            self.theirs: socket.socket | None = None
            if self.has_robots:
                self.link, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.callback(self.link.close)
                stack.callback(self.theirs.close)
                self.link.setblocking(False)
            cgroup.make(limits)
            self.opened = stack.pop_all()
        self.read = (self.out.began, self.err.began)  # positions up to which agentd has read the files
        self.asked: packets.LockDevices | None = None
        self.asked_at = 0.0
        self.granted = False

    @property
    def has_robots(self) -> bool:
        return bool(self.fork.spec.claims)

    def due(self) -> float:
        """Return the next time at which the template must look if it has to continue or kill this worker's watchdog, or
        to kill its profiler; infinity for never.
        """
        if not self.has_robots or not self.lease.lease_s or self.lease_lost:
            return self.kill_at or math.inf
        return max(self.lease.last_moment, self.grace) if self.continued == self.lease.until else self.lease.end

    def note(self, text: str) -> None:
        """Write *text* as a line of rlinf-actors into the worker's stderr file."""
        self.err.note(text)
        self.unread = True

    def started(self, pid: int) -> None:
        """Store the pid of the started process, and close the process's ends of its pipes and control socket."""
        self.pid = pid
        self.out.close_writer()
        self.err.close_writer()
        if not self.fork.wrapper:  # else WrappedStart does
            self.child.close()
        if self.theirs is not None:
            self.theirs.close()

    def close(self) -> None:
        self.opened.close()

    def locks(self, packet: packets.LockDevices | packets.UnlockDevices) -> None:
        """Remember, for an agentd that adopts the template, that the worker has asked for its accelerators."""
        if isinstance(packet, packets.LockDevices):
            self.asked, self.asked_at, self.granted = packet, time.monotonic(), False
        elif self.asked is not None and self.asked.request == packet.request:
            self.asked = None

    def kept(self, exit: ExitReport | None = None) -> packets.SurvivingWorker:
        """Return the worker's state for an agentd that adopts the template. *exit* is None while the worker runs."""
        return packets.SurvivingWorker(
            self.id,
            self.pid if self.is_reporting else self.inner or self.pid,
            self.up,
            exit,
            self.fork.place.out_path,
            self.fork.place.err_path,
            *self.read,
            self.asked.request if self.asked is not None else 0,
            self.granted,
            self.asked_at,
            self.fork.spec.token,
        )


SWEEP_S = 2.0
"""Most seconds to wait for the ends of a worker's leftover processes. One in an uninterruptible call may never end."""
EXEC_S = 0.002
"""Seconds until an orphan process that is inside execve() is checked again. No event reports the end of an execve()."""


class ForkedWorkers:
    """All workers of one template: receives their packets and output, finds those that have ended, and tells agentd.

    Args:
        selector: selector of the template's loop. The data of each key is a callback that takes the event mask.
        send: sends a packet to agentd.
        keeps: True if workers continue without an agentd. Each exit report is then stored until agentd sends the packet
            Settled, which says that the head knows the report.
    """

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[packets.ToAgent], None], keeps: bool = False
    ) -> None:
        self._selector = selector
        self._send = send
        self._keeps = keeps
        self._ends: dict[str, packets.SurvivingWorker] = {}
        self._workers: dict[str, ForkedWorker] = {}
        self._pids: dict[int, ForkedWorker] = {}
        self._woken = False
        self._look_again = 0.0  # time, 0 for only after an event
        self._ending: list[ForkedWorker] = []
        self._oom = procfs.oom_kills()

    @property
    def workers(self) -> list[ForkedWorker]:
        return list(self._workers.values())

    def close(self) -> None:
        """Close the descriptors that this process, just forked by the template, has inherited for other workers."""
        for worker in self._workers.values():
            worker.close()

    def add(self, worker: ForkedWorker) -> None:
        self._workers[worker.id] = self._pids[worker.pid] = worker
        self._announce(worker)
        for pump in (worker.out, worker.err):
            self._selector.register(pump, selectors.EVENT_READ, partial(self._on_output, worker, pump))
        self._selector.register(worker.control, selectors.EVENT_READ, partial(self._on_control, worker))
        if worker.link is not None:
            self._selector.register(worker.link, selectors.EVENT_READ, partial(self._on_link, worker))

    def watched(self, id: str) -> None:
        """Handle agentd's packet Watching: agentd has a pidfd of the worker *id*, so the template may reap it."""
        worker = self._workers.get(id)
        if worker is not None:
            worker.watched = True
            self._reap(worker)

    def read(self, packet: packets.Read) -> None:
        """Handle agentd's packet Read: store up to where agentd has read the log files of a worker."""
        worker = self._workers.get(packet.id)
        if worker is not None:
            worker.read = packet.out, packet.err
            worker.out.reading, worker.err.reading = packet.out[1], packet.err[1]
        elif packet.id in self._ends:
            self._ends[packet.id] = replace(self._ends[packet.id], out_read=packet.out, err_read=packet.err)
        if worker is not None and packet.to_end:
            worker.announced = False
            self._announce(worker)

    def renew(self, packet: packets.Renew) -> None:
        """Handle agentd's packet Renew: pass it on to the watchdogs of all robot workers, and confirm it."""
        for worker in self._workers.values():
            if not worker.inner:  # no code of the user runs yet
                worker.lease.renew(packet.until)
            self._order(worker, packet)
        self._send(packets.Renewed("", packet.until))

    def probe(self) -> None:
        """Handle agentd's packet Probe, which asks whether workers' I/O threads run.

        Send agentd the workers' answers (Pongs) that have arrived since the last Probe. Ping each worker that has
        answered the last Ping.
        """
        pongs = [worker.pong for worker in self._workers.values() if worker.pong is not None]
        self._send(packets.Pulses(pongs))
        for worker in self._workers.values():
            worker.pong = None
            if worker.up:
                worker.unanswered += 1
                if worker.unanswered == 1:
                    self._pass_on(worker, packets.Ping())

    def _on_pong(self, worker: ForkedWorker, packet: packets.Pong) -> None:
        late, worker.unanswered = worker.unanswered > 1, 0
        if late:
            self._send(packets.Pulses([packet]))
        else:
            worker.pong = packet

    def tell(self, packet: packets.ToOneWorker) -> None:
        """Pass a packet on to the worker whose id is in the packet. A Revoke without an id is for all robot workers."""
        worker = self._workers.get(packet.id)
        if worker is None:
            if isinstance(packet, packets.Revoke) and not packet.id:
                self.revoke_all(packet.reason)
            return
        if isinstance(packet, packets.DevicesLocked) and worker.asked and worker.asked.request == packet.request:
            worker.granted = True
        if isinstance(packet, packets.Revoke):
            self._order(worker, packet)
        else:
            self._pass_on(worker, packet)

    def _order(self, worker: ForkedWorker, packet: packets.Renew | packets.Revoke) -> None:
        """Send a packet to the watchdog of this worker, if it has robots."""
        if worker.link is not None and not worker.told:
            with contextlib.suppress(OSError):  # it has ended, or stands still and has hundreds of packets to read
                worker.link.send(packets.encode(packet))

    def tell_all(self, packet: packets.NodeRegistered) -> None:
        """Pass a packet of agentd on to all workers that listen. The others have no session with the head yet."""
        for worker in self._workers.values():
            if worker.up:
                self._pass_on(worker, packet)

    def orphaned(self, reason: str) -> None:
        """Handle the end of agentd: revoke the leases of robot workers for this *reason*, and reap ended workers."""
        for worker in self.workers:
            worker.watched = True
            self._order(worker, packets.Revoke(worker.id, reason))
            self._reap(worker)

    def inventory(self) -> list[packets.SurvivingWorker]:
        """Return the state of every worker, and the stored exit reports, for an agentd that adopts the template."""
        living = [worker for worker in self._workers.values() if not worker.told]
        for worker in living:
            worker.watched, worker.unread, worker.announced = False, False, True
        return [*self._ends.values(), *(worker.kept() for worker in living)]

    def told(self, end: packets.SurvivingWorker) -> None:
        """Send agentd a worker's exit report. If workers continue without an agentd, also store the report until agentd
        sends Settled.
        """
        assert end.exit is not None
        if self._keeps:
            self._ends[end.id] = end
        self._send(packets.Exited(end.id, end.exit))

    def settled(self, ids: list[str]) -> None:
        """Handle agentd's packet Settled: the head knows how the workers *ids* ended, so drop their exit reports."""
        for id in ids:
            self._ends.pop(id, None)

    def _pass_on(self, worker: ForkedWorker, packet: packets.ToWorker) -> None:
        if worker.told:
            return  # its socket is closed: the selector would raise
        data = packets.encode(packet)
        if worker.control in self._selector.get_map() and not worker.outgoing.send(data):
            self._watch_control(worker)

    def wake(self) -> None:
        """Note that a signal has arrived, perhaps SIGCHLD, so that the next `check_ends` looks for ended workers."""
        self._woken = True

    def patience(self) -> float | None:
        """Return after how many seconds `check_ends` must run even if no event occurs, None for never."""
        deadlines = [worker.deadline for worker in self._ending]
        now = time.monotonic()
        deadlines += [worker.due() for worker in self._workers.values() if worker.status is None]
        if self._look_again:
            deadlines.append(self._look_again)
        first = min(deadlines, default=math.inf)
        return None if first == math.inf else max(0.0, first - now)

    # --- output and control ---

    def _on_output(self, worker: ForkedWorker, pump: LogPump, _: int) -> None:
        before = pump.lost
        got, ended = pump.pump()
        if ended:
            self._selector.unregister(pump)
        if bool(pump.lost) != bool(before):
            self._send(packets.LogsLost(worker.id, pump.fault if pump.lost else ""))
        if got:
            worker.unread = True
            self._announce(worker)

    def _announce(self, worker: ForkedWorker) -> None:
        if worker.unread and not worker.announced:
            worker.unread, worker.announced = False, True
            self._send(packets.LogsGrew([worker.id]))

    def _watch_control(self, worker: ForkedWorker) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        if self._selector.get_key(worker.control).events != events:
            self._selector.modify(worker.control, events, partial(self._on_control, worker))

    def _on_control(self, worker: ForkedWorker, mask: int = 0) -> None:
        if mask & selectors.EVENT_WRITE and worker.outgoing.flush():
            self._watch_control(worker)
        while True:
            try:
                data = worker.control.recv(packets.MAX_PACKET >> 4)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # reported once, if it ended with unread packets; its own last packets can still be read
            except ConnectionError:
                data = b""
            if not data:
                self._selector.unregister(worker.control)
                if worker.fork.wrapper:  # its profiler may write the report now
                    worker.is_reporting, worker.kill_at = True, time.monotonic() + worker.fork.report_s
                return
            try:
                packet = packets.decode_to_agent(data)
            except RemoteWireError as error:
                packet = packets.StartFailed(worker.id, str(error))
            if isinstance(packet, packets.WorkerUp) and packet.id == worker.id:
                if worker.up is None:  # the first counts: a worker must not flood the head
                    worker.up = packet
                    if worker.inner or not worker.has_robots:  # agentd must know its pid first
                        self._send(packet)
            elif isinstance(packet, (packets.LockDevices, packets.UnlockDevices)) and packet.id == worker.id:
                worker.locks(packet)
                self._send(packet)
            elif isinstance(packet, packets.Pong) and packet.id == worker.id:
                self._on_pong(worker, packet)
            elif isinstance(packet, (WorkerAnswered, packets.TracerAllowed)) and packet.id == worker.id:
                self._send(packet)
            elif isinstance(packet, (packets.StartFailed, packets.TemplateFailed)):
                worker.failure = packet.text

    def _on_link(self, worker: ForkedWorker, _: int = 0) -> None:
        """Handle the packets of a robot worker's watchdog."""
        assert worker.link is not None
        while True:
            try:
                data = worker.link.recv(packets.MAX_PACKET >> 4)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # as of a worker
            if not data:
                self._selector.unregister(worker.link)
                return
            packet = packets.decode_to_agent(data)
            if isinstance(packet, packets.Forked):
                worker.inner = packet.pid
                self._pids[packet.pid] = worker
                self._send(packet)
                if worker.up is not None:
                    self._send(worker.up)
            elif isinstance(packet, packets.Renewed):
                worker.lease.renew(packet.until)
            elif isinstance(packet, packets.LeaseLost):
                if not worker.lease_lost:  # the watchdog ends the worker, and then itself
                    worker.lease_lost, worker.kill_at = True, time.monotonic() + GRACE_S
                    if packet.text:
                        self._send(packet)
                worker.failure = packet.text or worker.failure

    def check_ends(self) -> None:
        """Find ended workers, kill the processes that they left behind, and send their exit reports to agentd.

        Also kill watchdogs that confirm no renewal, and profilers that do not end.
        """
        if not self._woken and self.patience() != 0.0:
            return
        self._woken = False
        for worker in self._workers.values():
            if worker.status is None:
                if worker.due() <= time.monotonic():
                    self._judge(worker)
                worker.status = self._status(worker)
                if worker.status is not None:
                    self._ending.append(worker)
                    worker.deadline = time.monotonic() + SWEEP_S
                    procfs.kill_group(worker.pid)
                    worker.cgroup.kill()
        left = self._sweep()
        for worker in list(self._ending):
            if worker.id not in left or worker.deadline <= time.monotonic():
                self._ending.remove(worker)
                self._tell(worker, worker.id in left)

    def _status(self, worker: ForkedWorker) -> os.waitid_result | None:
        """Return how a worker, or its profiler, has ended; None while it runs."""
        status = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None or not worker.has_robots or worker.inner in (0, worker.pid):
            return status
        os.waitpid(worker.pid, 0)
        if status.si_status:
            how = f"exit code {status.si_status}" if status.si_code == os.CLD_EXITED else f"signal {status.si_status}"
            worker.failure = worker.failure or f"its watchdog ended ({how})"
        del self._pids[worker.pid]
        worker.pid = worker.inner  # a zombie of this process by now, or killed by the kernel and soon one
        return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _judge(self, worker: ForkedWorker) -> None:
        """Continue or kill the watchdog, and so the kernel the worker, or kill the profiler of a worker whose time is
        over.
        """
        if worker.link is not None and worker.link in self._selector.get_map():
            self._on_link(worker)  # what has arrived while this process was busy or stood still
        now, due = time.monotonic(), worker.due()
        if now - due > OWN_STALL_S and not worker.kill_at:
            worker.grace = now + GRACE_S  # it may have stood still with this process, and have its turn only now
        if worker.due() > now:
            return
        if worker.has_robots and not worker.lease_lost and worker.continued != worker.lease.until:
            worker.continued = worker.lease.until
            # a renewal that it got and did not confirm must not let the worker go on
            self._order(worker, packets.Revoke(worker.id, "its watchdog stood still"))
            procfs.kill(worker.pid, signal.SIGCONT)
            return
        watchdog = procfs.stat(worker.pid)
        still = watchdog is not None and watchdog.stopped
        if worker.lease_lost and worker.continued != math.inf:  # stopped in the moments before it ends the worker?
            worker.continued, worker.kill_at = math.inf, now + packets.ROBOT_GONE_S
            if still:
                procfs.kill(worker.pid, signal.SIGCONT)
            return
        worker.kill_at = 0.0  # once
        if worker.fork.wrapper:
            grace = f"{worker.fork.report_s:g} s after the worker"
            worker.note(f"{worker.fork.wrapper[0]} had not ended {grace}, and was killed; its report may be missing")
            procfs.kill_group(worker.pid)
            return
        if worker.lease_lost and watchdog is not None and not still:
            return  # it waits for a worker that stands still
        worker.lease_lost = True
        worker.failure = worker.failure or "its watchdog stood still, and was killed with it"
        self._send(packets.LeaseLost(worker.id, worker.failure))
        procfs.kill(worker.pid)

    def _sweep(self) -> set[str]:
        """Kill the processes that ended workers left behind. Return the ids of workers that still have such processes.

        The template is the subreaper, so it is the parent of every orphan, and an orphan's pid is not reused.
        """
        living = {w.id for w in self._workers.values() if w.status is None}
        left: set[str] = set()
        self._look_again = 0.0
        again = True
        while again:
            again = False
            for pid in procfs.children(os.getpid()):
                if pid in self._pids:
                    continue
                stat = procfs.stat(pid)
                if stat is None or stat.ended:
                    with contextlib.suppress(ChildProcessError):
                        again |= os.waitpid(pid, os.WNOHANG)[0] != 0  # its own children become ours only now
                    continue
                if procfs.text_of(f"/proc/{pid}/comm").strip() == STOPPER:
                    left |= {w.id for w in self._ending}  # of a watchdog that was killed; it ends by itself
                    continue
                executing = procfs.in_exec(pid)  # before its mark is read, which an exec sets
                owner = next((id for id in cgroups.workers_of(pid) if id in self._workers), None)
                owner = owner or procfs.branded(pid, self._workers) or procfs.mark_of(pid)
                if owner is None and stat.session in self._pids:
                    owner = self._pids[stat.session].id
                if owner is None and (executing or procfs.in_exec(pid)):
                    self._look_again = time.monotonic() + EXEC_S
                    left |= {w.id for w in self._ending}  # it may belong to any of them
                    continue
                if owner in living or (owner is None and living):
                    continue  # a daemon of a living worker; one without a known owner ends with the last worker
                left |= {owner} if owner else {w.id for w in self._workers.values()}
                for process in procfs.subtree(pid):
                    procfs.kill(process)
        return left

    def _tell(self, worker: ForkedWorker, left: bool) -> None:
        assert worker.status is not None
        for pump in (worker.out, worker.err):
            pump.finish()
            if pump in self._selector.get_map():
                self._selector.unregister(pump)
            if pump.lost:  # no room came back, so that the file has no line about it
                self._send(packets.LogsLost(worker.id, f"{pump.fault}; {pump.lost:,} bytes until the worker ended"))
        for sock, take in ((worker.control, self._on_control), (worker.link, self._on_link)):
            if sock is not None and sock in self._selector.get_map():
                take(worker)  # its last packets
            if sock is not None and sock in self._selector.get_map():
                self._selector.unregister(sock)  # a process of the worker may still have the other end
        if worker.start is not None:
            worker.start.close()
        now = procfs.oom_kills()
        killed = worker.status.si_code != os.CLD_EXITED and worker.status.si_status == signal.SIGKILL
        oom = now.blame(self._oom) if killed else "no"
        if killed and (kills := worker.cgroup.oom_kills()) is not None:
            oom = "yes" if kills else "no"
        self._oom = now
        worker.told = True
        end = worker.kept(exit_report(worker, oom, left))
        worker.close()
        worker.cgroup.remove()
        self._reap(worker)
        self.told(end)  # last: agentd finds no trace of the worker here any more

    def _reap(self, worker: ForkedWorker) -> None:
        if worker.told and worker.watched:
            os.waitpid(worker.pid, 0)  # a zombie already
            del self._workers[worker.id], self._pids[worker.pid]
            self._pids.pop(worker.inner, None)

    def revoke_all(self, reason: str) -> None:
        for worker in self._workers.values():
            self._order(worker, packets.Revoke(worker.id, reason))
