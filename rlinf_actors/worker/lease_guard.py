"""The guard of a robot worker: the thread that makes the worker's robots safe when its lease ends.

`worker.main` makes the guard on the main thread, before any user code runs. `Lease` computes the deadline; the template
uses it too. `LeasePage` shows the deadline to code that runs without the interpreter's lock.

House rules:
* The guard decides by itself, from the last deadline that it received: a robot stops even if no process can reach the
  guard.
* The guard reads the clock before queued packets, so that packets that arrived while this process stood still cannot
  renew a lease that has ended.
* on_lease_lost runs once, or not at all if `_close` has returned. The process ends after it.
* The guard takes no lock that a user's thread may hold, since the guard stops those threads.
* Nothing may prevent on_lease_lost. The guard reserves a thread and descriptors at the start, since the process may
  have none left at the end. An error before on_lease_lost is printed, and the guard continues.

Clocks: the guard counts in CLOCK_BOOTTIME, which continues while the machine is suspended, so a machine that slept for
longer than the lease has lost it. The template, agentd and the page count in CLOCK_MONOTONIC.
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

from rlinf_actors import forks
from rlinf_actors.exit_codes import LEASE_LOST
from rlinf_actors.wire import template_protocol as packets
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
"""Deadline in the lease page of a worker without robots, which has no lease."""
INCLUDE_DIR = str(Path(__file__).resolve().parents[1] / "include")
"""Directory of ``rlinf_lease.h``, for ``cc -I``."""
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it before Python 3.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class LeasePage:
    """The time until which this worker may move its robots, for code that does not wait for Python.

    The guard cannot stop code that runs without the interpreter's lock. Such code reads the page before each command.
    Only the guard writes the page, so nothing extends the time when the guard is dead or cannot run.

    The page begins with the deadline, an unsigned 64-bit number in the machine's byte order: nanoseconds of
    CLOCK_MONOTONIC. Workers run in 64-bit interpreters only, so the number is read and written in one step. It is 0,
    for good, once the lease is lost, and 2**63 - 1 in a worker without robots.

    Attributes:
        fd: read-only descriptor of the page. A process that inherits or receives the descriptor can map the page.
        address: address of the read-only page in this process and in processes that it forks.
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
        """Deadline in the page now, in nanoseconds of CLOCK_MONOTONIC; 0 once the lease is lost."""
        return ctypes.c_uint64.from_address(self.address).value

    def held(self) -> bool:
        """True while the worker may move its robots. Any thread, also in processes that this one has forked."""
        return time.monotonic_ns() < self.deadline_ns


class LeasePageWriter:
    """Makes a lease page, and writes the deadline to it. Only the guard's thread may use it, once that thread runs."""

    def __init__(self, deadline_ns: int = NEVER) -> None:
        fd = os.memfd_create("rlinf-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:  # no later mapping can write, also by /proc/PID/fd
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
            except OSError:  # an older kernel: only the descriptor of the reading side is read-only
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._lost = False
        self._deadline = ctypes.c_uint64.from_buffer(self._memory)
        self._deadline.value = deadline_ns
        self.page = LeasePage(readable)

    def renew(self, deadline_ns: int) -> None:
        """Set the deadline to *deadline_ns* if that is later. No effect after `lose`."""
        if not self._lost and deadline_ns > self._deadline.value:
            self._deadline.value = deadline_ns

    def lose(self) -> None:
        """Set the deadline to 0 for good, because the lease is lost."""
        self._lost = True
        self._deadline.value = 0


MARGIN = 0.2
"""Fraction of the lease that is reserved for making robots safe: 0.4 s of 2 s. Stopping threads takes up to 0.2 s."""
END_MARGIN = 0.125
"""Fraction at the end of the lease in which a renewal has no effect: 0.25 s of 2 s. The guard then sends LeaseLost."""


class Lease:
    """The time until which a worker may move its robots. Reads no clock: callers pass the time, in seconds.

    The lease starts when agentd sends a heartbeat that the head then answers, so it ends no later than the head
    assumes. *until* is its end on the caller's clock, *lease_s* its length in seconds from that heartbeat.
    """

    def __init__(self, until: float, lease_s: float) -> None:
        self.until = until
        self.lease_s = lease_s

    def renew(self, until: float) -> None:
        """Extend the lease to *until*, if that is later than its present end."""
        self.until = max(self.until, until)

    def left(self, now: float) -> float:
        """Return the seconds from *now* until the guard must make the robots safe; 0 if that time has come."""
        return max(0.0, self.until - MARGIN * self.lease_s - now)

    @property
    def last_moment(self) -> float:
        """Time at which the lease is lost for good. A renewal that is read later has no effect."""
        return self.until - END_MARGIN * self.lease_s

    def lost(self, now: float) -> bool:
        return now >= self.last_moment

    def silence(self, now: float) -> float:
        """Return the seconds from the heartbeat that last renewed the lease until *now*."""
        return now - (self.until - self.lease_s)


ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process. A robot worker makes its robots safe before it ends."""
RESERVE = 3
"""Number of reserved descriptors. `_make_safe` searches for processes three times, with one descriptor for each."""
UNWIND_S = 0.25
"""Seconds that on_lease_lost may wait for a lock. Then the stopped threads are ended, to release their locks."""


class Guard:
    """Watches the lease of one robot worker, and makes its robots safe when the lease ends.

    Construct it on the main thread before any user code runs. Its thread is the only one that receives from *control*,
    the socket to the template. *instance* returns the instance of the user's class, None while there is none.
    """

    def __init__(
        self, spec: WorkerSpec, place: packets.WorkerPlace, control: TemplateSocket, instance: Callable[[], Any]
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
        self._threads = ThreadStopper()
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
        # this wakes the guard also while the main thread is in C
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        forks.handled_in_parent([*ENDINGS, signal.SIGCONT], self._forget)
        self._catch_up()
        self._hook = threading.Thread(target=self._call_hook, name=f"{OURS}on-lease-lost", daemon=True)
        self._hook.start()
        threading.Thread(target=self._run, name=f"{OURS}guard", daemon=True).start()

    @property
    def page(self) -> LeasePage:
        return self._page.page

    def keep(self, pid: int) -> str:
        """Let a process and its descendants run while on_lease_lost runs.

        Return "", or the reason why that is impossible.
        """
        return self._descendants.keep(pid)

    def closed(self) -> None:
        """Note that `_close` of the instance has returned, so that on_lease_lost does not run. Any thread."""
        self._closed = True

    def lose(self, reason: str) -> None:
        """End the lease at once, so that the guard makes the robots safe. Any thread; does not wait.

        *reason* is the text that the report about the end gives.
        """
        self._asked.append(reason)
        with contextlib.suppress(BlockingIOError):  # full: the guard is awake
            self._signals.send(b"\0")

    def stay(self) -> NoReturn:
        """End the lease, because the calling thread can run no more calls.

        Block until the guard ends the process.
        """
        self.lose(f"its thread {threading.current_thread().name}, which served calls, ended")
        while True:
            with contextlib.suppress(BaseException):
                self._threads.stop_here()
            threading.Event().wait()

    def _on_ending(self, number: int, _: object) -> None:
        self.lose(f"it was sent {signal.Signals(number).name}")

    def _on_continued(self, *_: object) -> None:
        """Handle SIGCONT on the main thread.

        If the lease ended while the process was stopped, stop the main thread at once.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._lease.lost(now):
            self.lose(self._stood_still(now))
            self._threads.handler(SIGNAL, None)

    def _forget(self) -> None:
        """Restore the default signal handlers in a process that the worker has forked. Called there after each fork."""
        signal.set_wakeup_fd(-1)
        ours: list[tuple[int, object]] = [(number, self._on_ending) for number in ENDINGS]
        for number, handler in [*ours, (signal.SIGCONT, self._on_continued), (SIGNAL, self._threads.handler)]:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _catch_up(self) -> None:
        """Handle the packets that arrived while this process started.

        A renewal among them counts even if it comes late, because no robot has moved yet.
        """
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        while poll.poll(0):
            packet = self._control.receive()
            if packet is None:
                return  # the template has ended: the guard's thread finds the same
            if isinstance(packet, packets.Revoke):
                self.lose(packet.reason)
            elif isinstance(packet, packets.Renew):
                self._lease.renew(packet.until + _suspended())
        self._page.renew(self._deadline_ns())

    # --- the guard's thread ---

    def _run(self) -> None:
        try:
            try:
                reason = self._wait()
            except Exception:  # noqa: BLE001 - an internal error: the robots are not guarded any more
                reason = f"its guard failed\n{traceback.format_exc()}"
            if not self._closed:
                self._threads.interrupt()  # first: a C loop that sees the lost page must not continue in Python
            self._page.lose()
            with contextlib.suppress(OSError):  # the user's code has closed it
                self._control.try_send(packets.LeaseLost(self._spec.id, reason))
            if not self._closed:
                self._make_safe()
                _say(f"[rlinf-actors] {self._spec.group}:{self._spec.rank}: {reason}\n")
        finally:
            os._exit(LEASE_LOST)

    def _wait(self) -> str:
        """Wait for the end of the lease. Return the reason of the end."""
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
            if self._lease.lost(now):  # before queued packets are read: these renew nothing any more
                return f"{lost}: {self._asked[0] if self._asked else self._stood_still(now)}"
            if not ready and not self._lease.left(now):
                return f"{lost}: no word from the head for {self._lease.silence(now):.1f} s"
            for fd in ready:
                reason = self._heard() if fd == self._control.fileno() else self._woken()
                if reason:
                    return f"{self._robots}: {reason}" if self._orderly else f"{lost}: {reason}"

    def _heard(self) -> str:
        """Receive one packet from the template and handle it. Return why the lease has ended, "" if it has not."""
        packet = self._control.receive()
        if packet is None:
            return "its template process ended"
        if isinstance(packet, packets.Revoke):
            self._orderly = packet.orderly
            return packet.reason
        if isinstance(packet, packets.Renew):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._lease.lost(now):  # this process was stopped after it read the clock
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
        """Return the deadline for the lease page, in nanoseconds of CLOCK_MONOTONIC."""
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
        if not self._threads.stop_all():
            _say("[rlinf-actors] the main thread is in C code that does not return; on_lease_lost runs beside it\n")
        if not (self._try_to(lambda: self._descendants.stop(STOP_AGAIN_S)) and stopped):
            _say("[rlinf-actors] a process that this worker started does not stop; on_lease_lost runs beside it\n")
        end = time.monotonic() + packets.ON_LEASE_LOST_S
        self._hook_due.release()
        self._hook.join(UNWIND_S)
        if self._hook.is_alive() and waits_for_lock(self._hook.native_id or 0):
            self._threads.unwind()
        self._hook.join(max(0.0, end - time.monotonic()))
        if self._hook.is_alive():
            _say(f"[rlinf-actors] on_lease_lost did not return within {packets.ON_LEASE_LOST_S:g} s\n")
        self._try_to(self._descendants.kill)

    def _try_to(self, act: Callable[[], bool]) -> bool:
        """Free a reserved descriptor, and call *act*, which needs a descriptor. Return its result, False if it raised.

        User code may have used up all other descriptors, and on_lease_lost must run nevertheless.
        """
        with contextlib.suppress(OSError):  # the user's code has closed it
            os.close(self._reserve.pop())
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - the robot must be made safe in any case
            _say(f"[rlinf-actors] cannot look for processes that this worker started: {error!r}\n")
            return False

    def _call_hook(self) -> None:
        """Wait until `_make_safe` has stopped user code, then call on_lease_lost.

        Runs on a thread made by the constructor.
        """
        self._hook_due.acquire()
        try:
            self._instance().on_lease_lost()
        except BaseException:  # noqa: BLE001 - no caller; the process ends next
            _say(traceback.format_exc())


def _say(text: str) -> None:
    """Write *text* to stderr without blocking, and without the buffer, whose lock a stopped thread may hold."""
    data = text.encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(0):
            data = data[os.write(2, data[: select.PIPE_BUF]) :]


def _suspended() -> float:
    """Return how many seconds since its boot this machine was suspended. CLOCK_MONOTONIC does not count them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class _Alarm:
    """A timer that also counts time in which the machine is suspended, unlike the timeout of poll.

    Its descriptor *fd* becomes readable when the time is over. *fd* is -1 if the kernel has no such timer.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self, seconds: float) -> None:
        whole, rest = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)  # 0 would disarm it
        value = _Itimerspec(0, 0, whole, rest)
        self._libc.timerfd_settime(self.fd, 0, ctypes.byref(value), None)
