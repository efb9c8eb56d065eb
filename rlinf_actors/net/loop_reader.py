"""LoopReader: an event loop that does not show when it waits, such as uvloop's, reads this process's sockets too.

The loop watches an epoll that belongs to it alone, in which are the data sockets of this process (`Reading.follow`).
Only the loop's own thread adds this epoll to the loop, and takes it out. If no thread polls W, the kernel wakes the I/O
thread as well as these loops: EPOLLEXCLUSIVE counts only threads that sleep in the poll of that very epoll, and these
epolls are within others. So both may read, and the one that comes first handles the messages. The task of a result is
then woken by its own thread, and does not wait for a second wake-up.
"""

from __future__ import annotations

import asyncio
import select
import weakref

from rlinf_actors.net import reading
from rlinf_actors.net.loop import call_threadsafe


class LoopReader:
    """Lets one event loop of user code read the sockets while its tasks await results.

    Attributes:
        awaited: number of results that the loop's tasks await. Loop's thread only.
    """

    def __init__(self, of: reading.Reading, loop: asyncio.AbstractEventLoop) -> None:
        self.awaited = 0
        self._reading = of
        self._loop = weakref.ref(loop, self._collected)
        self._poll = select.epoll()
        self._watched = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopReader | None:
        """Return that of the running loop *loop*, which reads from now on. None if *loop* must not have one."""
        active = reading.active
        if active is None:
            return None
        found = active.followers.get(id(loop))
        if not isinstance(found, cls) or found._loop() is not loop:
            if active.loop is loop or active.left_to_loop:
                return None
            found = cls(active, loop)
            if not active.follow(id(loop), found, found._poll):
                found._poll.close()
                return None
        if not found._watched:
            found._watched = True
            loop.add_reader(found._poll.fileno(), found._ready)
        return found

    @property
    def ended(self) -> bool:
        """True if the loop was closed."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def _ready(self) -> None:
        if self.awaited:
            self._reading.read(self._poll)
        else:  # the loop would be woken for messages that are not for it
            self._leave()

    def _leave(self) -> None:
        loop = self._loop()
        if loop is not None and self._watched:
            self._watched = False
            loop.remove_reader(self._poll.fileno())

    def close(self) -> None:
        """Leave the loop, and close the epoll, since the sockets are read no more. Any thread."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._poll.close()
        else:
            call_threadsafe(loop, self._close)

    def _close(self) -> None:
        self._leave()
        self._poll.close()

    def _collected(self, _loop: object) -> None:
        """Close the epoll, since the loop does not exist any more. Any thread, with any lock held."""
        self._reading.ended(self)
