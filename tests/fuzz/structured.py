"""Any value of a message type, extremes first: what a peer that is let in, and lies, can say."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

INTS = (0, 1, 2, -1, 5, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31) - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e9, 1e18, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324)
TEXTS = ("", "ns", "g", "d1", "n0", "g-0", "a:n0", "driver", "worker", "\0", "\n", "../../etc/passwd", "\U0010ffff", "x" * 5000)
BYTES = (b"", b"k", b"\0" * 100, b"\xc1\xff")


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Values of *kind*, a type of msgspec's; bounds on its fields are not kept, for liars do not keep them."""
    return _values(inspect.type_info(kind))


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(info, inspect.StructType):
        return _struct(info.cls)
    if isinstance(info, inspect.UnionType):
        return st.one_of([_values(one) for one in info.types])
    if isinstance(info, inspect.ListType):
        return st.lists(_values(info.item_type), max_size=3)
    if isinstance(info, inspect.DictType):
        return st.dictionaries(_values(info.key_type), _values(info.value_type), max_size=2)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*[_values(one) for one in info.item_types])
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, inspect.Metadata):
        return _values(info.type)
    return _SCALARS[type(info)]


@functools.lru_cache(maxsize=None)
def _struct(cls: type) -> st.SearchStrategy[Any]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return st.deferred(lambda: st.builds(cls, **{field.name: _values(field.type) for field in info.fields}))


_SCALARS: dict[type, st.SearchStrategy[Any]] = {
    inspect.IntType: st.sampled_from(INTS) | st.integers(0, 9),
    inspect.FloatType: st.sampled_from(FLOATS),
    inspect.StrType: st.sampled_from(TEXTS) | st.text(max_size=3),
    inspect.BytesType: st.sampled_from(BYTES),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}
