"""The bounds of the fields of all messages, as their decoders have them (rlinf_actors.wire.bounds)."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from rlinf_actors.net import bulk
from rlinf_actors.wire import child_protocol, control_codec, frames, template_protocol

PROTOCOLS: dict[str, Any] = {
    "Control messages: between the head and agentds, drivers, workers, tools": control_codec.Envelope,
    "Frames: between processes of a job": frames.AnyFrame,
    "Packets between agentd, templates and workers": typing.Union[
        template_protocol.ToTemplate, template_protocol.ToAgent, template_protocol.ToWorker
    ],
    "Packets between a worker and its children": typing.Union[
        child_protocol.Enter, child_protocol.Listening, child_protocol.Answer
    ],
    "Messages about bulk streams": bulk.AnyMessage,
}
"""Title -> type that the decoder reads."""


class Field(NamedTuple):
    """One text, byte string, list or map in a message; `most` is None without a bound.

    `owner` is the struct and `name` the field. `place` is the way from the field to the value, "" for the field itself,
    with "[...]" for an element of a list or a value of a map, and "[key]" for a key of a map.
    """

    owner: type
    name: str
    place: str
    kind: str
    most: int | None
    title: str = ""
    why: str = ""

    @property
    def path(self) -> str:
        return f"{self.owner.__name__}.{self.name}{self.place}"


_LONG = {
    inspect.StrType: "characters", inspect.BytesType: "bytes", inspect.ListType: "elements",
    inspect.VarTupleType: "elements", inspect.DictType: "entries",
}  # fmt: skip
_SHORT = (
    inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.NoneType, inspect.LiteralType, inspect.EnumType,
)  # fmt: skip


def fields(kind: Any) -> Iterator[Field]:
    """Yield all values below *kind*, a type that msgspec reads, whose length varies; each struct once."""
    yield from _below(inspect.type_info(kind), typing.cast(type, None), "", "", set(), {})


def _below(info: Any, owner: type, name: str, place: str, seen: set[type], notes: dict[str, Any]) -> Iterator[Field]:
    if isinstance(info, inspect.Metadata):
        yield from _below(info.type, owner, name, place, seen, info.extra_json_schema or {})
    elif isinstance(info, inspect.UnionType):
        for one in info.types:
            yield from _below(one, owner, name, place, seen, {})
    elif isinstance(info, (inspect.StructType, inspect.DataclassType)):
        if info.cls not in seen:
            seen.add(info.cls)
            for field in info.fields:
                yield from _below(field.type, info.cls, field.name, "", seen, {})
    elif isinstance(info, inspect.TupleType):
        for number, one in enumerate(info.item_types):
            yield from _below(one, owner, name, f"{place}[{number}]", seen, {})
    elif type(info) in _LONG:
        title, why = notes.get("title", ""), notes.get("description", "")
        yield Field(owner, name, place, _LONG[type(info)], info.max_length, title, why)
        if isinstance(info, inspect.DictType):
            yield from _below(info.key_type, owner, name, f"{place}[key]", seen, {})
            yield from _below(info.value_type, owner, name, f"{place}[...]", seen, {})
        elif isinstance(info, (inspect.ListType, inspect.VarTupleType)):
            yield from _below(info.item_type, owner, name, f"{place}[...]", seen, {})
    elif not isinstance(info, _SHORT):
        yield Field(owner, name, place, type(info).__name__, None)


def beyond(kind: Any, value: Any) -> list[str]:
    """Return the ways to all values in *value*, decoded as a *kind*, that are longer than their bounds."""
    return list(_beyond(inspect.type_info(kind), value, ""))


def _beyond(info: Any, value: Any, place: str) -> Iterator[str]:
    if isinstance(info, inspect.Metadata):
        yield from _beyond(info.type, value, place)
    elif isinstance(info, inspect.UnionType):
        yield from _beyond(next(one for one in info.types if _is(one, value)), value, place)
    elif isinstance(info, (inspect.StructType, inspect.DataclassType)):
        for field in info.fields:
            yield from _beyond(field.type, getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(info, inspect.TupleType):
        for one, element in zip(info.item_types, value, strict=True):
            yield from _beyond(one, element, f"{place}[...]")
    elif type(info) in _LONG:
        if info.max_length is None or len(value) > info.max_length:
            yield place
        if isinstance(info, inspect.DictType):
            for key, element in value.items():
                yield from _beyond(info.key_type, key, f"{place}[key]")
                yield from _beyond(info.value_type, element, f"{place}[...]")
        elif isinstance(info, (inspect.ListType, inspect.VarTupleType)):
            for element in value:
                yield from _beyond(info.item_type, element, f"{place}[...]")


def _is(info: Any, value: Any) -> bool:
    if isinstance(info, inspect.Metadata):
        return _is(info.type, value)
    if isinstance(info, (inspect.StructType, inspect.DataclassType)):
        return type(value) is info.cls
    return type(value) is _PLAIN.get(type(info))


_PLAIN = {
    inspect.StrType: str, inspect.BytesType: bytes, inspect.IntType: int, inspect.FloatType: float,
    inspect.BoolType: bool, inspect.NoneType: type(None), inspect.ListType: list, inspect.VarTupleType: tuple,
    inspect.TupleType: tuple, inspect.DictType: dict, inspect.LiteralType: str,
}  # fmt: skip


def page() -> str:
    """Return the text of docs/reference/message-bounds.md after its title."""
    everything = {title: list(fields(kind)) for title, kind in PROTOCOLS.items()}
    kinds = sorted({(one.title, one.kind, one.most or 0, one.why) for found in everything.values() for one in found})
    lines = [
        "| bound | at most | why |", "|---|---|---|",
        *(f"| {title} | {most:,} {kind} | {why} |" for title, kind, most, why in kinds),
    ]  # fmt: skip
    shown: set[type] = set()
    for title, found in everything.items():
        lines += ["", f"## {title}", "", "| message or value | fields |", "|---|---|"]
        rows: dict[type, list[str]] = {}
        for one in found:
            if one.owner not in shown:
                rows.setdefault(one.owner, []).append(f"`{one.name}{one.place}`: {one.title}")
        lines += [f"| {owner.__name__} | {', '.join(texts)} |" for owner, texts in rows.items()]
        shown |= set(rows)
    return "\n".join(lines) + "\n"


def tagged(kind: type) -> str:
    """Return the name by which a message is recognised."""
    return str(typing.cast(Any, msgspec.inspect.type_info(kind)).tag)
