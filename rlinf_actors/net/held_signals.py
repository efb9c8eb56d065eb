"""Holds back signal handlers of the main thread for the moments in which it handles or sends messages.

Python runs signal handlers between any two instructions of the main thread, and a handler may raise (Ctrl-C raises
KeyboardInterrupt). In the middle of a message that would lose the message; between the acquiring of a lock and the
`try` behind it, it would leave the lock held. So `hold` replaces the handlers, and `release` puts them back and runs
those whose signals came meanwhile.

A signal whose action in the kernel is not the one that Python sets is left alone, because Python could not put it back:
libraries such as rclpy and faulthandler set handlers of their own, and signal.siginterrupt sets flags.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal costs twenty times as much, for its enums
import asyncio
import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = tuple(
    int(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
)
_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal
_get_ident = threading.get_ident


class _Action(ctypes.Structure):
    """The begin of a struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("rest", ctypes.c_byte * 128),
    )


_found = _Action()
_at_found = ctypes.addressof(_found)
_sigaction = ctypes.PyDLL(None).sigaction  # keeps the interpreter's lock
_sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _action_of(number: int) -> tuple[int, int]:
    """Return the function, 0 for the default, and the flags that the kernel has for a signal. Main thread."""
    _sigaction(number, None, _at_found)
    return _found.handler or 0, _found.flags


def _pythons_action() -> tuple[int, int]:
    """Return the function and the flags that signal.signal sets. Main thread."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if not _action_of(number)[0] and _get(number) == _signal.SIG_DFL:  # the signal has no handler
            _set(number, lambda *_: None)
            try:
                return _action_of(number)
            finally:
                _set(number, _signal.SIG_DFL)
    return 0, 0  # no signal is held back


Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK = "rlinf_actors_not_held"


def not_held(handler: Handler) -> Handler:
    """Mark *handler* as one that never raises, and waits for the end of the handling itself: it is not held back.

    To hold a handler back takes three system calls.
    """
    setattr(handler, _MARK, True)
    return handler


class HeldSignals:
    """The handlers that are held back: `main` of this process. Main thread only.

    Attributes:
        held: the handlers are held back now.
    """

    __slots__ = ("_came", "_handlers", "_note_it", "_python", "_pythons", "held")

    def __init__(self) -> None:
        self.held = False
        self._handlers: list[Any] = []  # of _SIGNALS
        self._python: list[tuple[int, Any]] = []  # those that are functions
        self._pythons: tuple[int, int] | None = None  # Python's own action
        self._came: list[tuple[int, FrameType | None]] = []
        self._note_it = self._note

    def hold(self) -> None:
        """Hold the handlers back from now on. If one raises just before, nothing is held."""
        handlers = [*map(_get, _SIGNALS)]
        if handlers != self._handlers:
            pairs = zip(_SIGNALS, handlers, strict=True)
            self._python = [pair for pair in pairs if callable(pair[1]) and not hasattr(pair[1], _MARK)]
            self._handlers = handlers
        if self._pythons is None:
            self._pythons = _pythons_action()
        for number, _ in self._python:
            if _action_of(number) != self._pythons:
                self._forget(number)
        try:
            for number, _ in self._python:
                _set(number, self._note_it)
            self.held = True
        except BaseException:
            self._put_back()
            raise

    def release(self) -> None:
        """Put the handlers back, and run those whose signals came meanwhile.

        Raises:
            BaseException: what a handler raised.
        """
        self.held = False
        raised = self._put_back()
        while self._came:
            number, frame = self._came.pop(0)
            handler = _get(number)
            if callable(handler):
                handler(number, frame)
        if raised is not None:
            raise raised

    def _forget(self, number: int) -> None:
        self._python = [pair for pair in self._python if pair[0] != number]
        self._handlers = []  # look again next time

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


main = HeldSignals()


def undisturbed(loop: asyncio.AbstractEventLoop | None, function: Callable[..., T], *args: object) -> T:
    """Call *function* with *args*; on the main thread while the handlers are held back, if it does not run *loop*."""
    if main.held or _get_ident() != threading.main_thread().ident or (loop and asyncio._get_running_loop() is loop):
        return function(*args)
    main.hold()
    try:
        return function(*args)
    finally:
        main.release()
