"""Decoding of long control messages in steps, so that the head serves others in between. Pure.

msgspec takes 10 to 80 ns for each byte of a message of short values: 8 MiB would hold the head for half a second. A
long message is therefore taken apart first, in one pass in which msgspec skips over values in up to 3 ns a byte and
returns them undecoded: the fields of the message, and the elements of its lists, if these are no longer than allowed.
Then the elements are decoded, STEP bytes of them between two yields. The result and the errors are those of
`control_codec.decode`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Raw

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.bounds import too_long
from rlinf_actors.wire.control_codec import Body, BoundError, Envelope, Notice, Request, _Tag, number_of, verb_of
from rlinf_actors.wire.protocol import MALFORMED, MAX_ASKED_BYTES

WHOLE = 1 << 16
"""Most bytes that are decoded at once."""
STEP = 1 << 15
"""Bytes of elements that are decoded between two yields; ELEMENT more count for each."""
ELEMENT = 16
_Fields = Annotated[dict[str, Raw], Meta(max_length=64)]
_NONE = Raw()
"""Of a field that a message does not have."""


def decode_in_steps(data: bytes) -> Generator[None, None, Envelope]:
    """Decode a Request or Notice that `control_codec.encode` has made; yield when others may have their turn.

    Raises:
        BoundError: a value is too long. The sender can be told so.
        RemoteWireError: *data* is no valid Request or Notice.
    """
    verb = verb_of(data).decode(errors="replace")
    if len(data) > MAX_ASKED_BYTES:
        raise BoundError(f"it has {len(data):,} bytes, and may have {MAX_ASKED_BYTES:,}", verb, number_of(data))
    kind = _bodies().get(verb)
    if kind is None:
        raise RemoteWireError("not a control message: it is of no known kind")
    try:
        outline = _decoder(_outline_of(kind))(data)
        if outline.type not in ("req", "not") or (outline.type == "req") != (outline.id is not None):
            raise RemoteWireError(f"not a control message: a long {outline.type!r}")
        yield
        found = ((name, getattr(outline.body, name)) for name in outline.body.__struct_fields__)
        fields = {name: value for name, value in found if value is not _NONE}
        body = yield from _struct(fields, kind, ".body")
    except MALFORMED as error:
        bound = too_long(verb, str(error))
        if bound is not None:
            raise BoundError(bound, verb, number_of(data)) from None
        raise RemoteWireError(f"not a control message: {error}") from None
    return Request(outline.id, body) if outline.id is not None else Notice(body)


@functools.cache
def _outline_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of an envelope with a *kind* of which no value is decoded."""
    fields = [(one.encode_name, _undecoded(one.type), _NONE) for one in msgspec.structs.fields(kind)]
    body = msgspec.defstruct("Body", fields)
    return msgspec.defstruct("Outline", [("type", str), ("body", body), ("id", Union[int, None], None)])


def _undecoded(kind: Any) -> Any:
    """Return Raw, or a bounded list of Raw for a list."""
    base, meta = get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)
    if _is_list(base) and meta is not None:
        return Annotated[list[Raw], Meta(max_length=meta.max_length)]
    return Raw


def _is_list(base: Any) -> bool:
    return get_origin(base) in (list, tuple) and get_args(base)[1:] in ((), (...,))


def _value(raw: Raw, kind: Any, at: str) -> Generator[None, None, Any]:
    base, meta = get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, None)
    choices = [one for one in get_args(base) if one is not type(None)] if _is_union(base) else []
    if memoryview(raw).nbytes > WHOLE:
        if len(choices) > 1 and all(_is_struct(one) for one in choices):
            tag = _leaf(raw, _Tag, at).type
            choices = [one for one in choices if one.__struct_config__.tag == tag]
        if len(choices) == 1:
            return (yield from _value(raw, choices[0], at))
        if _is_struct(base) and not base.__struct_config__.array_like:
            fields = _leaf(raw, _Fields, at)
            yield
            return (yield from _struct(fields, base, at))
        if _is_list(base) and meta is not None:
            elements = _leaf(raw, Annotated[list[Raw], Meta(max_length=meta.max_length)], at)
            yield
            return (yield from _list(elements, base, at))
    return _leaf(raw, kind, at)


def _struct(fields: Mapping[str, Raw | list[Raw]], kind: type[msgspec.Struct], at: str) -> Generator[None, None, Any]:
    values = {}
    for field in msgspec.structs.fields(kind):
        found, place = fields.get(field.encode_name), f"{at}.{field.encode_name}"
        if isinstance(found, list):
            base = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
            values[field.name] = yield from _list(found, base, place)
        elif found is not None:
            values[field.name] = yield from _value(found, field.type, place)
        elif field.required:
            raise msgspec.ValidationError(f"Object missing required field `{field.encode_name}` - at `${at}`")
    return kind(**values)


def _list(elements: list[Raw], base: Any, at: str) -> Generator[None, None, Any]:
    """Decode the elements of a list or tuple of the type *base*."""
    kind = get_args(base)[0]
    done, taken, decode = [], 0, _decoder(kind)
    for number, element in enumerate(elements):
        size = memoryview(element).nbytes
        if size > WHOLE:
            done.append((yield from _value(element, kind, f"{at}[{number}]")))
        else:
            try:
                done.append(decode(element))
            except msgspec.ValidationError:
                _leaf(element, kind, f"{at}[{number}]")  # its error has the place
        taken += size + ELEMENT
        if taken >= STEP:
            taken = 0
            yield
    return done if get_origin(base) is list else tuple(done)


def _leaf(raw: Raw, kind: Any, at: str) -> Any:
    try:
        return _decoder(kind)(raw)
    except msgspec.ValidationError as error:
        text, begin, place = str(error).rpartition("`$")
        raise msgspec.ValidationError(f"{text}`${at}{place}" if begin else f"{place} - at `${at}`") from None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, getattr(types, "UnionType", Union))


@functools.cache
def _decoder(kind: Any) -> Callable[[bytes | memoryview | Raw], Any]:
    return msgspec.msgpack.Decoder(kind).decode


@functools.cache
def _bodies() -> dict[str, type[msgspec.Struct]]:
    return {str(kind.__struct_config__.tag): kind for kind in get_args(Body)}
