"""Errors that nobody awaited: logged, and the script's exit code is not 0 because of them."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import Any, Protocol

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
        self._change_exit_code = change_exit_code
        self._watch: _ExitCode | None = None
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
        """Report what is still unseen. Called when the process's connection to the cluster ends."""
        for result in list(self._failed.values()):
            self._failed.pop(id(result), None)
            self._report(result)

    def _report(self, result: Failed) -> None:
        self.count += 1
        log.error("an error that nobody waited for (wait() or await the result to handle it): %s", result.describe())
        if self._change_exit_code and self._watch is None:
            self._watch = _ExitCode()


class _ExitCode:
    """Makes an exit with 0 one with 1. An exit code that the script chose is left alone.

    Python tells nobody the code it exits with, so sys.exit is wrapped from the first lost error on.
    """

    def __init__(self) -> None:
        self._chosen = False
        self._exit = sys.exit
        self._hook = sys.excepthook
        sys.exit = self._note_exit  # type: ignore[assignment]
        sys.excepthook = self._note_exception
        atexit.register(self._at_exit)

    def _note_exit(self, status: Any = None, /) -> None:
        self._chosen = status not in (None, 0)
        self._exit(status)

    def _note_exception(self, *error: Any) -> None:
        self._chosen = True
        self._hook(*error)

    def _at_exit(self) -> None:
        if self._chosen:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)
