"""Random messages of a lying peer: every message type, with the extremes of each field's type and of its bound.

The bounds are those of the one table (wire.bounds), as tests.message_bounds finds them in the types.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
from msgspec import inspect

INTS = (0, 1, 2, -1, 5, 100, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31) - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e9, 1e18, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
TEXTS = ("", "\0", "\n", "/", "../../etc/passwd", "\U0010ffff", "{}", "[{}]", "-1", "x" * 5000)
BYTES = (b"", b"k", b"\0" * 100, b"\xc1\xff")


ROOM = 100_000
"""Most characters and elements beyond a few in one message."""
_type_info = functools.cache(inspect.type_info)  # it takes 10 ms each, and there are hundreds of types


class Liar:
    """Makes messages.

    Args:
        seed: of the messages.
        names: texts that the receiver knows: ids, names, namespaces.
    """

    def __init__(self, seed: int, names: tuple[str, ...] = (), extremes: float = 0.0) -> None:
        self.random = random.Random(seed)
        self._names = names
        self._extremes = extremes
        self._room = 0

    def say(self, kind: Any) -> bytes:
        """MessagePack of a value of *kind*, a type that msgspec knows.

        A part `extremes` of the texts, lists and maps is as long as its bound allows, or one longer.
        """
        self._room = ROOM
        return msgspec.msgpack.encode(self._value(_type_info(kind)))

    def _length(self, info: Any, length: int) -> int:
        """Return *length*, or now and then the bound of *info* or one more."""
        most = info.max_length
        if most is None or most > self._room or self.random.random() >= self._extremes:
            return length
        self._room -= most
        return int(most + self.random.randrange(2))

    def _value(self, info: inspect.Type) -> Any:
        if isinstance(info, (inspect.StructType, inspect.DataclassType)):
            return self._fields(info)
        if isinstance(info, inspect.UnionType):
            return self._value(self.random.choice(info.types))
        if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
            few = self.random.choice((0, 1, 1, 2, 3))
            count = self._length(info, few)
            if count > few:
                return [self._value(info.item_type)] * count
            return [self._value(info.item_type) for _ in range(count)]
        if isinstance(info, inspect.DictType):
            few = self.random.randrange(3)
            count = self._length(info, few)
            if count > few:
                value = self._value(info.value_type)
                return {f"k{n}": value for n in range(count)}
            return {self._value(info.key_type): self._value(info.value_type) for _ in range(count)}
        if isinstance(info, inspect.TupleType):
            return [self._value(one) for one in info.item_types]
        if isinstance(info, inspect.LiteralType):
            return self.random.choice(info.values)
        if isinstance(info, inspect.Metadata):
            return self._value(info.type)
        return self._scalar(info)

    def _fields(self, info: inspect.StructType | inspect.DataclassType) -> Any:
        plain = isinstance(info, inspect.DataclassType)
        fields = {
            field.encode_name: self._value(field.type)
            for field in info.fields
            if field.required or self.random.random() < 0.7 or (not plain and info.array_like)
        }
        if plain:
            return fields
        tag = [] if info.tag is None else [info.tag]
        if info.array_like:
            return tag + list(fields.values())
        return {**({info.tag_field: info.tag} if tag else {}), **fields}

    def _scalar(self, info: inspect.Type) -> Any:
        pick = self.random.choice
        if isinstance(info, inspect.IntType):
            return pick(INTS) if self.random.random() < 0.6 else self.random.randrange(10)
        if isinstance(info, inspect.FloatType):
            return pick(FLOATS)
        if isinstance(info, (inspect.StrType, inspect.BytesType)):
            length = self._length(info, -1)
            if length >= 0:
                return "x" * length if isinstance(info, inspect.StrType) else b"x" * length
        if isinstance(info, inspect.StrType):
            return pick(self._names) if self._names and self.random.random() < 0.7 else pick(TEXTS)
        if isinstance(info, inspect.BytesType):
            return pick(BYTES)
        if isinstance(info, inspect.BoolType):
            return self.random.random() < 0.5
        assert isinstance(info, inspect.NoneType), info
        return None
