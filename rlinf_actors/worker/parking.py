"""Bringing the user's threads to a standstill, so that nothing of theirs follows the stop command.

The main thread is interrupted by a signal, which also ends a blocking system call; its handler does
not return. One that has masked the signal runs the handler when Python looks for signals, since another thread takes
the signal for the process. Any other Python thread gets an exception whose constructor does not return: that runs
before the next of its own instructions. C code is not interrupted: a thread stands still when it
comes back from there.
"""

from __future__ import annotations

import _thread
import ctypes
import platform
import signal
import sys
import threading

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


class Parking:
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
