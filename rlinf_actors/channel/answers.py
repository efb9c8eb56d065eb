"""Decode a host's answers about many items: the description of a channel, and undeliverable items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rlinf_actors.channel.key_encoding import key_of
from rlinf_actors.channel.results import ShownItem, UndeliverableItem, View
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts

_unpack = msgspec.msgpack.Decoder().decode


def description(parts: AuthenticatedParts) -> View:
    """Decode a host's answer for `Channel.describe`: the keys, their waiting items, and how many are undeliverable."""
    closed, rows, dead = _unpack(parts[0])
    at, shown = 1, []
    for key, count, about in rows:
        items = []
        for number, nbytes, weight, again in about:
            if number < 0:
                items.append(ShownItem(None, nbytes, weight, again, whole=False))
                continue
            items.append(ShownItem(payload.decode(parts.cut(at, at + number)), nbytes, weight, again))
            at += number
        shown.append((key_of(key), count, items))
    return closed, shown, {key_of(key): count for key, count in dead}


def undeliverable(
    key: bytes, parts: AuthenticatedParts, decode: Callable[[AuthenticatedParts], Any]
) -> list[UndeliverableItem[Any]]:
    """Decode a host's answer to the request for the undeliverable items of a key.

    *decode* makes an item from the message parts of the item.
    """
    at, found = 1, []
    for count, deliveries, consumer, reason in _unpack(parts[0]):
        item = decode(parts.cut(at, at + count))
        found.append(UndeliverableItem(item, key_of(key), deliveries, consumer, reason))
        at += count
    return found


def decoded_or_error(parts: AuthenticatedParts) -> Any:
    """Return the object in *parts*, or the exception that decoding it raised."""
    try:
        return payload.decode(parts)
    except Exception as error:  # noqa: BLE001 - of the user's classes; the other items can be read
        return error
