"""The methods of Channel that inspect a channel: number of items, description, undeliverable items."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Literal, TypeVar, overload

from rlinf_actors.channel.client import JoinedWork, RemoteChannel
from rlinf_actors.channel.connecting import ConnectingChannel
from rlinf_actors.channel.key_encoding import DEFAULT_KEY
from rlinf_actors.channel.local import LocalChannel
from rlinf_actors.channel.results import ShownItem, T, UndeliverableItem, View
from rlinf_actors.errors import CallTimeoutError, ChannelBrokenError, ChannelClosedError, RlinfActorsError
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.shown import html_table

V = TypeVar("V")

SHOWN_S = 0.5
"""Seconds for which a notebook that shows a channel waits for its host: the notebook's event loop stands meanwhile."""

Backend = RemoteChannel | ConnectingChannel | LocalChannel
"""The items are in host processes; the host is not found yet; the items are in this process. No method blocks."""


class ChannelViews(Generic[T]):
    """The methods of Channel that inspect its items; a base class of Channel."""

    _name: str
    _namespace: str

    _maxsize: int

    def _repr_html_(self) -> str:
        """Return a table for notebooks. The host is asked for the numbers of items, and has SHOWN_S to answer."""
        asked = None
        try:
            asked = self._backend.show("sizes")
            closed, keys, dead = asked.wait(SHOWN_S)
        except CallTimeoutError:
            if isinstance(asked, JoinedWork):
                asked.abandon()
            why = f": its process has not answered within {SHOWN_S:g} s"
            items, lost = f"not known{' yet: its process is starting' if self._backend.starting else why}", 0
        except RlinfActorsError as error:
            items, lost = f"not known: {error}", 0
        else:
            under = f" under {len(keys)} keys" if len(keys) > 1 else ""
            items = f"{sum(count for _, count, _ in keys)}{under}{' (closed)' if closed else ''}"
            lost = sum(dead.values())
        job, size = self._namespace or "none: the items are in this process", self._maxsize or "no limit"
        rows = [("job", job), ("maxsize", size), ("items", items)]
        return html_table(repr(self)[1:-1], (), [*rows, *([("undeliverable", lost)] if lost else [])])

    @property
    def is_local(self) -> bool:
        """True if the items stay in this process (``local=True``)."""
        return not self._namespace

    @property
    def _backend(self) -> Backend:
        raise NotImplementedError

    @overload
    def qsize(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> int: ...
    @overload
    def qsize(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[int]: ...
    def qsize(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> int | AsyncWork[int]:
        """Return the number of items that wait under *key*. Takes a round trip to the host.

        With ``async_op=True``, return at once an AsyncWork of that number.
        """
        work = self._look(key, lambda size, full: size)
        return work if async_op else work.wait()

    @overload
    def empty(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> bool: ...
    @overload
    def empty(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[bool]: ...
    def empty(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> bool | AsyncWork[bool]:
        """Return True if no item waits under *key*. Takes a round trip to the host.

        With ``async_op=True``, return at once an AsyncWork of the result.
        """
        work = self._look(key, lambda size, full: size == 0)
        return work if async_op else work.wait()

    @overload
    def full(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> bool: ...
    @overload
    def full(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[bool]: ...
    def full(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> bool | AsyncWork[bool]:
        """Return True if a put under *key* would wait. Takes a round trip to the host.

        With ``async_op=True``, return at once an AsyncWork of the result.
        """
        work = self._look(key, lambda size, full: full)
        return work if async_op else work.wait()

    @overload
    def describe(self, async_op: Literal[False] = False) -> str: ...
    @overload
    def describe(self, async_op: Literal[True]) -> AsyncWork[str]: ...
    def describe(self, async_op: bool = False) -> str | AsyncWork[str]:
        """Return a text that lists the first 20 items of each key. For a large item it gives the size in bytes.

        Takes a round trip to the host. ``str(channel)`` returns the same text, and blocks.
        """

        def text(works: list[AsyncWork[View]]) -> str:
            try:
                return _described(self._name, *works[0]._outcome())
            except ChannelClosedError:
                return f"Channel {self._name!r} (ended)"
            except ChannelBrokenError as error:
                return f"Channel {self._name!r} (broken: {error})"

        work = JoinedWork(f"describe() of channel {self._name!r}", [self._backend.show()], text)
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
        """Return the undeliverable items of a key, the oldest first. Takes a round trip to the host.

        An item becomes undeliverable when its delivery has failed `max_deliveries` times. Undeliverable items count
        towards the channel's limit in bytes, and keep the host of a closed channel alive, until they are drained.

        Args:
            key: key of the items.
            drain: True to remove the returned items from the channel. To retry an item, put it again. If an item cannot
                be unpickled in this process, that error is raised and all items stay.
            async_op: return at once an AsyncWork whose result is the list.
        """
        work = self._backend.undeliverable(key, drain)
        return work if async_op else work.wait()

    def _look(self, key: Hashable, make: Callable[[int, bool], V]) -> AsyncWork[V]:
        return AsyncWork.made_of(
            self._backend.look(key), lambda answer: make(*answer), f"a look at channel {self._name!r}"
        )


def _described(name: str, closed: bool, rows: list[tuple[Any, int, list[ShownItem]]], dead: dict[Any, int]) -> str:
    """Return the text of `Channel.describe`.

    Args:
        name: name of the channel.
        closed: True if the channel is closed.
        rows: for each key, the key, the number of waiting items, and the first items.
        dead: number of undeliverable items by key.
    """
    lines = [f"Channel {name!r}{' (closed)' if closed else ''}: {counted(sum(row[1] for row in rows), 'item')}"]
    for key, count, items in rows:
        more = f", … {count - len(items)} more" if count > len(items) else ""
        lost = f", and {dead[key]} undeliverable" if key in dead else ""
        lines.append(f"  {key!r}: [{', '.join(map(_shown, items))}{more}]{lost}")
    return "\n".join(lines)


def _shown(item: ShownItem) -> str:
    text = repr(item.value) if item.whole else f"<{item.nbytes} bytes>"
    if len(text) > 80:
        text = text[:77] + "..."
    weight = f" (weight {item.weight:g})" if item.weight else ""
    return f"{text}{weight}{' (again)' if item.again else ''}"
