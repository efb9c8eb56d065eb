"""The orderly end of a worker: after SIGTERM it runs its `atexit` functions, writes out its stdio, and ends by SIGTERM.

The signal's handler runs on the main thread between two instructions of Python, where a robot SDK or CUDA expects to be
called, whatever the user's code does there. Code in C that does not return keeps it from that. Then the I/O thread,
which hears of the signal by the wakeup descriptor, ends the process at once, unless the user's code has registered
`atexit` functions: they wait for the main thread, and whoever sent the signal bounds that with SIGKILL after its grace.

An event loop that the user's code runs itself may take that descriptor while it runs (uvloop does): then C code
that does not return is waited for.

A worker that holds a robot ends otherwise: its guard makes the robot safe (worker.safety). A handler that the user's
code installs for SIGTERM takes the place of this one. Processes that the user's code forks have neither.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from types import FrameType

from rlinf_actors.net.loop import IoThread

STUCK_S = 0.1
"""How long the main thread may take to come to its handler before the I/O thread looks whether to end without it."""


class Leaving:
    """Ends this process when SIGTERM comes. Main thread; `watch` makes the I/O thread do its part."""

    def __init__(self) -> None:
        self._before = atexit._ncallbacks()
        self._begun = False
        self._loop = -1  # where an event loop of the main thread hears of signals
        self._reader, self._writer = os.pipe()
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)

    def watch(self, io: IoThread) -> None:
        """Have the I/O thread see to the end where the main thread cannot."""
        io.call(io.loop.add_reader, self._reader, self._signalled, io)

    def hear(self) -> None:
        """Take back the wakeup descriptor from an event loop that has just begun to run. Main thread, in that loop.

        uvloop puts its own there, which nobody reads while the main thread is in C. It is told by `_signalled` instead.
        """
        taken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if taken in (-1, self._writer):
            return
        if self._loop < 0:
            self._loop = os.dup(taken)  # the loop closes its own whenever it ends
        else:
            os.dup2(taken, self._loop, inheritable=False)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """The handler. Main thread."""
        if self._begun:
            return  # it comes again while this goes on
        self._begun = True
        try:
            atexit._run_exitfuncs()
        except BaseException:  # noqa: BLE001 - nobody is above us; stderr is where the others' errors are
            traceback.print_exc()
        _end()

    def _signalled(self, io: IoThread) -> None:
        """Some signal came. I/O thread."""
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return
        if self._loop >= 0:
            with contextlib.suppress(OSError):  # it does not run any more, or has much to read
                os.write(self._loop, numbers)
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._leave:
            io.loop.call_later(STUCK_S, self._look)

    def _look(self) -> None:
        """End the process if the main thread does not, and nothing needs it. I/O thread."""
        if not self._begun and atexit._ncallbacks() <= self._before:
            _end()

    def _forked(self) -> None:
        """In a child of the user's: SIGTERM ends it as any process, and its signals are not ours."""
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _end() -> None:
    """Write out stdio, and end as SIGTERM ends a process that has no handler. Any thread."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the reader is gone, or another thread writes
            if stream is not None:
                stream.flush()
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, None)  # SIG_DFL; Python's own allows this on the main thread alone
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(143)  # where this thread has the signal blocked
