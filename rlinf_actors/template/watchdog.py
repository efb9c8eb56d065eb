"""The watchdog: the parent of a robot worker, which ends the worker and all that it started in time.

Theory of operation
-------------------
`start` runs in each process that is to become a robot worker, before any code of the user. It forks the worker and, if
the class has stop_hardware, the stopper (worker.stopper). The process itself becomes the watchdog: one thread, one poll
loop, no lock, no code of the user. As a subreaper it is above everything that the worker starts.

Renewals come from the template. The watchdog moves the deadline in the lease page, and passes the renewal to the
worker's guard. It passes the guard's confirmation back. The lease is what the guard has confirmed, so a worker that
stands still, or whose C code holds the interpreter's lock, loses it. The lease also ends by an order (Revoke), by the
guard, with the template, or when the worker closes its connection to the watchdog (os.exec). Then the watchdog

1. tells the guard, writes 0 into the lease page, and tells the template;
2. stops (SIGSTOP) what the worker has started, except what `keep_for_stop` names;
3. kills the worker: ROBOT_END_S after the guard has said that it is at work, at the last moment of the lease if it has
   not. A worker without stop_hardware that stands still (SIGSTOP, a debugger) runs its hook when it continues;
4. kills everything below it, lets the stopper run stop_hardware, and ends. The worker is then the template's zombie.

The kernel kills the worker if the watchdog is killed. The kernel continues a watchdog that stands still when the
template ends. The template continues a watchdog that confirms no renewal, and kills it 0.15 s later.

House rules: the clock is read before packets that waited, so that a watchdog that stood still revives no lease. Nothing
here waits for the worker for longer than FIRST_S.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors import procfs
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.worker import stopper as outside
from rlinf_actors.worker.lease_guard import GUARD_S, Guarded, say
from rlinf_actors.worker.leasepage import Alarm, Lease, LeasePageWriter, lost, suspended

if TYPE_CHECKING:
    from rlinf_actors.template.child_setup import ChildStart

STOP_S, STOP_AGAIN_S = 0.08, 0.02
"""Seconds to wait for processes to stop: STOP_S when the lease ends, STOP_AGAIN_S when the worker's threads are held.

0.1 s together, since the robot still moves. A process in an uninterruptible system call stops when that call is over.
"""
LOOK_S = 0.0005
FIRST_S = 0.02
"""Most seconds that the guard has to hold the main thread, before the lease page says that the lease is lost."""
CONTINUED_S = 0.3
"""Seconds that the guard of a worker that stood still has to say that it is at work, when the worker goes on."""
TRACED_S = 1.0
"""Seconds until a worker that stands still is looked at again: no event tells that a debugger has let it go."""
CLOSED_S = 0.2
"""Seconds from the end of the connection to a worker that lives until the worker is killed."""
DIE_S = 0.1
"""Seconds that a killed worker, and all below it, have to die before stop_hardware runs beside them."""
LEFT_S = 1.0
"""Seconds that killed processes have to die. One in an uninterruptible system call may never end."""


def start(child: ChildStart, prepare_stopper: Callable[[ChildStart], None]) -> ChildStart:
    """Fork the robot worker (and its stopper) of *child*. Return, in the worker alone, what it needs to start.

    This process becomes the watchdog, and ends here. *prepare_stopper* sets the stopper up for code of the user.

    Raises:
        OSError: no process or descriptor is left.
    """
    spec, place, watchdog = child.fork.spec, child.fork.place, os.getpid()
    lease = Lease(place.lease_until + suspended(), place.lease_s)
    page = LeasePageWriter(page_deadline(lease))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking, asked = socket.socketpair()
    waits, go = os.pipe()
    procfs.set_subreaper()
    stopper = os.fork() if spec.stops_outside else 0
    if spec.stops_outside and not stopper:
        for fd in (child.link, child.control, ours.detach(), theirs.detach(), asking.detach(), go):
            os.close(fd)
        outside.run(lambda: prepare_stopper(child), asked, waits)
    worker = os.fork()
    if not worker:
        for fd in (child.link, ours.detach(), asked.detach(), waits, go):
            os.close(fd)
        guarded = Guarded(page, theirs.detach(), asking.detach() if spec.stops_outside else -1)
        return msgspec.structs.replace(child, template=watchdog, guarded=guarded)
    for fd in (child.control, theirs.detach(), asking.detach(), asked.detach(), waits):
        os.close(fd)
    with contextlib.suppress(PermissionError):  # a new interpreter, which leads its session already
        os.setsid()
    procfs.die_with_parent(signal.SIGCONT)
    try:
        Watchdog(child, lease, page, socket.socket(fileno=child.link), ours, worker, stopper, go).run()
    except BaseException:  # noqa: BLE001 - no caller; with this process the worker ends
        say(traceback.format_exc())
        os._exit(1)
    os._exit(0)


class Watchdog:
    """The watchdog's loop. *link* is its socket to the template, *guard* that to the worker's guard.

    *worker* and *stopper* are pids; *stopper* is 0 without one. The pipe *go* starts stop_hardware.
    """

    def __init__(
        self,
        child: ChildStart,
        lease: Lease,
        page: LeasePageWriter,
        link: socket.socket,
        guard: socket.socket,
        worker: int,
        stopper: int,
        go: int,
    ) -> None:
        spec = child.fork.spec
        self._id = spec.id
        self._claims = spec.claims
        self._lease, self._page, self._alarm = lease, page, Alarm()
        self._renewed = Lease(lease.until, lease.lease_s)  # what the template has sent, confirmed by the guard or not
        self._link, self._guard = link, guard
        self._worker, self._stopper, self._go = worker, stopper, go
        self._below = Descendants(worker, stopper)
        self._guard_s = 0.0 if stopper else GUARD_S  # stop_hardware needs no guard
        self._reason = ""  # why the lease has ended
        self._guarded = False  # the guard runs, and so perhaps code of the user
        self._closed = False  # `_close` of the instance has returned: the robots need no stop
        self._at_work = False  # the guard makes the robots safe
        self._still = False  # the worker was to be killed, and stands still
        self._worker_ended = False
        self._closed_at = self._kill_at = self._stop_at = self._stopper_due = self._give_up_at = math.inf
        self._wakeup, signals = socket.socketpair()
        for end in (self._wakeup, signals):
            end.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # sent to a group: the worker handles them
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signals.detach(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        procfs.set_name("rlinf-watchdog")
        procfs.set_title(f"rlinf-watchdog of {spec.group}:{spec.rank} of {spec.namespace}")
        self._tell(packets.Forked(self._id, worker))

    def run(self) -> None:
        """Watch the worker. Return when it has ended with all that it started, and stop_hardware with it."""
        poll = select.poll()
        handlers = {  # in this order: what the guard has said comes before an order that ends the lease
            self._guard.fileno(): self._on_guard,
            self._link.fileno(): self._on_link,
            self._wakeup.fileno(): self._on_signal,
        }
        for fd in (*handlers, self._alarm.fd):
            poll.register(fd, select.POLLIN)
        self._tend_children()  # signals before this process listened
        while not self._over():
            self._alarm.set(self._due() - _now())
            ready = {fd for fd, _ in poll.poll()}
            if self._guarded and self._lease.lost(_now()):
                self._lose(self._silence())  # before queued packets are read: these renew nothing any more
            for fd, handle in handlers.items():
                if fd in ready and not handle():
                    poll.unregister(fd)
            self._judge(_now())

    def _due(self) -> float:
        if self._worker_ended:
            return min(self._stop_at, self._stopper_due if self._stopper else self._give_up_at)
        end = math.inf if self._reason or not self._guarded else self._lease.end
        return min(end, self._closed_at, self._kill_at, self._stop_at, self._stopper_due)

    def _over(self) -> bool:
        if not self._worker_ended or self._stopper:
            return False
        return _now() >= self._give_up_at or not self._below.any()

    # --- packets ---

    def _on_link(self) -> bool:
        """Handle the packets of the template. Return False if it has ended."""
        for packet in _waiting(self._link):
            if packet is None:
                self._lose("its template process ended")
                return False
            if isinstance(packet, packets.Revoke):
                titles = ", ".join(claim.title for claim in self._claims)
                text = f"{titles}: {packet.reason}" if packet.orderly else lost(self._claims, packet.reason)
                self._end_lease(text)
            elif isinstance(packet, packets.Renew) and not self._reason:
                self._renewed.renew(packet.until + suspended())
                self._page.renew(page_deadline(self._renewed))
                _send(self._guard, packet)
                if not self._guarded:
                    self._confirm(packet.until)
        return True

    def _on_guard(self) -> bool:
        """Handle the packets of the worker's guard. Return False if the connection has ended."""
        for packet in _waiting(self._guard):
            if packet is None:
                self._closed_at = _now() + CLOSED_S  # it ends, or was replaced
                return False
            self._guarded = True
            if isinstance(packet, packets.Renewed):
                self._confirm(packet.until)
            elif isinstance(packet, packets.Keep):
                self._below.kept[packet.pid] = packet.started
            elif isinstance(packet, packets.Closed):
                self._closed = True
            elif isinstance(packet, packets.LeaseLost):
                self._end_lease(packet.text)
                self._at_work, self._kill_at = True, _now() + packets.ROBOT_END_S
            elif isinstance(packet, packets.Held):
                if packet.done:
                    self._below.kill()
                else:
                    self._stop_descendants(STOP_AGAIN_S)
                _send(self._guard, packet)
        return True

    def _confirm(self, until: float) -> None:
        self._lease.renew(until + suspended())
        self._tell(packets.Renewed(self._id, until))

    def _tell(self, packet: packets.ToAgent) -> None:
        _send(self._link, packet)

    # --- the end of the lease ---

    def _lose(self, reason: str) -> None:
        self._end_lease(lost(self._claims, reason))

    def _end_lease(self, text: str) -> None:
        """End the lease: from now on nothing below this process may move the robots but on_lease_lost."""
        if self._reason:
            return
        self._reason = text[: packets.TEXT_CHARS]
        self._kill_at = max(_now() + self._guard_s, self._lease.last_moment)
        _send(self._guard, packets.Revoke(self._id, self._reason))
        if self._guarded:  # until it says that it holds the main thread, to which C code returns that reads the page
            answer = select.poll()
            answer.register(self._guard, select.POLLIN)
            answer.poll(FIRST_S * 1000)
        self._page.lose()
        self._say_lost("")
        if not self._closed:
            self._stop_descendants(STOP_S)

    def _silence(self) -> str:
        now = _now()
        return self._lease.stood_still(now) if now < self._renewed.end else self._lease.no_word(now)

    def _say_lost(self, more: str) -> None:
        self._tell(packets.LeaseLost(self._id, f"{self._reason}{more}"[: packets.TEXT_CHARS]))

    def _stop_descendants(self, within_s: float) -> None:
        try:
            stopped = self._below.stop(within_s)
        except OSError as error:
            say(f"[rlinf-actors] cannot look for processes that this worker started: {error!r}\n")
        else:
            if not stopped:
                say("[rlinf-actors] a process that this worker started does not stop; on_lease_lost runs beside it\n")

    def _judge(self, now: float) -> None:
        """Do what is due at the time *now*."""
        if self._guarded and not self._reason and now >= self._lease.end:
            self._lose(self._silence())
        if now >= self._closed_at and not self._worker_ended:
            self._closed_at = math.inf
            self._lose("its process lives without its connection to its watchdog: it was replaced (os.exec)")
            self._kill_at = now
        if self._still and not _stands_still(self._worker):
            self._still, self._kill_at = False, now + (packets.ROBOT_END_S if self._at_work else CONTINUED_S)
        if now >= self._kill_at and not self._worker_ended:
            self._still = not self._stopper and _stands_still(self._worker)  # it runs its hook when it continues
            self._kill_at = now + TRACED_S if self._still else math.inf
            if not self._still:
                self._kill(now)
        if now >= self._stop_at or (self._worker_ended and self._go >= 0 and not self._below.any()):
            self._stop_outside(now)
        if now >= self._stopper_due:
            os.kill(self._stopper, signal.SIGKILL)
            self._on_stopper_end(-signal.SIGKILL)  # now: it may be in an uninterruptible system call
            self._give_up_at = now + LEFT_S

    def _kill(self, now: float) -> None:
        if not self._at_work:
            self._say_lost("; its guard could not run, and so its watchdog killed it")
        os.kill(self._worker, signal.SIGKILL)
        self._below.kill()
        self._stop_at = now + DIE_S

    def _stop_outside(self, now: float) -> None:
        """Let the stopper run stop_hardware, once; or end, if `_close` has brought the robots to rest."""
        self._stop_at = math.inf
        if self._go < 0:
            return
        with contextlib.suppress(BrokenPipeError):  # there is no stopper any more
            os.write(self._go, outside.NO_STOP if self._closed else outside.STOP)
        os.close(self._go)
        self._go = -1
        if self._stopper:
            self._stopper_due = now + packets.STOP_HARDWARE_S + outside.MORE_S

    # --- processes ---

    def _on_signal(self) -> bool:
        self._wakeup.recv(4096)
        self._tend_children()
        return True

    def _tend_children(self) -> None:
        """Note the ends of the worker and the stopper, and reap other children. The template reaps the worker."""
        for pid in procfs.children(os.getpid()):
            if pid == self._worker:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and not self._worker_ended:
                    self._on_worker_end()
            else:
                with contextlib.suppress(ChildProcessError):
                    reaped, status = os.waitpid(pid, os.WNOHANG)
                    if reaped and reaped == self._stopper:
                        self._on_stopper_end(os.waitstatus_to_exitcode(status))
        if self._worker_ended:
            self._below.kill()

    def _on_worker_end(self) -> None:
        self._worker_ended = True
        self._on_guard()  # its last packets
        if not self._reason:
            self._say_lost("")  # only that this process ends soon
            self._reason = "its process ended"
        self._page.lose()
        self._stop_at = min(self._stop_at, _now() + DIE_S)
        self._give_up_at = _now() + LEFT_S

    def _on_stopper_end(self, code: int) -> None:
        self._stopper, self._below.stopper, self._stopper_due = 0, 0, math.inf
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if self._go >= 0 and not self._worker_ended:
            self._lose(f"the process that would run its stop_hardware() has ended ({how})")
        elif code:
            limit = f"it did not return within {packets.STOP_HARDWARE_S:g} s"
            why = limit if -code in (signal.SIGALRM, signal.SIGKILL) else f"{how}; its stderr says why"
            self._say_lost(f"; stop_hardware() failed: {why}")


class Descendants:
    """The processes below this watchdog other than the worker and the stopper, daemons included.

    Attributes:
        kept: those that `stop` leaves alone, with their descendants: start time by pid.
        stopper: pid of the stopper, 0 when it has ended. What it starts is left alone.
    """

    def __init__(self, worker: int, stopper: int) -> None:
        self.kept: dict[int, int] = {}
        self.stopper = stopper
        self._worker = worker
        self._stopped: dict[int, int] = {}

    def stop(self, within_s: float) -> bool:
        """Send SIGSTOP to all processes that are not kept. Return False if one still runs after *within_s* seconds."""
        deadline = time.monotonic() + within_s
        while True:
            found = [one for one in self._all() if self._stopped.get(one.pid) != one.started]
            for one in found:
                self._stopped[one.pid] = one.started
                procfs.kill(one.pid, signal.SIGSTOP)
            moving = [pid for pid, started in self._stopped.items() if _runs(pid, started)]
            if not found and not moving:
                return True
            if time.monotonic() >= deadline:  # also for one of another user (sudo), which does not stop
                return False
            # A process on another core runs until its next interrupt. No event can replace this sleep: the kernel
            # reports a stop only to the parent of the stopped process, and this process is not the parent of all.
            if moving:
                time.sleep(LOOK_S)

    def kill(self) -> None:
        for one in self._all(kept=False):
            procfs.kill(one.pid)

    def any(self) -> bool:
        return next(self._all(kept=False), None) is not None

    def _all(self, kept: bool = True) -> Iterator[procfs.Stat]:
        """Yield the living processes; without those to keep if *kept*."""
        waiting = [pid for pid in procfs.children(os.getpid()) if pid not in (self._worker, self.stopper)]
        waiting += procfs.children(self._worker)
        while waiting:
            pid = waiting.pop()
            found = procfs.stat(pid)
            if found is None or (kept and self.kept.get(pid) == found.started):
                continue
            waiting += procfs.children(pid)
            if not found.ended:
                yield found


def page_deadline(lease: Lease) -> int:
    """Return the deadline for the lease page, in nanoseconds of CLOCK_MONOTONIC."""
    return max(1, int((lease.last_moment - suspended()) * 1e9))


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _waiting(sock: socket.socket) -> Iterator[packets.ToWatchdog | None]:
    """Yield the packets that wait in *sock*; at the end of the connection None."""
    while True:
        try:
            data = sock.recv(packets.MAX_PACKET >> 4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            continue  # the peer ended with unread packets; its own last packets, and the end, can still be read
        except OSError:
            data = b""
        yield packets.decode_to_watchdog(data) if data else None
        if not data:
            return


def _send(sock: socket.socket, packet: packets.ToAgent | packets.ToWorker | packets.ToWatchdog) -> None:
    with contextlib.suppress(OSError):  # the peer has ended, or stands still with hundreds of packets to read
        sock.send(packets.encode(packet), socket.MSG_DONTWAIT)


def _stands_still(pid: int) -> bool:
    """Return True if all threads of the process *pid* are stopped or traced."""
    states = _thread_states(pid)
    return bool(states) and set(states) <= set("Tt")


def _runs(pid: int, started: int) -> bool:
    states = _thread_states(pid)  # a thread on another core goes on after the main thread has stopped or ended
    found = procfs.stat(pid)
    return found is not None and found.started == started and not set(states) <= set("TtZX")


def _thread_states(pid: int) -> str:
    """Return the states of the threads of the process *pid*, one letter each; "" if the process has been reaped."""
    found = ""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = procfs.text_of(f"/proc/{pid}/task/{task}/stat")
            found += text[text.rfind(")") + 2 :][:1]
    return found
