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
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
        signal.SIGVTALRM, signal.SIGPROF, signal.SIGCHLD,
    )
)  # fmt: skip
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class HeldSignals:
    """The handlers that are held back. Main thread only."""

    __slots__ = ("_came", "_handlers")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._came: list[tuple[int, FrameType | None]] = []

    def hold(self) -> None:
        """Hold the handlers back from now on. If one raises just before, nothing is held."""
        try:
            for number, handler in zip(_SIGNALS, map(_get, _SIGNALS), strict=True):
                if callable(handler):
                    self._handlers.append((number, handler))
                    _set(number, self._note)
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
        while self._handlers:
            number, handler = self._handlers[-1]
            try:
                if _get(number) == self._note:  # else user code has set another one meanwhile
                    _set(number, handler)
                self._handlers.pop()
            except BaseException as error:  # noqa: BLE001 - of a handler that is back already: raised at the end
                raised = error
        return raised
