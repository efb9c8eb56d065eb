"""Convert values from files, options and environment variables to typed values. A wrong value raises ConfigError.

The ``cluster:`` section, agentd.toml, the client file and the environment variables are converted here, by
msgspec.convert. The error names the place of the fault, the value given, the form expected, and for an unknown key the
nearest known one. The expected form is the description of the field's `msgspec.Meta`, else a phrase for its type. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rlinf_actors.errors import ConfigError

if TYPE_CHECKING:
    from msgspec import inspect

T = TypeVar("T")

_STEP = re.compile(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]")
"""A step of the path in msgspec's messages, such as ``$.node_groups[0].label``."""


def convert(value: Any, kind: type[T], path: str, *, strict: bool = True) -> T:
    """Return *value* as an instance of *kind*, which may be any type that msgspec.convert takes.

    Args:
        value: plain values: mappings, lists, text, numbers, booleans, None.
        kind: the expected type.
        path: place of *value*, for errors: a config path, a variable, or a file followed by ``": "``.
        strict: if False, text such as "3" or "true" is also accepted for a number or a truth value.

    Raises:
        ConfigError: *value* does not fit *kind*. ``path`` of the error is the place of the part that does not fit.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        from msgspec import inspect

        raise _fault(value, inspect.type_info(kind), path, str(error)) from None


def join(path: str, key: object) -> str:
    """Return, for errors, the place of *key* in the section at *path*: ``cluster.num_nodes`` for ``cluster`` and
    ``num_nodes``.
    """
    return f"{path}.{key}" if path and not path.endswith(": ") else f"{path}{key}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the name in *known* that is most similar to *name*, "" if *known* is empty."""
    import difflib  # here and below: an emergency stop imports this module, and must start at once

    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
    return found[0] if found else ""


def check_keys(section: Mapping[Any, Any], known: Sequence[str], path: str) -> None:
    """Raise ConfigError if a key of *section* is not in *known*. *path* is the place of *section*, for the error."""
    for key in section:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r}; did you mean {nearest(key, known)!r}? Valid keys: {', '.join(known)}",
                path=join(path, key),
            )


def _fault(value: Any, info: inspect.Type, path: str, message: str) -> ConfigError:
    """Return the ConfigError for a value that msgspec could not convert. The error names the part of the value that is
    wrong.

    Args:
        value: the whole value.
        info: the type that the whole value should have.
        path: place of the whole value.
        message: text of msgspec's error.
    """
    from msgspec import inspect

    _, _, where = message.partition("`$")
    for key, index in _STEP.findall(where):
        info = _choose(info, value)
        if isinstance(info, (inspect.StructType, inspect.DataclassType)):
            info = next(field.type for field in info.fields if field.encode_name == key)
            value, path = value[key], join(path, key)
        elif isinstance(info, inspect.DictType):  # msgspec does not name the key
            if not isinstance(info.value_type, inspect.StrType):
                break
            key = next(name for name, item in value.items() if not isinstance(item, str))
            info, value, path = info.value_type, value[key], join(path, key)
        elif isinstance(info, inspect.TupleType):
            info, value, path = info.item_types[int(index)], value[int(index)], f"{path}[{index}]"
        else:
            info, value, path = info.item_type, value[int(index)], f"{path}[{index}]"  # type: ignore[attr-defined]
    shape = _choose(info, value)
    if isinstance(shape, (inspect.StructType, inspect.DataclassType)) and isinstance(value, Mapping):
        names = [field.encode_name for field in shape.fields]
        try:
            check_keys(value, names, path)
        except ConfigError as error:
            return error
        lacking = next(field.encode_name for field in shape.fields if field.required and field.encode_name not in value)
        return ConfigError(f"has no {lacking}; it must be {_expected(info)}", path=path)
    quote = " (quote it)" if isinstance(shape, inspect.StrType) and isinstance(value, (bool, int, float)) else ""
    return ConfigError(f"is {value!r}; it must be {_expected(info)}{quote}", path=path)


def _choose(info: inspect.Type, value: Any) -> inspect.Type:
    """Return the type that msgspec compared *value* with, where the type *info* allows several.

    For a union this is the member that matches *value* best; for an annotated type it is the type without metadata.
    """
    from msgspec import inspect

    if isinstance(info, inspect.Metadata):
        return _choose(info.type, value)
    if not isinstance(info, inspect.UnionType):
        return info
    members = [_choose(each, value) for each in info.types if not isinstance(each, inspect.NoneType)]
    mappings = (inspect.StructType, inspect.DataclassType, inspect.DictType)
    if isinstance(value, (Mapping, list, tuple)):
        wanted = isinstance(value, Mapping)
        members = [each for each in members if isinstance(each, mappings) == wanted] or members
    return members[0]


def _expected(info: inspect.Type) -> str:
    """Return a phrase that describes the values of a type, such as "a whole number". It follows
    "it must be" in errors.
    """
    from msgspec import inspect

    phrases: dict[type, str] = {
        inspect.BoolType: "true or false",
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.StrType: "a text",
        inspect.TupleType: "a list",
    }
    plurals: dict[type, str] = {
        inspect.IntType: "whole numbers",
        inspect.FloatType: "numbers",
        inspect.StrType: "texts",
        inspect.StructType: "mappings",
        inspect.DataclassType: "mappings",
    }

    if isinstance(info, inspect.Metadata):
        return str((info.extra_json_schema or {}).get("description") or _expected(info.type))
    if isinstance(info, inspect.UnionType):
        return " or ".join(_expected(each) for each in info.types if not isinstance(each, inspect.NoneType))
    if isinstance(info, inspect.LiteralType):
        return f"one of {', '.join(map(str, info.values))}"
    if isinstance(info, inspect.EnumType):
        return f"one of {', '.join(str(member.value) for member in info.cls)}"
    if isinstance(info, inspect.IntType) and info.ge is not None:
        return f"a whole number from {info.ge} up"
    if isinstance(info, inspect.DictType):
        plural = plurals.get(type(info.value_type))
        return f"a mapping to {plural}" if plural else "a mapping"
    item = getattr(info, "item_type", None)
    if item is not None:
        return f"a list of {plurals.get(type(item), 'values')}"
    return phrases.get(type(info), "a mapping")
