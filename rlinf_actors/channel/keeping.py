"""Requests that wait until it is known where they go, and works that are made of several."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlinf_actors.channel.requests import Get, Request
from rlinf_actors.errors import ChannelClosedError
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.work import Work

T = TypeVar("T")


class Joint(AsyncWork[T]):
    """A work that is done when others are. *make* makes its value of them, on the thread that waits.

    Args:
        what: for messages.
        works: the others; None if `join` will tell.
        make: gets the works.
    """

    def __init__(self, what: str, works: Sequence[AsyncWork[Any]] | None, make: Callable[..., T]) -> None:
        super().__init__(what)
        self._make = make
        self._works: Sequence[AsyncWork[Any]] = ()
        if works is not None:
            self.join(works)

    def join(self, works: Sequence[AsyncWork[Any]]) -> None:
        """These are the others. Once."""
        self._works = works
        self._left = len(works)
        for work in works:
            work._on_done(self._one)

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._all()

    def _all(self) -> None:
        self.resolve(None)  # type: ignore[arg-type]  # `_outcome` makes the value

    def _outcome(self) -> T:
        super()._outcome()
        return self._make(self._works)


class Closing(Joint[None]):
    """A close under way, of every replica. If all are drained it ends when the hosts have: the name is free then."""

    def __init__(self, name: str, gone: Work[None]) -> None:
        super().__init__(f"close() of channel {name!r}", None, lambda works: None)
        self._gone = gone

    def _all(self) -> None:
        ended, failed = True, None
        for work in self._works:
            try:
                ended &= work._outcome()
            except ChannelClosedError:
                continue  # it is
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                failed = failed or error
        if failed is not None:
            self.reject(failed)
        elif ended:
            self._gone._on_done(lambda: self.resolve(None))
        else:
            self.resolve(None)


class Later(Joint[T]):
    """What is asked of all replicas, before the channel is found. *start* asks it."""

    def __init__(self, what: str, start: Callable[[Any], AsyncWork[T]]) -> None:
        super().__init__(what, None, lambda works: works[0]._outcome())
        self.start = start

    def held(self) -> Callable[[], Later[T]]:
        """What keeps it while it waits."""
        return lambda: self


class Kept:
    """Requests that wait, in order, until it is known where they go. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Callable[[], Any]] = collections.deque()
        self._over = False

    def add(self, request: Request | Later[Any]) -> bool:
        """Keep it; False if that is over."""
        with self._lock:
            if not self._over:
                self._waiting.append(request.held())
            return not self._over

    def begin(self, send: Callable[[Any], object], then: Callable[[], object]) -> None:
        """Send all of them; call *then* before later ones, which are not kept any more, can be sent. Loop thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    then()
                    self._over = True
                    return
                request = self._waiting.popleft()()
            if request is None or request.done():
                continue
            send(request)
            if isinstance(request, Get) and request.error is not None:  # cancelled in this moment, by another thread
                request._give_back(False)

    def fail(self, error: BaseException) -> None:
        """It will not be known."""
        with self._lock:
            self._over = True
            waiting, self._waiting = self._waiting, collections.deque()
        for held in waiting:
            request = held()
            if request is not None:
                request.reject(error)
