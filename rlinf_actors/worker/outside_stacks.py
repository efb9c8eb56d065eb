"""What a worker prepares so that its template can take its stacks while its I/O thread cannot answer.

`register` makes faulthandler write the stacks of all threads into a pipe when SIGNAL arrives. That is C code in a
signal handler: it needs no lock of the interpreter. The pipe stays in this process, which has both ends: the template
opens the reading end through /proc/PID/fd, so that workers need no further descriptor of their template, however they
were started. The writing end does not block: without a reader, what has no room is lost, and the handler returns.

`allow_tracer` lets one process trace this one, where the kernel's Yama admits only parents.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

SIGNAL = signal.SIGRTMAX - 5
"""The signal for stacks. User code may handle it itself; then there are no stacks by a signal."""
_PR_SET_PTRACER = 0x59616D61


def register() -> int:
    """Let SIGNAL write this process's stacks into a pipe. Return the pipe's reading end, -1 if there is none.

    Called on the main thread, once.
    """
    try:
        reader, writer = os.pipe()
    except OSError:  # no descriptor is left: the worker runs without
        return -1
    os.set_blocking(writer, False)
    faulthandler.register(SIGNAL, writer, all_threads=True, chain=False)
    return reader


def allow_tracer(pid: int) -> None:
    """Let the process *pid* and those that it starts trace this process; 0: only parents may, as usual. Any thread.

    Does nothing if the kernel has no Yama, since then any process of this user may.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
