"""Take: an item that is out until the end of a block."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic

from rlinf_actors import forks
from rlinf_actors.channel.backend import Delivery, T
from rlinf_actors.errors import UsageError
from rlinf_actors.runtime.future import AsyncWork


class Take(Generic[T]):
    """What `Channel.take` returns: ``async with`` or ``with`` it, once.

    The block gets the item. When the block ends, the item is released: the channel has confirmed that before the next
    statement runs. If the block raises, whatever it is, the item is the head of its queue again; so it is when the
    process dies in the block.

    Args:
        begin: asks for the item.
        name: of the channel, for messages.
    """

    def __init__(self, begin: Callable[[], Delivery[T]], name: str) -> None:
        self._begin = begin
        self._name = name
        self._asked: Delivery[T] | None = None
        self._over = False

    @property
    def deliveries(self) -> int:
        """Which delivery of the item this is, 1 for the first; to be asked in the block.

        Raises:
            UsageError: the item is not here yet.
        """
        if self._asked is None or not self._asked.deliveries:
            raise UsageError("the number of deliveries is known in the block: `async with take as item: ...`")
        return self._asked.deliveries

    async def __aenter__(self) -> T:
        return await self._ask()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        work = self._end(kind, error)
        if work is not None:
            await work

    def __enter__(self) -> T:
        delivery = self._ask()
        try:
            return delivery.wait()
        except BaseException:  # Ctrl-C
            delivery.cancel()  # this may be kept, and an item that came would be out as long
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        work = self._end(kind, error)
        if work is not None:
            work.wait()

    def __del__(self) -> None:
        if self._asked is not None and self._asked.taken and not self._over:
            self._asked.fail("its block was entered and never left: the Take was dropped", later=True)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> AsyncWork[None] | None:
        """Return the release of the item, which is to be waited for; None if it was given back instead."""
        assert self._asked is not None
        if kind is None:
            forks.check(self._made_in)  # a child forked in the block would wait for ever
        elif self._made_in != forks.generation():
            return None  # the item is the parent's
        self._over = True
        if kind is None:
            return self._asked.release()
        self._asked.fail("".join(traceback.format_exception_only(kind, error)).strip())
        return None

    def _ask(self) -> Delivery[T]:
        if self._asked is not None:
            raise UsageError(f"this take() from channel {self._name!r} was used before: call take() for each item")
        self._made_in = forks.generation()
        self._asked = self._begin()
        return self._asked
