"""YAML as PyYAML's safe loader reads it, less two traps: ``1:0`` is not silently 60, and no key is given twice."""

from __future__ import annotations

import os
from typing import Any

import yaml

from rlinf_actors.config.config_values import SexagesimalInt
from rlinf_actors.errors import ConfigError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: dict[Any, int] = {}
        for key_node, _ in getattr(node, "value", ()):
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                first = seen.setdefault((key_node.tag, key_node.value), line)
                if first != line:
                    raise ConfigError(f"{key_node.value!r} is given twice, in lines {first} and {line}")
        return super().construct_mapping(node, deep=deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    value: int = loader.construct_yaml_int(node)
    if ":" not in node.value:
        return value
    marked = SexagesimalInt(value)
    marked.written = node.value
    marked.line = node.start_mark.line + 1
    return marked


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


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
    try:
        return yaml.load(source, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"is not valid YAML: {error}") from error
