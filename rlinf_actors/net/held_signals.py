"""Holds back signal handlers of the main thread for the moment in which it handles messages.

Python runs signal handlers between any two instructions of the main thread, and a handler may raise (Ctrl-C raises
KeyboardInterrupt). In the middle of a message that would lose the message. So `hold` replaces the handlers, and
`release` puts them back and runs those whose signals came meanwhile.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal costs twenty times as much, for its enums
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = tuple(
    int(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
)
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class HeldSignals:
    """The handlers that are held back. Main thread only."""

    __slots__ = ("_came", "_handlers", "_note_it", "_python")

    def __init__(self) -> None:
        self._handlers: list[Any] = []  # of _SIGNALS
        self._python: list[tuple[int, Any]] = []  # those that are functions
        self._came: list[tuple[int, FrameType | None]] = []
        self._note_it = self._note

    def hold(self) -> None:
        """Hold the handlers back from now on. If one raises just before, nothing is held."""
        handlers = [*map(_get, _SIGNALS)]
        if handlers != self._handlers:
            self._python = [pair for pair in zip(_SIGNALS, handlers, strict=True) if callable(pair[1])]
            self._handlers = handlers
        try:
            for number, _ in self._python:
                _set(number, self._note_it)
        except BaseException:
            self._put_back()
            raise

    def release(self) -> None:
        """Put the handlers back, and run those whose signals came meanwhile.

        Raises:
            BaseException: what a handler raised.
        """
        raised = self._put_back()
        while self._came:
            number, frame = self._came.pop(0)
            handler = _get(number)
            if callable(handler):
                handler(number, frame)
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def _put_back(self) -> BaseException | None:
        raised = None
        for number, handler in self._python:
            try:
                _set(number, handler)
            except BaseException as error:  # noqa: BLE001 - of a handler that is back already: raised at the end
                raised = error
                _set(number, handler)
        return raised
