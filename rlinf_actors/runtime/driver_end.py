"""DriverEnd: end the driver because a call failed and no code waits for its result (RLINF_ACTORS_LOST_ERRORS=end).

A program in RLinf's manner starts calls on several groups, and then waits for one of them. If another call fails, the
wait may never end, because the failed worker does not send what the others wait for. This module raises SystemExit in
the driver's main thread, wherever it waits: in a channel's get(), in a result's wait(), in an event loop, or in code
that is not ours. It does so by a real-time signal, which interrupts locks and system calls.

Then all other calls of the driver fail, so that ``finally`` blocks and other threads do not wait either. Exit handlers
run as usual; one of them ends the cluster.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from types import FrameType

from rlinf_actors.exit_codes import FAILURE

SIGNAL = int(signal.SIGRTMAX) - 2
"""The signal that interrupts the main thread. SIGUSR1 and SIGUSR2 belong to the user's program, as in Slurm jobs."""
PATIENCE_S = 0.5
"""Seconds after which the driver's calls fail although the main thread has not handled the signal: it runs C code."""

Later = Callable[[float, Callable[[], object]], object]

_pending: DriverEnd | None = None


def prepare() -> None:
    """Install the handler of SIGNAL. Only the main thread can do this; on other threads this does nothing."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is not _interrupted:
        signal.signal(SIGNAL, _interrupted)


class DriverEnd:
    """Ends the driver once.

    Args:
        fail_calls: fails every call of this driver with an error that has the given text. Any thread; harmless when
            called twice.
        later: runs a function after a number of seconds, on a thread of the runtime.
    """

    def __init__(self, fail_calls: Callable[[], object], later: Later) -> None:
        self._fail_calls = fail_calls
        self._later = later
        self._begun = False

    def begin(self) -> None:
        """Raise SystemExit in the main thread, and fail all calls. Return at once. Any thread.

        If `prepare` was never called on the main thread, or another handler has replaced ours, only the calls fail.
        """
        global _pending
        if self._begun:
            return
        self._begun = True
        if signal.getsignal(SIGNAL) is not _interrupted:
            self._fail_calls()
            return
        _pending = self
        self._later(PATIENCE_S, self._fail_calls)
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def interrupt(self) -> None:
        """Fail all calls and raise SystemExit. Main thread."""
        self._fail_calls()
        gc.freeze()  # at its end the interpreter would look for garbage in all objects, half a second with torch loaded
        gc.disable()
        raise SystemExit(FAILURE)


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    global _pending
    ending, _pending = _pending, None
    if ending is not None:  # else another process has sent the signal
        ending.interrupt()
