"""A dataclass instance from a mapping of the configuration, its fields checked against their annotations.

Only annotations made of plain types (numbers, text, lists, mappings, enums, literals, dataclasses) are checked;
what else a class wants is for its ``__post_init__`` to say.

Small checks that every part of the configuration uses; each error carries its config path.

Node ranks as people write them: ``3``, ``"0-7,12"``, ``all``, or a list of those.

The ``env_vars`` lists: one-key mappings, each variable once.

The mark on numbers that YAML read in base 60. Apart from the YAML loader, which workers never need.

YAML as PyYAML's safe loader reads it, less two traps: ``1:0`` is not silently 60, and no key is given twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union

import msgspec

from rlinf_actors.errors import ConfigError


class SexagesimalInt(int):
    """A number that was written ``a:b`` without quotes: YAML 1.1 reads those in base 60.

    It stays usable as the number, since in another part of the file it may be meant; whoever expects
    ranks refuses it.

    Attributes:
        written: how the file has it.
        line: line in the file, from 1.
    """

    written: str
    line: int


def plain(value: Any, path: str) -> Any:
    """*value* with OmegaConf containers, at any depth, turned into dicts and lists, interpolations resolved.

    Raises:
        ConfigError: an interpolation cannot be resolved or a mandatory value (``???``) is missing.
    """
    omegaconf = sys.modules.get("omegaconf")  # an object of OmegaConf's can only exist if it is loaded
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ConfigError(f"OmegaConf cannot resolve it: {error}", path=path) from error
    if isinstance(value, Mapping):
        return {key: plain(item, join(path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def join(path: str, key: object) -> str:
    """The config path of *key* inside *path*."""
    return f"{path}.{key}" if path else str(key)


def nearest(name: object, known: Iterable[str]) -> str:
    """The one of *known* that looks most like *name*; "" if there is none."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
    return found[0] if found else ""


def check_keys(section: Mapping[Any, Any], known: Sequence[str], path: str) -> None:
    """Refuse keys that are not *known*.

    Raises:
        ConfigError: names the first such key and the nearest one that exists.
    """
    for key in section:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r}; did you mean {nearest(key, known)!r}? Valid keys: {', '.join(known)}",
                path=join(path, key),
            )


def mapping(value: Any, path: str, example: str) -> Mapping[Any, Any]:
    """*value*, which must be a mapping.

    Raises:
        ConfigError: it is something else; the message shows *example*.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"is {value!r}; it must be a mapping such as {example}", path=path)
    return value


def sequence(value: Any, path: str, example: str) -> list[Any]:
    """*value*, which must be a list.

    Raises:
        ConfigError: it is something else; the message shows *example*.
    """
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"is {value!r}; it must be a list such as {example}", path=path)
    return list(value)


def flag(value: Any, path: str) -> bool:
    """*value*, which must be true or false.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"is {value!r}; it must be true or false", path=path)
    return value


def whole_number(value: Any, path: str, least: int = 0) -> int:
    """*value* as an int of at least *least*; digits in a string count, as OmegaConf's ``oc.env`` gives those.

    Raises:
        ConfigError: it is no whole number, too small, or was written like ``1:0``.
    """
    refuse_sexagesimal(value, path)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"is {value!r}; it must be a whole number from {least} up", path=path)
    return value


def text(value: Any, path: str, what: str) -> str:
    """*value*, which must be a non-empty string; *what* names it in the message.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"is {value!r}; it must be {what}", path=path)
    return value.strip()


def label_text(value: Any, path: str) -> str:
    """A node group's label: a string, or a whole number (``4090`` and ``"4090"`` are one label).

    Raises:
        ConfigError: it is something else, or holds a comma (which separates labels elsewhere).
    """
    refuse_sexagesimal(value, path)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"is {value!r}; a label must be text or a whole number (quote it)", path=path)
    if "," in value:
        raise ConfigError(f"is {value!r}; a label cannot hold a comma, which separates labels", path=path)
    return value.strip()


def refuse_sexagesimal(value: Any, path: str) -> None:
    """Refuse a number that was written ``a:b``, which YAML reads in base 60.

    Raises:
        ConfigError: says to quote it.
    """
    if isinstance(value, SexagesimalInt):
        raise ConfigError(
            f"YAML reads the unquoted {value.written} (line {value.line}) as a base-60 number, {int(value)}; "
            f'quote this: "{value.written}"',
            path=path,
        )


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


_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_FORMS = 'a rank (3), ranges ("0-7,12"), "all", or a list of ranks'


def parse_node_ranks(value: Any, num_nodes: int, path: str) -> tuple[int, ...]:
    """The ranks that *value* names, ascending; ``all`` is 0 to *num_nodes* - 1.

    Raises:
        ConfigError: the form is none of those above, a rank repeats or is not below *num_nodes*.
    """
    ranks = _collect(value, num_nodes, path)
    if not ranks:
        raise ConfigError(f"is {value!r}, which names no node; it must be {_FORMS}", path=path)
    seen: set[int] = set()
    for rank in ranks:
        if rank >= num_nodes:
            nodes = "one node: rank 0" if num_nodes == 1 else f"{num_nodes} nodes: ranks 0-{num_nodes - 1}"
            raise ConfigError(f"names node {rank}, but the cluster has {nodes} (num_nodes: {num_nodes})", path=path)
        if rank in seen:
            raise ConfigError(f"names node {rank} twice in {value!r}", path=path)
        seen.add(rank)
    return tuple(sorted(ranks))


def _collect(value: Any, num_nodes: int, path: str) -> Sequence[int]:
    refuse_sexagesimal(value, path)
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"is {value!r}; it must be {_FORMS}", path=path)
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"is {value}; ranks count from 0", path=path)
        return [value]
    if isinstance(value, str):
        if value.strip().lower() == "all":
            return range(num_nodes)
        return [rank for piece in value.split(",") for rank in _range(piece, num_nodes, value, path)]
    if isinstance(value, (list, tuple)):
        return [rank for index, item in enumerate(value) for rank in _item(item, num_nodes, f"{path}[{index}]")]
    raise ConfigError(f"is {value!r}; it must be {_FORMS}", path=path)


def _item(value: Any, num_nodes: int, path: str) -> Sequence[int]:
    if isinstance(value, (list, tuple)) or (isinstance(value, str) and value.strip().lower() == "all"):
        raise ConfigError(f"is {value!r}; inside a list it must be a rank or ranges", path=path)
    return _collect(value, num_nodes, path)


def _range(piece: str, num_nodes: int, whole: str, path: str) -> range:
    match = _RANGE.fullmatch(piece)
    if match is None:
        raise ConfigError(f"cannot read {piece.strip()!r} in {whole!r}; it must be {_FORMS}", path=path)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"{first}-{last} in {whole!r} runs backwards; write {last}-{first}", path=path)
    # Stop one past the end: enough for the caller to refuse it, however long the range is.
    return range(first, min(last, max(first, num_nodes)) + 1)


_EXAMPLE = "{GLOO_SOCKET_IFNAME: eth0}"


def parse_env_vars(value: Any, path: str) -> dict[str, str]:
    """The variables of an ``env_vars`` list, in order.

    Raises:
        ConfigError: an entry is not a mapping with one key, a key repeats, or a value is no text or number.
    """
    variables: dict[str, str] = {}
    for index, raw in enumerate(sequence([] if value is None else value, path, f"[{_EXAMPLE}]")):
        where = f"{path}[{index}]"
        entry = mapping(raw, where, _EXAMPLE)
        if len(entry) != 1:
            raise ConfigError(f"has {len(entry)} keys; write one variable an entry: - {_EXAMPLE}", path=where)
        ((key, item),) = entry.items()
        if not isinstance(key, str) or not key or "=" in key or "\0" in key or key != key.strip():
            raise ConfigError(f"{key!r} cannot be the name of an environment variable", path=where)
        if key in variables:
            raise ConfigError(f"{key} is set twice for the same nodes; keep one", path=where)
        variables[key] = _value(item, f"{where}.{key}")
    return variables


def _value(item: Any, path: str) -> str:
    refuse_sexagesimal(item, path)
    if isinstance(item, bool):
        raise ConfigError(f'YAML reads it as {item}; quote what the variable is to hold, e.g. "1" or "true"', path=path)
    if not isinstance(item, (str, int, float)):
        raise ConfigError(f"is {item!r}; the value of a variable is text or a number (quote it)", path=path)
    if isinstance(item, str) and "\0" in item:
        raise ConfigError("holds a NUL byte, which no environment can", path=path)
    return str(item)


def _construct_int(loader: Any, node: Any) -> int:
    value: int = loader.construct_yaml_int(node)
    if ":" not in node.value:
        return value
    marked = SexagesimalInt(value)
    marked.written = node.value
    marked.line = node.start_mark.line + 1
    return marked


@functools.cache
def _yaml_loader() -> Any:
    """Return PyYAML's safe loader, which marks numbers such as ``1:0`` and refuses duplicate keys."""
    import yaml  # not at the top: workers import this module and never read YAML

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[Any, int] = {}
            for key_node, _ in getattr(node, "value", ()):
                if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                    line = key_node.start_mark.line + 1
                    first = seen.setdefault((key_node.tag, key_node.value), line)
                    if first != line:
                        raise ConfigError(f"{key_node.value!r} is given twice, in lines {first} and {line}")
            return super().construct_mapping(node, deep=deep)

    Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    return Loader


def load_yaml(source: str | os.PathLike[str]) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: it cannot be read or is not YAML; ``path`` is the file's.
    """
    name = os.fspath(source)
    try:
        with open(name, encoding="utf-8") as file:
            return parse_yaml(file.read())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", path=name) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", path=name) from error
    except ConfigError as error:
        raise ConfigError(str(error), path=name) from error


def parse_yaml(source: str) -> Any:
    """What YAML text says.

    Raises:
        ConfigError: it is not YAML, or a mapping has a key twice.
    """
    import yaml

    try:
        return yaml.load(source, Loader=_yaml_loader())  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"is not valid YAML: {error}") from error
