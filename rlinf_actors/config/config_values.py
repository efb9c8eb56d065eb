"""Values that every part of the configuration uses: YAML, OmegaConf, ranks, labels, variables, and users' dataclasses.

rlinf_actors.conversion checks the fixed sections by structs. This module has what a struct cannot say: values with
several forms (node ranks, labels, ``env_vars``), numbers that YAML reads in base 60, and dataclasses of hardware types,
whose fields are checked against their annotations. Every error is a ConfigError with its config path. No function
changes the objects that its caller passes in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union

import msgspec

from rlinf_actors import config_files, conversion
from rlinf_actors.codesync.requirements import Requirements, of_file, of_list
from rlinf_actors.conversion import check_keys, join
from rlinf_actors.errors import ConfigError

# --- YAML and OmegaConf ---


class SexagesimalInt(int):
    """A number that was written as ``a:b`` without quotes in a YAML file, because YAML 1.1 reads such text in base 60.

    It is an int, since the author may have meant the number. Fields for ranks, labels and variables reject it
    (`refuse_sexagesimal`). `written` is the text in the file, and `line` its line number, from 1.
    """

    written: str
    line: int


def refuse_sexagesimal(value: Any, path: str) -> None:
    """Raise ConfigError if *value* was written as ``a:b`` without quotes, which YAML reads as a number in base 60.
    *path* is the config path of *value*.
    """
    if isinstance(value, SexagesimalInt):
        raise ConfigError(
            f"YAML reads the unquoted {value.written} (line {value.line}) as a base-60 number, {int(value)}; "
            f'quote this: "{value.written}"',
            path=path,
        )


def load_yaml(source: str | os.PathLike[str]) -> Any:
    """Return the content of the YAML file *source*. If the file cannot be read or is not valid, raise a ConfigError
    whose `path` is the path of the file.
    """
    name, text = os.fspath(source), config_files.read_text(source)
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(str(error), path=name) from error


def parse_yaml(source: str) -> Any:
    """Return the content of the YAML text *source*. Unquoted ``a:b`` becomes a SexagesimalInt. Raise ConfigError if the
    text is not valid or a key is given twice.
    """
    import yaml  # not at the top: workers import this module and read no YAML

    try:
        return yaml.load(source, Loader=_yaml_loader())  # a SafeLoader
    except RecursionError:
        raise ConfigError(f"is nested deeper than {config_files.MAX_DEPTH} levels") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"is not valid YAML: {error}") from error


@functools.cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_document(self, node: Any) -> Any:
            config_files.check_nodes(node)  # merge keys multiply values while they are constructed
            return super().construct_document(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[Any, int] = {}
            for key_node, _ in getattr(node, "value", ()):
                if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                    line = key_node.start_mark.line + 1
                    first = seen.setdefault((key_node.tag, key_node.value), line)
                    if first != line:
                        raise ConfigError(f"{key_node.value!r} is given twice, in lines {first} and {line}")
            return super().construct_mapping(node, deep=deep)

    def construct_int(loader: Any, node: Any) -> int:
        value: int = loader.construct_yaml_int(node)
        if ":" not in node.value:
            return value
        marked = SexagesimalInt(value)
        marked.written = node.value
        marked.line = node.start_mark.line + 1
        return marked

    Loader.add_constructor("tag:yaml.org,2002:int", construct_int)
    return Loader


def plain(value: Any, path: str, left: Iterator[int] | None = None) -> Any:
    """Return *value* as dicts, lists and scalars. OmegaConf containers in it, at any depth, are converted and their
    interpolations resolved.

    *path* is the config path of *value*; *left* counts down the mappings and lists that it may have. Raise ConfigError
    if it has more, is nested too deeply, or lacks a mandatory value (``???``) of OmegaConf.
    """
    omegaconf = sys.modules.get("omegaconf")  # an object of OmegaConf's can only exist if it is loaded
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ConfigError(f"OmegaConf cannot resolve it: {error}", path=path) from error
    left = itertools.count(config_files.MAX_VALUES, -1) if left is None else left
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if next(left) <= 0:  # aliases of YAML make one object that is in many places
        raise ConfigError(f"has more than {config_files.MAX_VALUES:,} values, or contains itself", path=path[:200])
    if path.count(".") + path.count("[") > 2 * config_files.MAX_DEPTH:
        raise ConfigError("is nested too deeply, or contains itself", path=path[:200])
    if isinstance(value, Mapping):
        return {key: plain(item, join(path, key), left) for key, item in value.items()}
    return [plain(item, f"{path}[{index}]", left) for index, item in enumerate(value)]


# --- forms that people write in several ways ---

_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_RANK_FORMS = 'a rank (3), ranges ("0-7,12"), "all", or a list of ranks'


def whole_number(value: Any, path: str, least: int = 0) -> int:
    """Return *value* as an int. It may also be a string of digits, because OmegaConf's ``oc.env`` yields strings. Raise
    ConfigError, with the config path *path*, if it is anything else or less than *least*.
    """
    refuse_sexagesimal(value, path)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"is {value!r}; it must be a whole number from {least} up", path=path)
    return value


def label_text(value: Any, path: str) -> str:
    """Return the label of a node group as text. *value* is text without commas or a whole number, so ``4090`` and
    ``"4090"`` are one label. Raise ConfigError, with the config path *path*, for any other value.
    """
    refuse_sexagesimal(value, path)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"is {value!r}; a label must be text or a whole number (quote it)", path=path)
    if "," in value:
        raise ConfigError(f"is {value!r}; a label cannot hold a comma, which separates labels", path=path)
    return value.strip()


def parse_labels(value: Any, path: str) -> tuple[str, ...]:
    """Return the node-group labels in *value*: one label, several in a string (``"a,b"``), or a list. *path* is the
    config path of *value*, for errors. Raise ConfigError if a label is given twice.
    """
    if isinstance(value, (list, tuple)):
        items = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        items = [(item, path) for item in (value.split(",") if isinstance(value, str) else [value])]
    labels = tuple(label_text(item, where) for item, where in items)
    if not labels:
        raise ConfigError("is an empty list; name at least one node group", path=path)
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(f"names node group {label!r} twice", path=path)
    return labels


def parse_node_ranks(value: Any, num_nodes: int, path: str) -> tuple[int, ...]:
    """Return the node ranks that *value* names, ascending.

    Args:
        value: ``3``, ``"0-7,12"``, ``all`` (0 to *num_nodes* - 1), or a list of ranks and ranges. No rank may repeat.
        num_nodes: number of nodes in the cluster.
        path: config path of *value*, for errors.

    Raises:
        ConfigError: *value* has another form, names a rank twice, or names a node that the cluster does not have.
    """
    ranks = _ranks(value, num_nodes, path)
    if not ranks:
        raise ConfigError(f"is {value!r}, which names no node; it must be {_RANK_FORMS}", path=path)
    seen: set[int] = set()
    for rank in ranks:
        if rank >= num_nodes:
            nodes = "one node: rank 0" if num_nodes == 1 else f"{num_nodes} nodes: ranks 0-{num_nodes - 1}"
            raise ConfigError(
                f"names node {rank}, but the cluster has {nodes} (num_nodes: {num_nodes}). Error parsing node_ranks",
                path=path,
            )
        if rank in seen:
            raise ConfigError(f"names node {rank} twice in {value!r}", path=path)
        seen.add(rank)
    return tuple(sorted(ranks))


def _ranks(value: Any, num_nodes: int, path: str, in_list: bool = False) -> Sequence[int]:
    refuse_sexagesimal(value, path)
    if in_list and (isinstance(value, (list, tuple)) or is_all(value)):
        raise ConfigError(f"is {value!r}; inside a list it must be a rank or ranges", path=path)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"is {value}; ranks count from 0", path=path)
        return [value]
    if is_all(value):
        return range(num_nodes)
    if isinstance(value, (list, tuple)):
        return [rank for index, item in enumerate(value) for rank in _ranks(item, num_nodes, f"{path}[{index}]", True)]
    if not isinstance(value, str):
        raise ConfigError(f"is {value!r}; it must be {_RANK_FORMS}", path=path)
    ranks: list[int] = []
    for piece in value.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ConfigError(
                f"cannot read {piece.strip()!r} in {value!r}; it must be {_RANK_FORMS}. Invalid rank format", path=path
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{first}-{last} in {value!r} runs backwards; write {last}-{first}", path=path)
        # One rank past the end is enough for the caller to refuse the range, however long it is.
        ranks += range(first, min(last, max(first, num_nodes)) + 1)
    return ranks


def is_all(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "all"


def parse_env_vars(entries: Sequence[Mapping[Any, Any]], path: str) -> dict[str, str]:
    """Return the environment variables in an ``env_vars`` list, in order. Each entry is a mapping with one key, the
    variable's name; its value is text or a number. *path* is the config path of the list, for errors.
    """
    variables: dict[str, str] = {}
    for index, entry in enumerate(entries):
        where = f"{path}[{index}]"
        if len(entry) != 1:
            raise ConfigError(
                f"has {len(entry)} keys; write one variable an entry: - {{GLOO_SOCKET_IFNAME: eth0}}. "
                "An entry must have exactly one key-value pair",
                path=where,
            )
        ((key, item),) = entry.items()
        if (wrong := config_files.wrong_variable(key)) or key != key.strip():
            raise ConfigError(wrong or f"{key!r} cannot be the name of an environment variable", path=where)
        if key in variables:
            raise ConfigError(f"{key} is set twice for the same nodes; keep one", path=where)
        where = f"{where}.{key}"
        refuse_sexagesimal(item, where)
        if isinstance(item, bool):
            text = f'YAML reads it as {item}; quote what the variable is to hold, e.g. "1" or "true"'
            raise ConfigError(text, path=where)
        if not isinstance(item, (str, int, float)):
            raise ConfigError(f"is {item!r}; the value of a variable is text or a number (quote it)", path=where)
        if wrong := config_files.wrong_variable(key, item):
            raise ConfigError(wrong, path=where)
        variables[key] = str(item)
    return variables


# --- dataclasses of hardware types ---

_SCALARS = (int, float, str, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def parse_requirements(value: Any, path: str) -> Requirements | None:
    """Return the requirements of an environment; None if *value* is None.

    *value* is a list of requirements, or the path of a requirements file on this machine. *path* is its config path,
    for errors. Raise ConfigError if it is neither.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return of_list(value, path)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"is {value!r}; it must be a list such as ['numpy>=2'], or the path of a file", path=path)
    return of_file(os.path.abspath(os.path.expanduser(value.strip())), config_files.read_text, path)


def build(cls: type, values: Mapping[Any, Any], path: str) -> Any:
    """Return ``cls(**values)`` after checking the values against the annotations of the dataclass *cls*. *path* is the
    config path of *values*.

    Only annotations made of plain types are checked: numbers, text, lists, mappings, enums, literals, dataclasses. The
    class checks everything else in its ``__post_init__``. If that raises TypeError, ValueError or AssertionError, a
    ConfigError is raised instead.
    """
    given = dict(values)
    if dataclasses.is_dataclass(cls):
        fields = [field for field in dataclasses.fields(cls) if field.init]
        try:
            check_keys(given, [field.name for field in fields], path)
        except ConfigError as error:
            unknown = {str(key) for key in given} - {field.name for field in fields}
            raise ConfigError(f"{error.args[0]}. Unknown fields '{unknown}' detected", path=error.path) from None
        try:
            hints = typing.get_type_hints(cls)
        except (NameError, TypeError):  # a name that only a type checker, or a function's scope, knows
            hints = {}
        for field in fields:
            if field.name in given:
                if given[field.name] is None and field.default is None:
                    continue  # people write `name: str = None`
                given[field.name] = convert(given[field.name], hints.get(field.name, Any), f"{path}.{field.name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"has no {field.name}, which {cls.__name__} needs", path=path)
    try:
        return cls(**given)
    except ConfigError as error:  # of a class that checks its fields: their paths are below *path*
        raise ConfigError(str(error.args[0]), path=join(path, error.path) if error.path else path) from error
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{cls.__name__} refuses it: {error}", path=path) from error


def convert(value: Any, hint: Any, path: str) -> Any:
    """Return *value* converted to the type annotation *hint*. Mappings for dataclasses become instances (`build`).
    *path* is the config path of *value*.

    A string that spells a number is accepted as a number, because OmegaConf's ``oc.env`` yields strings. If *hint* is
    not made of plain types, *value* is returned unchanged. Raise ConfigError if *value* does not fit.
    """
    if not _is_plain(hint) or _is_dataclass(type(value)):
        return value
    parts = [hint, *typing.get_args(hint)]
    if isinstance(value, Mapping):
        nested = [part for part in parts if _is_dataclass(part)]
        if len(nested) == 1:
            return build(nested[0], value, path)
    origin = typing.get_origin(hint)
    if isinstance(value, (list, tuple)) and origin in (list, tuple):
        kinds = [part for part in parts[1:] if part is not Ellipsis]
        if len(kinds) == 1:
            items = [convert(item, kinds[0], f"{path}[{index}]") for index, item in enumerate(value)]
            return tuple(items) if origin is tuple else items
    if isinstance(value, str) and not _takes_text(hint):
        with contextlib.suppress(msgspec.ValidationError):  # the strict conversion below has the better message
            return msgspec.convert(value, hint, strict=False)
    return conversion.convert(value, hint, path)


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
