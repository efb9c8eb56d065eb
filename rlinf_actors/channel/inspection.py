"""What a Channel says of its items: how many wait, which, and which were given up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, TypeVar, overload

from rlinf_actors.channel.backend import Backend, Shown, T, UndeliverableItem, View
from rlinf_actors.channel.client import Joint
from rlinf_actors.channel.key_encoding import DEFAULT_KEY
from rlinf_actors.errors import ChannelBrokenError, ChannelClosedError
from rlinf_actors.runtime.future import AsyncWork

V = TypeVar("V")


class ChannelViews(Generic[T]):
    """The part of a Channel that looks at its items."""

    _name: str

    @property
    def _backend(self) -> Backend:
        raise NotImplementedError

    @overload
    def qsize(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> int: ...
    @overload
    def qsize(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[int]: ...
    def qsize(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> int | AsyncWork[int]:
        """Return the number of waiting items. One round trip."""
        work = self._look(key, lambda size, full: size)
        return work if async_op else work.wait()

    @overload
    def empty(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> bool: ...
    @overload
    def empty(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[bool]: ...
    def empty(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> bool | AsyncWork[bool]:
        """True if no item waits. One round trip."""
        work = self._look(key, lambda size, full: size == 0)
        return work if async_op else work.wait()

    @overload
    def full(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> bool: ...
    @overload
    def full(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[bool]: ...
    def full(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> bool | AsyncWork[bool]:
        """True if a put would wait. One round trip."""
        work = self._look(key, lambda size, full: full)
        return work if async_op else work.wait()

    @overload
    def describe(self, async_op: Literal[False] = False) -> str: ...
    @overload
    def describe(self, async_op: Literal[True]) -> AsyncWork[str]: ...
    def describe(self, async_op: bool = False) -> str | AsyncWork[str]:
        """Return what waits, for people: of each key the first 20 items, large ones by their size. One round trip.

        ``str(channel)`` is the same, and blocks.
        """

        def text(works: list[AsyncWork[View]]) -> str:
            try:
                return _described(self._name, *works[0]._outcome())
            except ChannelClosedError:
                return f"Channel {self._name!r} (ended)"
            except ChannelBrokenError as error:
                return f"Channel {self._name!r} (broken: {error})"

        work = Joint(f"describe() of channel {self._name!r}", [self._backend.show()], text)
        return work if async_op else work.wait()

    def __str__(self) -> str:
        return self.describe()

    @overload
    def undeliverable(
        self, key: Hashable = DEFAULT_KEY, drain: bool = False, async_op: Literal[False] = False
    ) -> list[UndeliverableItem[T]]: ...
    @overload
    def undeliverable(
        self, key: Hashable = DEFAULT_KEY, drain: bool = False, *, async_op: Literal[True]
    ) -> AsyncWork[list[UndeliverableItem[T]]]: ...
    def undeliverable(
        self, key: Hashable = DEFAULT_KEY, drain: bool = False, async_op: bool = False
    ) -> list[UndeliverableItem[T]] | AsyncWork[list[UndeliverableItem[T]]]:
        """Return the items of a key that takes have given up, the oldest first. One round trip.

        They count among the channel's bytes, and keep a closed channel's host from ending, until they are drained.

        Args:
            key: of the FIFO.
            drain: take them off the list; put what is to be tried again. If an item cannot be read in this process,
                that is raised and all stay on the list.
            async_op: return at once an AsyncWork that gives the list.

        Raises:
            ProtocolMismatchError: the channel's host is of protocol 6.
        """
        work = self._backend.undeliverable(key, drain)
        return work if async_op else work.wait()

    def _look(self, key: Hashable, make: Callable[[int, bool], V]) -> AsyncWork[V]:
        return Joint(
            f"a look at channel {self._name!r}", [self._backend.look(key)], lambda works: make(*works[0]._outcome())
        )


def _described(name: str, closed: bool, rows: list[tuple[Any, int, list[Shown]]], undeliverable: dict[Any, int]) -> str:
    lines = [f"Channel {name!r}{' (closed)' if closed else ''}: {sum(row[1] for row in rows)} items"]
    for key, count, items in rows:
        more = f", … {count - len(items)} more" if count > len(items) else ""
        dead = f", and {undeliverable[key]} undeliverable" if key in undeliverable else ""
        lines.append(f"  {key!r}: [{', '.join(map(_shown, items))}{more}]{dead}")
    return "\n".join(lines)


def _shown(item: Shown) -> str:
    text = repr(item.value) if item.whole else f"<{item.nbytes} bytes>"
    if len(text) > 80:
        text = text[:77] + "..."
    weight = f" (weight {item.weight:g})" if item.weight else ""
    return f"{text}{weight}{' (again)' if item.again else ''}"
