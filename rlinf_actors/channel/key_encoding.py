"""Encode the keys of a channel as bytes, and decode them. Nothing here does I/O."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import msgspec

from rlinf_actors.errors import UsageError

DEFAULT_KEY = "default_queue"

MOST_BYTES = 1 << 20  # as in wire.bounds.QueueKey
_encode = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def key_bytes(key: Hashable) -> bytes:
    """Return a key encoded as bytes. Equal keys give equal bytes in every process.

    The results of recent keys are kept, because a process uses few keys for many items.

    Raises:
        UsageError: the key is not a str, int, float, bool, bytes or None, or a tuple of such values. Other objects
            cannot be keys, because pickles of equal objects may differ.
    """
    try:
        return _encoded(key)
    except OverflowError:
        raise UsageError(f"{key!r} cannot be a channel's key: it has more than 64 bits") from None
    except TypeError:  # it has no hash
        return _pack(_normal(key))


def _pack(key: Any) -> bytes:
    data = _encode(key)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{str(key)[:40]!r}... cannot be a channel's key: it has more than {MOST_BYTES:,} bytes")
    return data


@functools.lru_cache(maxsize=256)
def _encoded(key: Hashable) -> bytes:
    return _pack(_normal(key))


def key_of(data: bytes) -> Any:
    """Decode the key that `key_bytes` encoded as *data*."""
    key = _unpack(data)
    return _tuples(key) if isinstance(key, list) else key


def _normal(key: Any) -> Any:
    if isinstance(key, tuple):
        return [_normal(part) for part in key]
    if isinstance(key, bool) or (isinstance(key, float) and key.is_integer()):
        return int(key)  # 1, 1.0 and True are the same key of a dict, so they are the same key here
    if key is None or type(key) in (str, int, float, bytes):
        return key
    raise UsageError(
        f"{key!r} cannot be a channel's key: use a str, int, float, bool, bytes or None, or a tuple of them"
    )


def _tuples(parts: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(part) if isinstance(part, list) else part for part in parts)
