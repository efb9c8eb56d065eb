"""The debugger of a thread that waits in a breakpoint: Python's pdb, which talks to a `debugger.Stop`."""

from __future__ import annotations

import dis
import inspect
import os
import pdb
import sys
from types import FrameType
from typing import Any

from rlinf_actors.worker.debugger import Stop

_OUTER = ("rlinf_actors.", "asyncio.", "threading", "concurrent.futures.")
"""Beginnings of the names of modules that call the user's code: where such a call ends, so does the debugger."""
_RESUMES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SUSPENDS = ("YIELD_VALUE", "YIELD_FROM", "RESUME")
"""Instructions at which a coroutine or generator returns to its caller without having ended."""


class WorkerPdb(pdb.Pdb):
    """A pdb for one breakpoint. It steps over code of this library and of asyncio.

    The breakpoint is left by `continue`, by `quit`, which raises BdbQuit in the user's code, and where the call ends to
    which the code belongs. If the user has set further breakpoints (`break`), each of them is entered anew.
    """

    def __init__(self, stop: Stop) -> None:
        super().__init__(stdin=stop, stdout=stop, nosigint=True, skip=["rlinf_actors.*", "asyncio.*"])  # type: ignore[arg-type]
        self._stop = stop
        self._entered = False
        self._caller: FrameType | None = None  # of breakpoint(), until the thread has stopped there

    def set_trace(self, frame: FrameType | None = None, **more: Any) -> None:
        """Stop where the caller *frame* goes on."""
        self._caller = frame
        super().set_trace(frame, **more)

    def stop_here(self, frame: FrameType) -> bool:
        """Return True if pdb stops in *frame*. Its first stop is in the code that called breakpoint(), and not in a
        finalizer that the garbage collector runs just then on this thread.
        """
        return (self._caller is None or frame is self._caller) and super().stop_here(frame)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        """Take commands until one of them lets the thread go on; first wait for other threads in breakpoints."""
        self._entered, self._caller = True, None
        try:
            if frame is not None:
                code = frame.f_code
                self._stop.enter(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            super().interaction(frame, *args)
        except BaseException:  # another thread has raised it in this one
            self._entered = False
            raise
        finally:
            if not self._entered:
                self._stop.leave()

    def onecmd(self, line: str) -> bool:
        """Run a command, which Ctrl-C of an attachment interrupts."""
        command = self._stop.command
        try:
            try:
                command.begin()
                return bool(super().onecmd(line))
            finally:
                command.end()
        except KeyboardInterrupt:
            command.end()  # again: the interruption may have come in there
            self.error("KeyboardInterrupt")
            return False

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Handle a return, and leave the breakpoint if the user's code has returned to the runtime."""
        result = super().dispatch_return(frame, arg)
        if self._entered and _is_outermost(frame) and not _is_suspended(frame):
            self.message(f"{frame.f_code.co_name}() has ended")
            self.set_continue()
            self._stop.leave()
        return result

    def set_continue(self) -> None:
        """Leave the breakpoint."""
        self._entered = False
        super().set_continue()

    def set_quit(self) -> None:
        """Leave the breakpoint by BdbQuit."""
        self._entered = False
        super().set_quit()

    def do_run(self, arg: str) -> None:
        """Refuse to start again: pdb would raise an exception of its own into the user's code."""
        self.error("a worker cannot be run again")

    do_restart = do_run


def _is_outermost(frame: FrameType) -> bool:
    """Return True if *frame* is code of the user that no other code of the user has called."""
    return not _is_outside(frame) and _is_outside(frame.f_back)


def _is_outside(frame: FrameType | None) -> bool:
    return frame is None or str(frame.f_globals.get("__name__")).startswith(_OUTER)


def _is_suspended(frame: FrameType) -> bool:
    """Return True if *frame* will be resumed: its coroutine or generator waits for something."""
    code, last = frame.f_code.co_code, frame.f_lasti
    if not frame.f_code.co_flags & _RESUMES or last < 0:
        return False
    before_yield = sys.version_info < (3, 11) and last + 2 < len(code)  # then YIELD_FROM runs once more
    return dis.opname[code[last]] in _SUSPENDS or (before_yield and dis.opname[code[last + 2]] == "YIELD_FROM")
