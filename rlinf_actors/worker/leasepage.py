"""The lease of a robot worker: its time, the page that shows its deadline, and the clock by which it ends.

The watchdog (template.watchdog), the guard (worker.lease_guard) and the template count with `Lease`. `LeasePage` shows
the deadline to code that runs without the interpreter's lock.

Clocks: watchdog and guard count in CLOCK_BOOTTIME, which continues while the machine is suspended, so a machine that
slept for longer than the lease has lost it. The template, agentd and the page count in CLOCK_MONOTONIC.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import UsageError

if TYPE_CHECKING:
    from rlinf_actors.wire.values import Claim

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
    Only the watchdog extends the time, so nothing does when the watchdog is dead or cannot run.

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

    def __reduce__(self) -> Any:
        """Send the descriptor to a process that multiprocessing starts (spawn, forkserver).

        Raises:
            UsageError: the page goes anywhere else, where neither address nor descriptor mean anything.
        """
        context, reduction = (sys.modules.get(f"multiprocessing.{name}") for name in ("context", "reduction"))
        if context is None or reduction is None or context.get_spawning_popen() is None:
            raise UsageError(
                "a lease page cannot be sent: give it to a process of this worker as an argument of "
                "multiprocessing.Process, or pass its fd (pass_fds) and map that"
            )
        return _received, (reduction.DupFd(self.fd),)


def _received(fd: Any) -> LeasePage:
    return LeasePage(fd.detach())


class LeasePageWriter:
    """Makes a lease page, and writes the deadline to it: in the watchdog, and in the guard, which only loses it."""

    def __init__(self, deadline_ns: int = NEVER) -> None:
        fd = os.memfd_create("rlinf-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            # no later mapping can write, also by /proc/PID/fd
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._deadline = ctypes.c_uint64.from_buffer(self._memory)
        self._deadline.value = deadline_ns
        self.page = LeasePage(readable)

    def renew(self, deadline_ns: int) -> None:
        """Set the deadline to *deadline_ns* if that is later. No effect after `lose`."""
        if 0 < self._deadline.value < deadline_ns:
            self._deadline.value = deadline_ns

    def lose(self) -> None:
        """Set the deadline to 0 for good, because the lease is lost."""
        self._deadline.value = 0


MARGIN = 0.2
"""Fraction of the lease that is reserved for making robots safe: 0.4 s of 2 s. Stopping threads takes up to 0.2 s."""
END_MARGIN = 0.125
"""Fraction at the end of the lease in which a renewal has no effect: 0.25 s of 2 s.

A process that has not confirmed a renewal by then is killed.
"""


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

    @property
    def end(self) -> float:
        """Time at which the robots must be made safe, unless the lease is renewed before."""
        return self.until - MARGIN * self.lease_s

    @property
    def last_moment(self) -> float:
        """Time at which the lease is lost for good, and a worker is killed that has not begun to make its robots safe.

        A renewal that is read later has no effect.
        """
        return self.until - END_MARGIN * self.lease_s

    def lost(self, now: float) -> bool:
        """True if the lease is lost for good at the time *now*."""
        return now >= self.last_moment

    def _silence(self, now: float) -> str:
        return f"{now - (self.until - self.lease_s):.1f} s"  # from the heartbeat that renewed it last

    def no_word(self, now: float) -> str:
        """Why the lease has ended, for people, if no renewal came."""
        return f"no word from the head for {self._silence(now)}"

    def stood_still(self, now: float) -> str:
        """Why the lease has ended, for people, if the worker confirmed no renewal that came."""
        return (
            "its process stood still, or was kept from running by C code that holds the interpreter's lock, and read "
            f"nothing for {self._silence(now)}"
        )


def suspended() -> float:
    """Return how many seconds since its boot this machine was suspended. CLOCK_MONOTONIC does not count them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """A timer that also counts time in which the machine is suspended, unlike the timeout of poll.

    Its descriptor *fd* becomes readable when the time is over.
    """

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self, seconds: float) -> None:
        """Let *fd* become readable after so many seconds, at once if they are not above 0; in years if infinite."""
        whole, rest = divmod(max(1, int(min(seconds, 1e8) * 1e9)), 1_000_000_000)  # 0 would disarm it
        value = _Itimerspec(0, 0, whole, rest)
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(value), None)


def lost(claims: Iterable[Claim], reason: str) -> str:
    """Return that the lease of the robots *claims* was lost for this reason, as text for people."""
    return f"the lease of {', '.join(claim.title for claim in claims)} was lost: {reason}"
