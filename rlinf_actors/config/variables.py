"""The ``env_vars`` lists: one-key mappings, each variable once."""

from __future__ import annotations

from typing import Any

from rlinf_actors.config.fields import mapping, refuse_sexagesimal, sequence
from rlinf_actors.errors import ConfigError

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
