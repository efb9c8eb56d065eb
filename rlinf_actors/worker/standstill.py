"""Bringing the user's threads to a standstill, so that nothing of theirs follows the stop command.

The main thread is interrupted by a signal, which also ends a blocking system call; its handler does
not return. One that has masked the signal runs the handler when Python looks for signals, since another thread takes
the signal for the process. Any other Python thread gets an exception whose constructor does not return: that runs
before the next of its own instructions. C code is not interrupted: a thread stands still when it
comes back from there.

Stop the processes that a robot worker has started, so that none of them moves the robot after the stop command.

They are stopped (SIGSTOP) before on_lease_lost and killed after it: until then they keep their ends of connections and
pipes open, and cannot leave the tree in which the next look finds what they had just started.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator

from rlinf_actors import procfs

PARK_S = 0.2
"""How long to wait for the main thread, in seconds: C code may keep it."""
AGAIN_S = 0.005
"""After which the signal is sent again, doubled each time: one that comes when Python has looked for signals and its
system call has not begun interrupts nothing. So it is where the main thread gives us the GIL to begin one.
"""
SIGNAL = signal.SIGRTMAX - 2
"""glibc keeps the lowest real-time signals for itself; debuggers and profilers like SIGUSR1 and SIGPROF."""
OURS = "rlinf-actors-"
"""How the names of the runtime's own threads begin: they run nothing of the user's."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Unwound(SystemExit):
    """Ends a thread that stood still while it held a lock that on_lease_lost needs. Passes `except Exception`."""


class ThreadStopper:
    """Where the user's threads are kept. Made on the main thread, which it may stop from then on."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._said = _thread.allocate_lock()  # bare locks: the main thread may be inside anything else
        self._said.acquire()
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._parked: set[int] = set()
        self._signalled = False
        signal.signal(SIGNAL, self.handler)

    def interrupt(self) -> None:
        """Have the main thread stand still at its next instruction in Python. Any thread; returns at once."""
        signal.pthread_kill(self._main, SIGNAL)
        signal.raise_signal(SIGNAL)  # taken here, handled there: the main thread may have masked it

    def park(self) -> bool:
        """Stop every Python thread but ours and the caller. Returns whether the main thread stands still.

        Waits for the main thread, PARK_S seconds at most; whoever is in C code stops on coming back.
        """
        waited, again = 0.0, AGAIN_S
        still = False
        while not still and waited < PARK_S:  # not by the clock: while this process stood still nobody was waited for
            wait = min(again, PARK_S - waited)
            self.interrupt()
            still = self._said.acquire(timeout=wait)
            waited += wait
            again *= 2
        for _ in range(2):  # one that was just being started is there the second time
            for ident in self._users():
                self._stop(ident)
        if not still:
            self._stop(self._main)  # also where the user's code has taken the signal's handler from us
        return still

    def let_go(self) -> None:
        """Have those that stand still end instead, so that their ``with`` blocks give back locks."""
        self._gate.release()

    def stay(self) -> None:
        """Stand still for ever, or until `let_go`; then raises Unwound. Any thread that has nothing to do any more."""
        self._gate.acquire()
        self._gate.release()

    def _users(self) -> list[int]:
        """Threads, C libraries' included, that may run code of the user's."""
        ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OURS)}
        others = set(sys._current_frames()) - ours - self._parked
        return sorted(others - {self._main, threading.get_ident()})

    def _stop(self, ident: int) -> None:
        self._parked.add(ident)
        parking = self

        class Stopped(Unwound):
            def __init__(self) -> None:
                super().__init__()
                parking.stay()

        _set_async_exc(ctypes.c_ulong(ident), ctypes.py_object(Stopped))

    def handler(self, number: int, frame: object) -> None:
        """Of SIGNAL, on the main thread."""
        if self._signalled:
            return  # it was sent again
        self._signalled = True
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no other handler runs from here on
        self._said.release()
        self.stay()
        raise Unwound


def waits_for_lock(native_id: int) -> bool:
    """Whether a thread of this process waits for a lock, and not for time or a device. True if nobody can tell."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall") as file:
            call = file.read().split()[0]
    except (OSError, IndexError):
        return True
    return call == _FUTEX.get(platform.machine(), call)


STOP_S, STOP_AGAIN_S = 0.08, 0.02
"""How long to wait until all stand still, in seconds, before the worker's threads do and after that.

0.1 s together, since the robot moves meanwhile. A process in an uninterruptible call stops when the call is over.
"""
_LOOK_S = 0.0005


class Descendants:
    """The processes below one worker, also those that have become daemons.

    Args:
        worker: its id, by which all that it starts is marked.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._kept: dict[int, int] = {}  # pids, with when they began
        self._stopped: dict[int, int] = {}
        self._others_own: set[int] = set()  # of those, what belongs to another user (sudo): it does not stop

    def keep(self, pid: int) -> str:
        """Let this process, and what it starts, run while on_lease_lost does. Return why it may not, "" if so."""
        found = procfs.stat(pid)
        if found is None or found.state in "ZX":
            return "there is no such process"
        if not self._is_below(pid):  # it would be killed after on_lease_lost
            return "this worker did not start it"
        self._kept[pid] = found.started
        return ""

    def stop(self, within_s: float) -> bool:
        """Stop all that need not run on. Return False if one is another user's, or did not stand still in that time."""
        deadline = time.monotonic() + within_s
        while True:
            found = [one for one in self._others() if self._stopped.get(one.pid) != one.started]
            for one in found:
                self._stopped[one.pid] = one.started
                if not _stop(one.pid):
                    self._others_own.add(one.pid)
            moving = [pid for pid, started in self._stopped.items() if _runs(pid, started)]
            if not found and self._others_own.issuperset(moving):
                return not moving
            if time.monotonic() >= deadline:
                return False
            if moving:  # on another core, until its next interrupt; the kernel tells only its parent that it stopped
                time.sleep(_LOOK_S)

    def kill(self) -> bool:
        """Kill what was stopped or kept: the end of the worker would continue a process group of its own."""
        for pid, started in {**self._kept, **self._stopped}.items():
            found = procfs.stat(pid)
            if found is not None and found.started == started:
                procfs.kill(pid)
        return True

    def _others(self) -> Iterator[procfs.Stat]:
        """Every living process below the worker that is not kept."""
        ours, seen = os.getpid(), set[int]()
        waiting = procfs.children(ours)
        # orphans become children of the template; if that has died, of whoever is the worker's parent now
        waiting += [pid for pid in procfs.children(os.getppid()) if pid != ours and self._is_ours(pid)]
        while waiting:
            pid = waiting.pop()
            found = procfs.stat(pid)
            if pid in seen or pid == ours or found is None or self._kept.get(pid) == found.started:
                continue
            seen.add(pid)
            waiting += procfs.children(pid)
            if found.state not in "ZX":
                yield found

    def _is_below(self, pid: int) -> bool:
        ours = os.getpid()
        if pid != ours and self._is_ours(pid):
            return True
        found = procfs.stat(pid)
        while found is not None and found.parent not in (0, ours):
            found = procfs.stat(found.parent)
        return found is not None and found.parent == ours

    def _is_ours(self, pid: int) -> bool:
        found = procfs.stat(pid)
        if found is None or found.session == os.getpid():
            return found is not None
        return procfs.branded(pid, [self._worker]) is not None or procfs.mark_of(pid) == self._worker


def _runs(pid: int, started: int) -> bool:
    found = procfs.stat(pid)
    return found is not None and found.started == started and found.state not in "TtZX"


def _stop(pid: int) -> bool:
    """Send SIGSTOP. Return False if the process is another user's."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True
