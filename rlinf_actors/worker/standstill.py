"""Holds the threads of a robot worker before on_lease_lost runs.

A signal interrupts the main thread, and ends a blocking system call; its handler does not
return. If the main thread has masked the signal, another thread takes the signal, and the main thread runs the handler
at Python's next check for signals. Every other Python thread gets an exception whose constructor does not return;
Python raises it before the next instruction of that thread. C code is not interrupted: a thread is held when it
comes back from C. Nothing here takes a lock, which a thread that is held may have.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import operator
import platform
import signal
import sys
import threading

from rlinf_actors import exhaustion

STOP_MAIN_S = 0.2
"""Most seconds to wait until the main thread has stopped. The main thread may be in C code."""
AGAIN_S = 0.005
"""Seconds until the signal is sent again; doubled after each attempt.

A signal that arrives between Python's check for signals and the start of a system call interrupts nothing.
"""
SIGNAL = signal.SIGRTMAX - 2
"""Signal that stops the main thread. glibc uses the lowest real-time signals; debuggers and profilers use others."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Unwound(SystemExit):
    """Raised in held threads to end them if on_lease_lost waits for a lock. `except Exception` does not catch it."""


class ThreadStopper:
    """Holds the threads that may run user code. Construct it on the main thread.

    A thread that is held runs no more code, until `unwind` ends it.
    """

    def __init__(self) -> None:
        self.spared: list[threading.Thread] = []  # never held, as the runtime's own are not
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
        with contextlib.suppress(OSError):  # this user's processes may queue no more signals (RLIMIT_SIGPENDING)
            signal.pthread_kill(self._main, SIGNAL)
            signal.raise_signal(SIGNAL)  # taken by this thread, handled on the main thread, which may have masked it

    def stop_all(self) -> bool:
        """Hold all Python threads except the caller, those spared and the runtime's own.

        Waits at most STOP_MAIN_S seconds for the main thread, and returns True if it is held. A thread in C code is
        held when it returns to Python.
        """
        waited, again = 0.0, AGAIN_S
        still = False
        self._stop_others()
        while not still and waited < STOP_MAIN_S:  # not by the clock: a process that is stopped does not wait
            wait = min(again, STOP_MAIN_S - waited)
            self.interrupt()
            still = self._main_stopped.acquire(timeout=wait)
            waited += wait
            again *= 2
        self._stop_others()  # a thread that was just being started
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

    def _stop_others(self) -> None:
        """Hold all threads but the main thread that may run user code; those of C libraries if they are in Python."""
        running: dict[int | None, threading.Thread] = threading._active  # type: ignore[attr-defined]
        spared = {one.ident for one in self.spared if running.get(one.ident) is one}
        others = set(sys._current_frames()) - exhaustion.own_threads - spared - self._stopped_threads
        for ident in others - {self._main, threading.get_ident()}:
            self._stop(ident)

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


def release_conditions() -> None:
    """Let a thread that ends as it enters or leaves the ``with`` block of a Condition not keep the lock.

    `threading.Condition` enters and leaves it by a function in Python, which an exception can end after the lock was
    taken and before the block begins. With its lock's own functions, which are in C, a block begins with the lock.
    """
    for name in ("__enter__", "__exit__"):
        setattr(threading.Condition, name, property(operator.attrgetter(f"_lock.{name}")))


def waits_for_lock(native_id: int) -> bool:
    """True if the thread with the kernel id *native_id* waits for a lock (a futex), or if that is unknown."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall") as file:
            call = file.read().split()[0]
    except (OSError, IndexError):
        return True
    return call == _FUTEX.get(platform.machine(), call)
