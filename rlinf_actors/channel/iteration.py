"""Loops over the items of a channel: ``for item in channel`` and ``async for item in channel``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Generic

from rlinf_actors.channel.inspection import Backend
from rlinf_actors.channel.key_encoding import DEFAULT_KEY
from rlinf_actors.channel.results import T
from rlinf_actors.errors import ChannelClosedError, ConnectionLostError


class ChannelItems(Generic[T]):
    """The methods of Channel that iterate over its items; a base class of Channel."""

    @property
    def _backend(self) -> Backend:
        raise NotImplementedError

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yield the items of the default key as they come, until the channel is closed and empty.

        Raises:
            ChannelBrokenError: the channel ended in another way than by `close`.
        """
        while True:
            try:
                item = await self._backend.get(DEFAULT_KEY, False, None)
            except ChannelClosedError:
                return
            except ConnectionLostError:
                continue  # the host sends again what this process had not acknowledged
            yield item

    def __iter__(self) -> Iterator[T]:
        """Yield the items of the default key, until the channel is closed and empty. Blocks while no item waits."""
        while True:
            try:
                item = self._backend.get(DEFAULT_KEY, False, None).wait()
            except ChannelClosedError:
                return
            except ConnectionLostError:
                continue
            yield item
