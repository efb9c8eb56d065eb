"""A dataclass instance from a mapping of the configuration, its fields checked against their annotations.

Only annotations made of plain types (numbers, text, lists, mappings, enums, literals, dataclasses) are checked;
what else a class wants is for its ``__post_init__`` to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec

from rlinf_actors.config.fields import check_keys, join
from rlinf_actors.errors import ConfigError

_SCALARS = (int, float, str, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def build(cls: type, values: Mapping[Any, Any], path: str) -> Any:
    """``cls(**values)``, checked.

    Raises:
        ConfigError: an unknown, missing or ill-typed field, or the class refuses the values with a
            TypeError, ValueError or AssertionError.
    """
    given = dict(values)
    if dataclasses.is_dataclass(cls):
        fields = [field for field in dataclasses.fields(cls) if field.init]
        check_keys(given, [field.name for field in fields], path)
        hints = _hints(cls)
        for field in fields:
            if field.name in given:
                if given[field.name] is None and field.default is None:
                    continue  # people write `name: str = None`
                given[field.name] = convert(given[field.name], hints.get(field.name, Any), f"{path}.{field.name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"has no {field.name}, which {cls.__name__} needs", path=path)
    try:
        return cls(**given)
    except ConfigError as error:  # of a class that checks its fields: they are below *path*
        raise ConfigError(str(error.args[0]), path=join(path, error.path) if error.path else path) from error
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{cls.__name__} refuses it: {error}", path=path) from error


def convert(value: Any, hint: Any, path: str) -> Any:
    """*value* as *hint* wants it: an int may stand for a float, a list for a tuple, a value for its enum member.

    A number in a string counts as a number, as OmegaConf's ``oc.env`` gives those.

    Raises:
        ConfigError: it is something else; ``path`` leads to the part that is.
    """
    if not _is_plain(hint):
        return value
    if isinstance(value, Mapping):
        nested = [part for part in (hint, *typing.get_args(hint)) if _is_dataclass(part)]
        if len(nested) == 1:
            return build(nested[0], value, path)
    if isinstance(value, (list, tuple)) and typing.get_origin(hint) in (list, tuple):
        kinds = [part for part in typing.get_args(hint) if part is not Ellipsis]
        if len(kinds) == 1:
            items = [convert(item, kinds[0], f"{path}[{index}]") for index, item in enumerate(value)]
            return tuple(items) if typing.get_origin(hint) is tuple else items
    if _is_dataclass(type(value)):
        return value
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        if isinstance(value, str) and not _takes_text(hint):
            with contextlib.suppress(msgspec.ValidationError):  # the strict message below says it better
                return msgspec.convert(value, hint, strict=False)
        problem, _, where = str(error).partition(" - at `$")
        reason = problem.replace("`", "")
        quote = " (in YAML, quote it)" if reason in ("Expected str, got int", "Expected str, got float") else ""
        raise ConfigError(
            f"is {_part(value, where)!r}; {reason[:1].lower()}{reason[1:]}{quote}", path=f"{path}{where.rstrip('`')}"
        ) from None


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):  # a name that only a type checker, or a function's scope, knows
        return {}


def _is_plain(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin is Union or origin is types.UnionType or origin in _CONTAINERS:
        return all(part is Ellipsis or _is_plain(part) for part in typing.get_args(hint))
    if not isinstance(hint, type):
        return hint is Any
    return hint in _SCALARS or hint in _CONTAINERS or issubclass(hint, enum.Enum) or _is_dataclass(hint)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _takes_text(hint: Any) -> bool:
    return hint in (str, Any) or any(_takes_text(part) for part in typing.get_args(hint))


def _part(value: Any, where: str) -> Any:
    """The element of a list that msgspec's path ``[2]`` means; the whole for any other path."""
    index = where.rstrip("`").strip("[]")
    return value[int(index)] if index.isdigit() and isinstance(value, (list, tuple)) else value
