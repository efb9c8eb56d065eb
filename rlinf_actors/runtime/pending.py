"""Pending: a call that waits for the answers of a worker, as its Peer keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts


class Pending(Protocol):
    """A call that waits for one or more answers of a worker; the Peer of the worker keeps it until the call ends."""

    @property
    def anywhere(self) -> bool:
        """True if any thread may call `answer`, False if only the loop thread may."""

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Handle one answer of the worker. Return True if it was the last one. Called for one answer at a time."""

    def fail(self, error: Exception) -> None:
        """End the call with *error*, because the worker has ended or cannot be reached. Called on any thread."""


class PendingRequest(msgspec.Struct, eq=False):
    """A pending call that has one answer and is handled by two callbacks; only one of them is called, once.

    Attributes:
        answered: called on the loop thread with the answer.
        failed: called on any thread with an error, if the worker has ended or cannot be reached.
    """

    answered: Callable[[frames.AnyFrame, AuthenticatedParts], object]
    failed: Callable[[Exception], object]
    anywhere: bool = False

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self.answered(frame, parts)
        return True

    def fail(self, error: Exception) -> None:
        self.failed(error)
