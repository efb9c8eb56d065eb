"""Holds the threads of a robot worker before on_lease_lost runs.

A signal interrupts the main thread, and ends a blocking system call; its handler does not
return. If the main thread has masked the signal, another thread takes the signal, and the main thread runs the handler
at Python's next check for signals. Every other Python thread gets an exception whose constructor does not return;
Python raises it before the next instruction of that thread. C code is not interrupted: a thread is held when it
comes back from C.
"""

from __future__ import annotations

import _thread
import ctypes
import platform
import signal
import sys
import threading

STOP_MAIN_S = 0.2
"""Most seconds to wait until the main thread has stopped. The main thread may be in C code."""
AGAIN_S = 0.005
"""Seconds until the signal is sent again; doubled after each attempt.

A signal that arrives between Python's check for signals and the start of a system call interrupts nothing.
"""
SIGNAL = signal.SIGRTMAX - 2
"""Signal that stops the main thread. glibc uses the lowest real-time signals; debuggers and profilers use others."""
OURS = "rlinf-actors-"
"""Prefix of the names of the runtime's own threads, which run no code of the user and are not stopped."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Unwound(SystemExit):
    """Raised in held threads to end them if on_lease_lost waits for a lock. `except Exception` does not catch it."""


class ThreadStopper:
    """Holds the threads that may run user code. Construct it on the main thread.

    A thread that is held runs no more code, until `unwind` ends it.
    """

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._main_stopped = _thread.allocate_lock()  # bare locks: the main thread may be inside anything else
        self._main_stopped.acquire()
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._stopped_threads: set[int] = set()
        self._signalled = False
        signal.signal(SIGNAL, self.handler)

    def interrupt(self) -> None:
        """Hold the main thread from its next Python instruction on. Any thread; returns at once."""
        signal.pthread_kill(self._main, SIGNAL)
        signal.raise_signal(SIGNAL)  # taken by this thread, handled on the main thread, which may have masked it

    def stop_all(self) -> bool:
        """Hold all Python threads except the caller and the runtime's own. Return True if the main thread is held.

        Waits at most STOP_MAIN_S seconds for the main thread. A thread in C code is held when it returns to Python.
        """
        waited, again = 0.0, AGAIN_S
        still = False
        while not still and waited < STOP_MAIN_S:  # not by the clock: a process that is stopped does not wait
            wait = min(again, STOP_MAIN_S - waited)
            self.interrupt()
            still = self._main_stopped.acquire(timeout=wait)
            waited += wait
            again *= 2
        for _ in range(2):  # the second pass finds a thread that was just being started
            for ident in self._users():
                self._stop(ident)
        if not still:
            self._stop(self._main)  # also if user code has replaced the handler of the signal
        return still

    def unwind(self) -> None:
        """End the threads that are held by raising Unwound in each, so that their ``with`` blocks release locks."""
        self._gate.release()

    def stop_here(self) -> None:
        """Block the calling thread until another thread calls `unwind`. The caller then ends its thread by Unwound."""
        self._gate.acquire()
        self._gate.release()

    def _users(self) -> list[int]:
        """Return the ids of all threads that may run user code, except the calling thread.

        Threads of C libraries count.
        """
        ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OURS)}
        others = set(sys._current_frames()) - ours - self._stopped_threads
        return sorted(others - {self._main, threading.get_ident()})

    def _stop(self, ident: int) -> None:
        self._stopped_threads.add(ident)
        stopper = self

        class Stopped(Unwound):
            def __init__(self) -> None:
                super().__init__()
                stopper.stop_here()

        _set_async_exc(ctypes.c_ulong(ident), ctypes.py_object(Stopped))

    def handler(self, number: int, frame: object) -> None:
        """Hold the main thread, as the handler of SIGNAL: block until `unwind` is called, then raise Unwound."""
        if self._signalled:
            return  # sent again
        self._signalled = True
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no other handler runs from now on
        self._main_stopped.release()
        self.stop_here()
        raise Unwound


def waits_for_lock(native_id: int) -> bool:
    """True if the thread with the kernel id *native_id* waits for a lock (a futex), or if that is unknown."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall") as file:
            call = file.read().split()[0]
    except (OSError, IndexError):
        return True
    return call == _FUTEX.get(platform.machine(), call)
