"""The command that a debugger runs, such as `p model(batch)`, and its interruption by Ctrl-C of an attachment.

Ctrl-C raises KeyboardInterrupt in the command. If the command runs on the main thread, SIGINT does this, which also
ends a blocking call such as `time.sleep`, unless an event loop or a robot's guard has taken the signal. Otherwise
Python raises it before the next instruction of the thread, so a thread in C code must first return from it.

Nothing of it reaches the user's code behind the command: `end` takes an interruption that comes late. What is pending
is not taken back, since Python 3.11 would go on looking for it, and a thread that is traced would stand still.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_check_signals = ctypes.pythonapi.PyErr_CheckSignals


class DebuggerCommand:
    """A command of one debugger. `begin` and `end` are for the debugger's thread; the I/O thread does the rest.

    Attributes:
        since: when the command began, by time.monotonic; 0.0 if none runs.
        wanted: True if the next command is to be interrupted when it begins.
    """

    def __init__(self) -> None:
        self.since = 0.0
        self.wanted = False
        self._thread = 0
        self._by_signal = False
        self._pending = False  # an exception that the thread has not got yet
        names = {"__init__": self._raised, "__module__": "builtins"}  # shown as what a person expects
        self._exception = type("KeyboardInterrupt", (KeyboardInterrupt,), names)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Let `interrupt` interrupt the calling thread from now on.

        Raises:
            KeyboardInterrupt: the interruption came before the command.
        """
        self._thread = threading.get_ident()
        is_main = threading.current_thread() is threading.main_thread()
        self._by_signal = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with self._lock:
            self.since = time.monotonic()
        if self.wanted:
            self.wanted = False
            raise KeyboardInterrupt

    def end(self) -> None:
        """Let nothing interrupt the calling thread from now on. May be called again."""
        while True:
            try:
                with self._lock:
                    self.since = 0.0
                while self._pending:  # until the next check of the interpreter, which raises it here
                    pass
                _check_signals()
                return
            except KeyboardInterrupt:  # it comes when the command has ended already
                continue

    def interrupt(self) -> None:
        """Interrupt the command that runs, or the next one. Never blocks: the other thread may be held anywhere."""
        if not self._lock.acquire(blocking=False):
            return  # the command begins or ends just now; its user presses Ctrl-C again
        try:
            if not self.since:
                self.wanted = True
            elif self._by_signal:
                signal.pthread_kill(self._thread, signal.SIGINT)
            else:
                self._pending = True
                _set_async_exc(ctypes.c_ulong(self._thread), ctypes.py_object(self._exception))
        finally:
            self._lock.release()

    def _raised(self, *_args: object) -> None:
        """Note that the thread has got the exception, which Python makes when it raises it."""
        self._pending = False

    def runs_s(self) -> float:
        """Return for how many seconds a command has been running, 0.0 if none runs."""
        since = self.since
        return time.monotonic() - since if since else 0.0
