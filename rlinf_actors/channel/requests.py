"""What is under way at a channel's host: gets, batches and questions, and how their answers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rlinf_actors.channel.backend import Shown
from rlinf_actors.channel.keys import key_of
from rlinf_actors.channel.taking import Taking
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import payload
from rlinf_actors.wire.vouched import Vouched

_unpack = msgspec.msgpack.Decoder().decode


class Giver(Protocol):
    """Whom a get tells what became of what it brought."""

    def taken(self, peer: Peer, call: int) -> None:
        """It has reached the user's code. Any thread."""

    def give_back(self, peer: Peer, call: int, later: bool) -> None:
        """See Taking."""


class Get(Taking[Any]):
    """A get under way. `call` is its number on the link to *peer*."""

    def __init__(self, giver: Giver, what: str, peer: Peer) -> None:
        super().__init__(what)
        self.peer = peer
        self.call = 0
        self._giver = giver

    def _decode(self, arrived: Vouched) -> tuple[Any, bool]:
        return payload.decode(arrived.cut(1)), _unpack(arrived[0])[0][2]

    def _acknowledge(self, arrived: Vouched) -> None:
        if len(arrived[0]) > 1:  # an empty batch has nothing to acknowledge
            self._giver.taken(self.peer, self.call)

    def _give_back(self, later: bool) -> None:
        self._giver.give_back(self.peer, self.call, later)


class Batch(Get):
    """A get_batch under way."""

    def _decode(self, arrived: Vouched) -> tuple[Any, bool]:
        found, at, any_again = [], 1, False
        for count, _, again in _unpack(arrived[0]):
            found.append(payload.decode(arrived.cut(at, at + count)))
            at += count
            any_again |= again
        return found, any_again


class Asked(AsyncWork[Any]):
    """A question whose answer is decoded by who waits."""

    def __init__(self, what: str, decode: Callable[[Vouched], Any] | None) -> None:
        super().__init__(what)
        self._decode = decode

    def _outcome(self) -> Any:
        parts = super()._outcome()
        return _unpack(parts[0]) if self._decode is None else self._decode(parts)


def opened(parts: Vouched) -> tuple[bool, list[tuple[Any, int, list[Shown]]]]:
    """The answer to a ChannelShow."""
    closed, rows = _unpack(parts[0])
    at, shown = 1, []
    for key, count, about in rows:
        items = []
        for number, nbytes, weight, again in about:
            if number < 0:
                items.append(Shown(None, nbytes, weight, again, whole=False))
                continue
            items.append(Shown(payload.decode(parts.cut(at, at + number)), nbytes, weight, again))
            at += number
        shown.append((key_of(key), count, items))
    return closed, shown
