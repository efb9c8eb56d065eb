"""IdleSelect: an asyncio event loop of user code reads this process's sockets while it waits (`net.reading`)."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable
from typing import Any

from rlinf_actors.net import reading

_Select = Callable[..., Any]


class IdleSelect:
    """Lets an asyncio event loop of user code read the sockets while it has nothing else to do.

    It takes the place of the methods `select`, by which the loop waits, and `close` of the loop's selector. While
    results are awaited and the turn is free, it polls the loop's descriptors and the sockets together. Other event
    loops, such as uvloop's, do not show when they wait: see `net.loop_reader`.

    Attributes:
        reading: the Reading of this process when the loop first awaited a result.
        awaited: number of results that the loop's tasks await. Loop's thread only.
    """

    def __init__(self, of: reading.Reading, selector: selectors.BaseSelector, select_alone: _Select) -> None:
        self.reading = of
        self.awaited = 0
        self.select_alone = select_alone
        self._selector = selector.fileno()  # type: ignore[attr-defined]
        self._polled = False  # the loop's descriptors were polled since tasks last ran, and none was ready

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> IdleSelect | None:
        """Return that of the running loop *loop*, and make it if there is none. None if *loop* cannot have one."""
        active = reading.active
        if active is None:
            return None
        selector = getattr(loop, "_selector", None)
        if selector is None or not isinstance(selector, selectors.EpollSelector) or active.loop is loop:
            return None
        found = selector.select
        if isinstance(found, cls):
            if found.reading is active:
                return found
            found = found.select_alone
        made = cls(active, selector, found)
        selector.select = made  # type: ignore[method-assign]
        selector.close = functools.partial(made.close, type(selector).close, selector)  # type: ignore[method-assign]
        return made

    def close(self, close_alone: Callable[[selectors.BaseSelector], None], selector: selectors.BaseSelector) -> None:
        """Close the loop's selector. Takes the place of its method `close`."""
        self.reading.part(self)
        close_alone(selector)

    def __call__(self, timeout: float | None = None) -> Any:
        polled, self._polled = self._polled, False
        if timeout is not None and timeout <= 0:
            return [] if polled else self.select_alone(timeout)
        if not self.awaited:
            return self.select_alone(timeout)
        holder, ready = object(), None
        try:
            if self.reading.take(holder):
                ready = self.reading.poll_with(self, self._selector, -1 if timeout is None else timeout)
            self.reading.leave(holder)
        except BaseException:  # a signal handler, too, may raise, and anywhere
            self.reading.leave(holder)
            raise
        if ready is None:
            return self.select_alone(timeout)
        if ready:
            return self.select_alone(0)
        self._polled = True
        return []
