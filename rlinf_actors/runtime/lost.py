"""Errors that nobody awaited: logged, and the script's exit code is not 0 because of them."""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
import threading
import weakref
from typing import Any, ClassVar, Protocol

log = logging.getLogger(__name__)


class Failed(Protocol):
    """Something whose error must be looked at by somebody."""

    def describe(self) -> str:
        """The error, for the log."""


class LostErrors:
    """Keeps count of failures that no caller has seen. Any thread.

    Args:
        change_exit_code: whether a script that would end with 0 ends with 1 if an error was lost.
    """

    def __init__(self, change_exit_code: bool) -> None:
        self._failed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._exit_code = _ExitCode.watched() if change_exit_code else None
        self.count = 0

    def failed(self, result: Failed) -> None:
        """*result* has an error; until `seen`, it counts as lost if it goes away."""
        self._failed[id(result)] = result

    def seen(self, result: Failed) -> None:
        """Its error was raised to somebody."""
        self._failed.pop(id(result), None)

    def collected(self, result: Failed) -> None:
        """The last reference to a failed, unseen result is gone."""
        self._report(result)

    def close(self) -> None:
        """Report what is still unseen. Called when the process's connection to the cluster ends; twice is fine."""
        for result in list(self._failed.values()):
            self._failed.pop(id(result), None)
            self._report(result)
        exit_code, self._exit_code = self._exit_code, None
        if exit_code is not None:
            exit_code.release()

    def _report(self, result: Failed) -> None:
        self.count += 1
        log.error("an error that nobody waited for (wait() or await the result to handle it): %s", result.describe())
        if self._exit_code is not None:
            self._exit_code.lost = True


class _ExitCode:
    """Makes an exit with 0 one with 1 if an error was lost. A code given to sys.exit, and 1 of an exception, stay.

    Python tells nobody the code it exits with, so sys.exit is wrapped while a cluster is connected. (``raise
    SystemExit(3)`` passes by unseen and becomes 1.) Everything that runs at exit runs as usual: the code is changed
    by the last of the process's steps, a C exit handler.
    """

    _current: ClassVar[_ExitCode | None] = None

    def __init__(self) -> None:
        self.lost = False
        self._users = 0
        self._chosen = False
        self._exit, self._hook = sys.exit, sys.excepthook
        sys.exit = self._note_exit  # type: ignore[assignment]
        sys.excepthook = self._note_exception
        atexit.register(self._at_exit)  # before the cluster's own, so that it runs after: errors are lost there too

    @classmethod
    def watched(cls) -> _ExitCode:
        """The process's one; `release` it."""
        if cls._current is None:
            cls._current = cls()
        cls._current._users += 1
        return cls._current

    def release(self) -> None:
        """With the last user everything is as before, unless an error was lost."""
        self._users -= 1
        if self._users or self.lost:
            return
        if sys.exit == self._note_exit and sys.excepthook == self._note_exception:
            sys.exit, sys.excepthook = self._exit, self._hook
            atexit.unregister(self._at_exit)
            _ExitCode._current = None

    def _note_exit(self, status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            self._chosen = status not in (None, 0)
        self._exit(status)

    def _note_exception(self, *error: Any) -> None:
        self._chosen = True
        self._hook(*error)

    def _at_exit(self) -> None:
        if self._chosen or not self.lost:
            return
        libc = ctypes.CDLL(None)
        at_exit = getattr(libc, "__cxa_atexit")
        at_exit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(1), None)
