"""Small checks that every part of the configuration uses; each error carries its config path."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlinf_actors.config.sexagesimal import SexagesimalInt
from rlinf_actors.errors import ConfigError


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
