"""The end of a send that goes more than one way: it has ended well when all of them have, and badly with the first."""

from __future__ import annotations

import threading

from rlinf_actors.runtime.asyncwork import AsyncWork


class Trip:
    """Any thread.

    Args:
        work: the caller's.
        ways: how many must end.

    Attributes:
        held: the way of the message itself; the outbox ends it.
    """

    def __init__(self, work: AsyncWork[None], ways: int) -> None:
        self._work = work
        self._left = ways
        self._lock = threading.Lock()
        self.held: AsyncWork[None] = AsyncWork(work._what)
        self.held._seen = True  # its error is the caller's work's
        self.held._on_done(self._held_done)

    def one_done(self) -> None:
        """One of the ways has ended well."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._work.resolve(None)

    def failed(self, error: BaseException) -> None:
        """One of the ways has ended badly."""
        self._work.reject(error)

    def _held_done(self) -> None:
        error = self.held.error
        if error is None:
            self.one_done()
        else:
            self.failed(error)
