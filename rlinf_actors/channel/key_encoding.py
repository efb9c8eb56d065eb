"""Keys of a channel as bytes: equal keys give equal bytes, in every process. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from rlinf_actors.errors import UsageError

DEFAULT_KEY = "default_queue"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def key_bytes(key: Hashable) -> bytes:
    """The bytes of a key: a str, int, float, bool, bytes or None, or a tuple of them.

    Raises:
        UsageError: it is something else; pickles of equal objects may differ, so these cannot be keys.
    """
    try:
        return _pack(_normal(key))
    except OverflowError:
        raise UsageError(f"{key!r} cannot be a channel's key: it has more than 64 bits") from None


def key_of(data: bytes) -> Any:
    """The key that `key_bytes` made *data* of."""
    key = _unpack(data)
    return _tuple(key) if isinstance(key, list) else key


def _normal(key: Any) -> Any:
    if isinstance(key, tuple):
        return [_normal(part) for part in key]
    if isinstance(key, bool) or (isinstance(key, float) and key.is_integer()):
        return int(key)  # equal in a dict, so equal here
    if key is None or type(key) in (str, int, float, bytes):
        return key
    raise UsageError(
        f"{key!r} cannot be a channel's key: use a str, int, float, bool, bytes or None, or a tuple of them"
    )


def _tuple(parts: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(part) if isinstance(part, list) else part for part in parts)
