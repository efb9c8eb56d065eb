"""The readiness of a group that this process has launched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from rlinf_actors.errors import CallTimeoutError, GroupClosedError
from rlinf_actors.runtime.driver_output import LostErrors
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import ANSWER_S, Late, Peer


class Readiness(Promise[None]):
    """Ends when the owner's group is up, or with the error that keeps it down; an unawaited error is reported.

    Calls on the group fail by the same error: whoever sees it there has seen it here.
    """

    shared = True

    def __init__(self, name: str, lost: LostErrors, late: Callable[[], Sequence[Peer]] = tuple) -> None:
        super().__init__(f"group {name!r}")
        self._late_ranks = late
        self.loop = asyncio._get_running_loop()
        self._lost = lost
        self._unseen = False

    def reject(self, error: BaseException) -> bool:
        """Set the error, and register it; False if there is an outcome already. Any thread."""
        awaited = bool(self._callbacks)
        ended = super().reject(error)
        if ended and not isinstance(error, GroupClosedError):  # that is the owner's own doing
            self._unseen = True
            self._lost.failed(self, awaited=awaited)
        return ended

    def _late(self, timeout: float) -> CallTimeoutError:
        asked = threading.Event()
        late = Late(self._late_ranks(), asked.set)
        asked.wait(min(ANSWER_S, max(timeout, 0.01)))  # who polls is not held up
        return CallTimeoutError(f"{self._what} was not ready within {timeout:g} s; it goes on: {late.describe()}")

    def seen(self) -> None:
        """The error was raised to the caller."""
        if self._unseen:
            self._unseen = False
            self._lost.seen(self)

    def _outcome(self) -> None:
        self.seen()
        return super()._outcome()

    @property
    def cause(self) -> Exception | None:
        """See runtime.lost.Failed."""
        return self._error if isinstance(self._error, Exception) else None

    def raised(self) -> Exception:
        """The error as `await group` raises it."""
        assert isinstance(self._error, Exception)
        return self._error

    def describe(self) -> str:
        """The error as one text, for the log."""
        return f"{self._what} could not be brought up: {self._error}"

    def __del__(self) -> None:
        if self._unseen:
            self._lost.collected(self)
