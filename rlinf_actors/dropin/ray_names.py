"""What RLinf uses of Ray beside its scheduler, over rlinf_actors.

The modules of rlinf_actors.dropin.ray_stand_in export it as `ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import uuid
from collections.abc import Iterator
from typing import Any

from rlinf_actors.channel.channel import Channel
from rlinf_actors.errors import CallTimeoutError, ChannelClosedError
from rlinf_actors.net.host import route_ip
from rlinf_actors.worker.context import current

_ANY_HOST = "192.0.2.1"
"""An address outside of every network (RFC 5737): only the route to it counts, and nothing is sent."""


def get_node_ip_address() -> str:
    """Return the IP address of this process's node.

    In a worker that is the node's address in its cluster, else the address of the default route. On a machine without a
    route it is 127.0.0.1.
    """
    context = current()
    if context is not None:
        return context.place.node_ip
    try:
        return route_ip(_ANY_HOST)
    except OSError:
        return "127.0.0.1"


class Empty(queue.Empty, asyncio.QueueEmpty):
    """The queue has no item (`ray.util.queue.Empty`)."""


class Full(queue.Full, asyncio.QueueFull):
    """The queue has no room (`ray.util.queue.Full`)."""


class Queue:
    """`ray.util.queue.Queue` over a Channel: a FIFO that any process of the job may use, as an argument of a call too.

    Args:
        maxsize: most items that wait; 0 for no limit.
        actor_options: options of Ray's actor, not used: the channel's host needs no resources.

    It ends with the process that made it, or by `shutdown`.
    """

    def __init__(self, maxsize: int = 0, actor_options: dict[str, Any] | None = None) -> None:
        self.maxsize = maxsize
        self._channel: Channel[Any] = Channel.create(f"ray-queue-{uuid.uuid4().hex}", maxsize=maxsize)

    def __len__(self) -> int:
        return self.qsize()

    def qsize(self) -> int:
        """Return the number of items that wait."""
        return self._channel.qsize()

    size = qsize

    def empty(self) -> bool:
        """Return True if no item waits."""
        return self._channel.empty()

    def full(self) -> bool:
        """Return True if there is no room for another item."""
        return self._channel.full()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append *item*; wait for room if *block*, at most *timeout* seconds.

        Raises:
            Full: there was no room.
            ValueError: *timeout* is negative.
        """
        with _as_full():
            if block:
                self._channel.put(item, timeout=_seconds(timeout))
            else:
                self._channel.put_nowait(item)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append *item* as `put` does."""
        with _as_full():
            if block:
                await self._channel.put(item, timeout=_seconds(timeout), async_op=True)
            else:
                await self._channel.put_nowait(item, async_op=True)

    def put_nowait(self, item: Any) -> None:
        """Append *item*, or raise Full."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the first item; wait for one if *block*, at most *timeout* seconds.

        Raises:
            Empty: there was no item.
            ValueError: *timeout* is negative.
        """
        with _as_empty():
            return self._channel.get(timeout=_seconds(timeout)) if block else self._channel.get_nowait()

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the first item as `get` does."""
        with _as_empty():
            if block:
                return await self._channel.get(timeout=_seconds(timeout), async_op=True)
            return await self._channel.get_nowait(async_op=True)

    def get_nowait(self) -> Any:
        """Remove and return the first item, or raise Empty."""
        return self.get(block=False)

    def shutdown(self, force: bool = False, grace_period_s: int = 5) -> None:
        """End the queue and drop its items. Later puts and gets raise ChannelClosedError."""
        self._channel.close()
        with contextlib.suppress(ChannelClosedError, asyncio.QueueEmpty):
            while True:
                self._channel.get_nowait()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ray.util.queue.Queue.{name}: Ray is not installed here, and the stand-in of rlinf_actors.dropin lacks "
            f"it. Use a Channel of rlinf.scheduler, or install ray"
        )


def _seconds(timeout: float | None) -> float | None:
    if timeout is not None and timeout < 0:
        raise ValueError("'timeout' must be a non-negative number")
    return timeout


@contextlib.contextmanager
def _as_full() -> Iterator[None]:
    try:
        yield
    except (CallTimeoutError, asyncio.QueueFull):
        raise Full from None


@contextlib.contextmanager
def _as_empty() -> Iterator[None]:
    try:
        yield
    except (CallTimeoutError, asyncio.QueueEmpty):
        raise Empty from None
