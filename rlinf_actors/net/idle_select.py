"""IdleSelect: an asyncio event loop of user code reads this process's sockets while it waits (`net.reading`)."""

from __future__ import annotations

import asyncio
import select
import selectors
from collections.abc import Callable
from typing import Any

from rlinf_actors.net import reading

_Select = Callable[..., Any]


class IdleSelect:
    """Lets an asyncio event loop of user code read the sockets while it has nothing else to do.

    It takes the place of the method `select` of the loop's selector, by which the loop waits. While results are awaited
    and the turn is free, it polls the selector's epoll and E together. Other event loops, such as uvloop's, do not show
    when they wait: the I/O thread reads for them.

    Attributes:
        reading: the Reading of this process when the loop first awaited a result.
        awaited: number of results that the loop's tasks await. Loop's thread only.
    """

    def __init__(self, of: reading.Reading, selector: selectors.BaseSelector, select_alone: _Select) -> None:
        self.reading = of
        self.awaited = 0
        self.select_alone = select_alone
        self._selector = selector.fileno()  # type: ignore[attr-defined]
        self._waiter = reading.Waiter(of)
        self._poll = select.poll()
        for fd in (self._selector, of.fileno()):
            self._poll.register(fd, select.POLLIN)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> IdleSelect | None:
        """Return that of the running loop *loop*, and make it if there is none. None if *loop* cannot have one."""
        selector = getattr(loop, "_selector", None)
        active = reading.active
        if active is None or not isinstance(selector, selectors.EpollSelector):
            return None
        found = selector.select
        if isinstance(found, cls):
            if found.reading is active:
                return found
            found = found.select_alone
        made = cls(active, selector, found)
        selector.select = made  # type: ignore[method-assign]
        return made

    def __call__(self, timeout: float | None = None) -> Any:
        if not self.awaited or (timeout is not None and timeout <= 0) or not self.reading.take(self._waiter):
            return self.select_alone(timeout)
        try:
            ready = dict(self._poll.poll(None if timeout is None else timeout * 1000))
            if self.reading.fileno() in ready:
                self.reading.handle_ready(self._waiter)
        finally:
            self.reading.leave(self._waiter)
        return self.select_alone(0) if self._selector in ready else []
