"""AsyncRouteWork: the sends or receives of one routed batch, as one AsyncWork."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.runtime.future import AsyncWork


class AsyncRouteWork(AsyncWork[Any]):
    """The AsyncWork of several others: it ends when all of them have succeeded, or when the first of them fails.

    The result is made on the first thread that waits for it. If the work is dropped, or has failed, its other works are
    dropped too, so that the shards of a receive that did not succeed return to their channel or mailbox.

    Args:
        works: the works, in the order of the shards; None if `begin` sets them later.
        finalize_fn: makes the result from the list of the works' results.
        what: name of the operation, for errors.
    """

    _lazy = True

    def __init__(
        self,
        works: Sequence[AsyncWork[Any]] | None,
        finalize_fn: Callable[[list[Any]], Any] = lambda _: None,
        what: str = "a routed batch",
    ) -> None:
        super().__init__(what)
        self._finalize = finalize_fn
        self._works: tuple[AsyncWork[Any], ...] = ()
        self._gone: dict[int, Exception] = {}
        if works is not None:
            self.begin(works, finalize_fn)

    def begin(self, works: Sequence[AsyncWork[Any]], finalize_fn: Callable[[list[Any]], Any]) -> None:
        """Set the works and the function that makes the result. Called at most once."""
        self._finalize = finalize_fn
        self._works = works = tuple(works)
        self._left = len(works)
        mine = weakref.ref(self)  # weak: a work that nobody holds must be dropped, with the gets in it
        if not works:
            self._finish()
        for index, work in enumerate(works):
            work._on_done(partial(_one_done, mine, index))

    def withdraw(self, index: int, error: Exception) -> None:
        """Withdraw the work *index*, because the worker that it needs is gone. Loop thread only.

        The channel decides: if the shard is there already, the work succeeds; otherwise this work fails with *error*.
        """
        works = self._works
        if index >= len(works) or works[index].done():
            return
        leave = getattr(works[index], "leave", None)
        if leave is not None:  # else a send or recv, which fails by itself
            self._gone[index] = error
            leave()

    def _one_ended(self, index: int) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
            works = self._works
        if index >= len(works):
            return  # another work has failed
        error = works[index].error
        if error is None:
            if last:
                self._finish()
            return
        if isinstance(error, CallTimeoutError):
            error = self._gone.get(index, error)
        works[index]._seen = True  # this work reports it
        self._works = ()
        self.reject(error)

    def _make_result(self, _value: Any) -> Any:
        works, self._works = self._works, ()  # their values may be large, and the work may be kept for long
        return self._finalize([work._outcome() for work in works])

    def _check_blocking(self) -> None:
        for work in self._works:
            work._check_blocking()


def _one_done(work: weakref.ref[AsyncRouteWork], index: int) -> None:
    route = work()
    if route is not None:
        route._one_ended(index)
