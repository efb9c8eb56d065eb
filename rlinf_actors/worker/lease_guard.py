"""A robot worker's guard: the thread that makes its robots safe when its lease is over.

House rules:
* It decides by itself, from the deadline it was given: nobody has to reach it for the robot to stop.
* The clock comes first: what was queued while this process stood still is not read before it.
* on_lease_lost runs once, or not at all where `_close` ran to its end; the process ends after it.
* Nothing here takes a lock that the user's threads may hold: they are standing still.
* Nothing keeps on_lease_lost from running: what its end needs (a thread, descriptors) is made with the guard, since the
  process may have none left by then, and whatever fails before on_lease_lost is printed and passed over.

A robot worker's lease: until when it may move its robots. Pure; time is an argument.

The guard counts in CLOCK_BOOTTIME, which goes on while the machine is suspended: a machine that slept for longer than
the lease has lost it. The template counts in CLOCK_MONOTONIC, as agentd does.

The lease page: a page of shared memory that says until when a worker may move its robots.

Code that runs without the interpreter's lock cannot be stopped by the guard. Such code reads the page in each cycle.
The guard writes the page; nobody else can, so it is not renewed when the guard is dead or cannot run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import threading
import time
import traceback
from _thread import allocate_lock
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.worker.standstill import (
    OURS,
    SIGNAL,
    STOP_AGAIN_S,
    STOP_S,
    Descendants,
    ThreadStopper,
    waits_for_lock,
)
from rlinf_actors.worker.template_socket import TemplateSocket

NEVER = (1 << 63) - 1
"""The deadline of a worker without robots: it has no lease to lose."""
INCLUDE_DIR = str(Path(__file__).resolve().parents[1] / "include")
"""Directory of ``rlinf_lease.h``, for ``cc -I``."""
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it before Python 3.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class LeasePage:
    """Until when this worker may move its robots, for code that does not wait for Python. See `Worker.lease_page`.

    The page begins with the deadline: an unsigned 64-bit number in the machine's byte order (the page never leaves the
    machine; workers run in 64-bit interpreters alone, so it is read and written at once), nanoseconds of
    CLOCK_MONOTONIC. It is 0 once the lease is lost, and never changes again then. In a worker without robots it is
    2**63 - 1.

    Attributes:
        fd: read-only descriptor of the page, to be mapped by another process that inherits or is sent it.
        address: of the page in this process, and in those that it forks. Reading is all that is allowed.
        include_dir: directory of ``rlinf_lease.h``, which has ``rlinf_lease_held(address)`` for C and C++.
    """

    include_dir = INCLUDE_DIR

    def __init__(self, fd: int) -> None:
        self.fd = fd
        address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the lease page cannot be mapped")
        self.address: int = address

    @property
    def deadline_ns(self) -> int:
        """The deadline that the page shows now."""
        return ctypes.c_uint64.from_address(self.address).value

    def held(self) -> bool:
        """True while the worker may move its robots. Any thread, and processes that this one has forked."""
        return time.monotonic_ns() < self.deadline_ns


class LeasePageWriter:
    """The guard's side of the page. Its thread only, once that runs.

    Attributes:
        page: what user code gets.
    """

    def __init__(self, deadline_ns: int = NEVER) -> None:
        fd = os.memfd_create("rlinf-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:  # ours is the last mapping that can write, whoever opens /proc/PID/fd
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
            except OSError:  # an older kernel: only the descriptor that we give away is read-only
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._lost = False
        self._deadline = ctypes.c_uint64.from_buffer(self._memory)
        self._deadline.value = deadline_ns
        self.page = LeasePage(readable)

    def renew(self, deadline_ns: int) -> None:
        """Move the deadline forward. Does nothing once `lose` was called."""
        if not self._lost and deadline_ns > self._deadline.value:
            self._deadline.value = deadline_ns

    def lose(self) -> None:
        """Write 0, for good."""
        self._lost = True
        self._deadline.value = 0


MARGIN = 0.2
"""Part of the lease that is kept for stopping: 0.4 s of 2 s, of which the threads that move the robot may take 0.2."""
END_MARGIN = 0.125
"""Part of the lease before whose end nothing renews it any more: 0.25 s of 2 s. A guard that could not run until then
has 0.15 s to say so before its template kills the worker.
"""


class Lease:
    """Counted from when a beat was sent that the head answered, so that whoever waits for its end is never early.

    Args:
        until: its end.
        lease_s: how long it lasts from a beat on, in seconds.
    """

    def __init__(self, until: float, lease_s: float) -> None:
        self.until = until
        self.lease_s = lease_s

    def renew(self, until: float) -> None:
        """It lasts until then; one that is older than what is known changes nothing."""
        self.until = max(self.until, until)

    def left(self, now: float) -> float:
        """Seconds until the robot must be made safe if no renewal comes, 0 when it is time."""
        return max(0.0, self.until - MARGIN * self.lease_s - now)

    @property
    def last_moment(self) -> float:
        """When the lease is lost for good. A renewal that is read later, by a process that stood still, is void."""
        return self.until - END_MARGIN * self.lease_s

    def lost(self, now: float) -> bool:
        """True if no renewal that the guard reads now can save the lease any more."""
        return now >= self.last_moment

    def silence(self, now: float) -> float:
        """For how long there has been no word from the head, in seconds."""
        return now - (self.until - self.lease_s)


ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to end: a robot worker makes its robots safe first."""
RESERVE = 3
"""Descriptors that are kept for the stop of other processes, twice, and for their kill: each needs one."""
UNWIND_S = 0.25
"""When on_lease_lost has waited for a lock that long, in seconds, the threads that stand still give theirs back."""


class Guard:
    """Watches one worker's lease. Made on the main thread before anything of the user's runs.

    Args:
        spec: of the worker; it has claims.
        place: where it runs, and how long its lease lasts as far as known.
        control: the socket to its template. Received from by the guard alone.
        instance: the worker's instance, None as long as there is none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        place: template_protocol.WorkerPlace,
        control: TemplateSocket,
        instance: Callable[[], Any],
    ) -> None:
        self._spec = spec
        self._lease = Lease(place.lease_until + _suspended(), place.lease_s)
        self._page = LeasePageWriter(self._deadline_ns())
        self._timer = _Alarm()
        self._control = control
        self._instance = instance
        self._closed = self._orderly = False
        self._robots = ", ".join(claim.title for claim in spec.claims)
        self._asked: list[str] = []
        self._parking = ThreadStopper()
        self._descendants = Descendants(spec.id)
        self._reserve = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(RESERVE)]
        self._hook_due = allocate_lock()
        self._hook_due.acquire()
        self._wakeup, signals = socket.socketpair()
        for end in (self._wakeup, signals):
            end.setblocking(False)
        self._signals = signals
        for number in ENDINGS:
            signal.signal(number, self._on_ending)
        signal.signal(signal.SIGCONT, self._on_continued)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)  # tells us also while the main thread is in C
        os.register_at_fork(after_in_child=self._forget)
        self._catch_up()
        self._hook = threading.Thread(target=self._call_hook, name=f"{OURS}on-lease-lost", daemon=True)
        self._hook.start()
        threading.Thread(target=self._run, name=f"{OURS}guard", daemon=True).start()

    @property
    def page(self) -> LeasePage:
        """The lease page."""
        return self._page.page

    def keep(self, pid: int) -> str:
        """Do not stop this process, nor what it starts, before on_lease_lost. Return why not, "" if so."""
        return self._descendants.keep(pid)

    def closed(self) -> None:
        """`_close` ran to its end: the robots are in their owner's order. Any thread."""
        self._closed = True

    def lose(self, reason: str) -> None:
        """End the lease from inside. Any thread; returns at once."""
        self._asked.append(reason)
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            self._signals.send(b"\0")

    def stay(self) -> NoReturn:
        """This thread, which served calls, has ended: nothing of the user's runs here; the guard ends the process."""
        self.lose(f"its thread {threading.current_thread().name}, which served calls, ended")
        while True:
            with contextlib.suppress(BaseException):
                self._parking.stay()
            threading.Event().wait()

    def _on_ending(self, number: int, _: object) -> None:
        self.lose(f"it was sent {signal.Signals(number).name}")

    def _on_continued(self, *_: object) -> None:
        """SIGCONT, on the main thread: it goes on from here only if the lease has outlasted the stand still."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._lease.lost(now):
            self.lose(self._stood_still(now))
            self._parking.handler(SIGNAL, None)

    def _forget(self) -> None:
        """In a child process that the worker forked: signals to it are none of the guard's business."""
        signal.set_wakeup_fd(-1)
        ours: list[tuple[int, object]] = [(number, self._on_ending) for number in ENDINGS]
        for number, handler in [*ours, (signal.SIGCONT, self._on_continued), (SIGNAL, self._parking.handler)]:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _catch_up(self) -> None:
        """Read what came while this process started: it has moved no robot yet, so no time has been lost."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        while poll.poll(0):
            packet = self._control.receive()
            if packet is None:
                return  # the template has ended: the guard's thread finds that again
            if isinstance(packet, template_protocol.Revoke):
                self.lose(packet.reason)
            elif isinstance(packet, template_protocol.Renew):
                self._lease.renew(packet.until + _suspended())
        self._page.renew(self._deadline_ns())

    # --- the guard's thread ---

    def _run(self) -> None:
        try:
            try:
                reason = self._wait()
            except Exception:  # noqa: BLE001 - a bug of ours: nothing guards the robots any more
                reason = f"its guard failed\n{traceback.format_exc()}"
            if not self._closed:
                self._parking.interrupt()  # first: a native loop that sees the page must not return to Python and go on
            self._page.lose()
            with contextlib.suppress(OSError):  # the user's code has closed it
                self._control.try_send(template_protocol.LeaseLost(self._spec.id, reason))
            if not self._closed:
                self._make_safe()
                _say(f"[rlinf-actors] {self._spec.group}:{self._spec.rank}: {reason}\n")
        finally:
            os._exit(template_protocol.LEASE_LOST_CODE)

    def _wait(self) -> str:
        """Wait for the end of the lease; returns why it is over."""
        poll = select.poll()
        for fd in (self._control.fileno(), self._wakeup.fileno(), self._timer.fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        lost = f"the lease of {self._robots} was lost"
        while True:
            left = self._lease.left(time.clock_gettime(time.CLOCK_BOOTTIME))
            self._timer.set(left)
            ready = {fd for fd, _ in poll.poll(left * 1000)} - {self._timer.fd}
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._lease.lost(now):  # before what was queued meanwhile is read: that renews nothing any more
                return f"{lost}: {self._asked[0] if self._asked else self._stood_still(now)}"
            if not ready and not self._lease.left(now):
                return f"{lost}: no word from the head for {self._lease.silence(now):.1f} s"
            for fd in ready:
                reason = self._heard() if fd == self._control.fileno() else self._woken()
                if reason:
                    return f"{self._robots}: {reason}" if self._orderly else f"{lost}: {reason}"

    def _heard(self) -> str:
        """Take a packet of the template's; returns why the lease is over, "" if it is not."""
        packet = self._control.receive()
        if packet is None:
            return "its template process ended"
        if isinstance(packet, template_protocol.Revoke):
            self._orderly = packet.orderly
            return packet.reason
        if isinstance(packet, template_protocol.Renew):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._lease.lost(now):  # this process stood still after it looked at the clock
                return self._stood_still(now)
            self._lease.renew(packet.until + _suspended())
            self._page.renew(self._deadline_ns())
        else:
            self._control.hand_over(packet)
        return ""

    def _stood_still(self, now: float) -> str:
        return (
            "its process stood still, or was kept from running by C code that holds the interpreter's lock, and read "
            f"nothing for {self._lease.silence(now):.1f} s"
        )

    def _deadline_ns(self) -> int:
        """The last moment of the lease, for the page: in nanoseconds of CLOCK_MONOTONIC."""
        return max(0, int((self._lease.last_moment - _suspended()) * 1e9))

    def _woken(self) -> str:
        signals = self._wakeup.recv(4096)
        if self._asked:
            return self._asked[0]
        return next((f"it was sent {number.name}" for number in ENDINGS if number in signals), "")

    def _make_safe(self) -> None:
        if self._instance() is None:
            return
        stopped = self._try_to(lambda: self._descendants.stop(STOP_S))
        if not self._parking.park():
            _say("[rlinf-actors] the main thread is in C code that does not return; on_lease_lost runs beside it\n")
        if not (self._try_to(lambda: self._descendants.stop(STOP_AGAIN_S)) and stopped):
            _say("[rlinf-actors] a process that this worker started does not stop; on_lease_lost runs beside it\n")
        end = time.monotonic() + template_protocol.ON_LEASE_LOST_S
        self._hook_due.release()
        self._hook.join(UNWIND_S)
        if self._hook.is_alive() and waits_for_lock(self._hook.native_id or 0):
            self._parking.let_go()
        self._hook.join(max(0.0, end - time.monotonic()))
        if self._hook.is_alive():
            _say(f"[rlinf-actors] on_lease_lost did not return within {template_protocol.ON_LEASE_LOST_S:g} s\n")
        self._try_to(self._descendants.kill)

    def _try_to(self, act: Callable[[], bool]) -> bool:
        """Deal with other processes, with a descriptor of the reserve. Return False if that failed, after printing why.

        The user's code may have used up all the others, and on_lease_lost has to run whatever happens here.
        """
        with contextlib.suppress(OSError):  # the user's code has closed it
            os.close(self._reserve.pop())
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - no reason to leave the robot moving
            _say(f"[rlinf-actors] cannot look for processes that this worker started: {error!r}\n")
            return False

    def _call_hook(self) -> None:
        """Wait for `_make_safe`, then call on_lease_lost. A thread of its own, started while one can be."""
        self._hook_due.acquire()
        try:
            self._instance().on_lease_lost()
        except BaseException:  # noqa: BLE001 - there is no caller; the process ends next
            _say(traceback.format_exc())


def _say(text: str) -> None:
    """To stderr, past its buffer, whose lock a thread that stands still may hold; never waits for who reads it."""
    data = text.encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(0):
            data = data[os.write(2, data[: select.PIPE_BUF]) :]


def _suspended() -> float:
    """For how long this machine has been suspended since its boot, in seconds: CLOCK_MONOTONIC stood still then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class _Alarm:
    """A descriptor that is readable after a time that goes on while the machine is suspended; poll's own does not.

    Attributes:
        fd: the descriptor, -1 where the kernel has no such timer: poll's own time is all there is then.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self, seconds: float) -> None:
        """Be readable after so long, and not any more because of an earlier time."""
        whole, rest = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)  # 0 would switch it off
        value = _Itimerspec(0, 0, whole, rest)
        self._libc.timerfd_settime(self.fd, 0, ctypes.byref(value), None)
