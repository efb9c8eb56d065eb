"""Reads configuration files within bounds: no file makes a process wait, or use its memory up.

A FIFO or a device is refused before it is read. TOML and YAML are bounded in bytes, levels and values, because aliases
of YAML multiply values, and the time of TOML's dotted keys grows with the square of their parts. Any thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

from rlinf_actors.errors import ConfigError

MAX_BYTES = 1 << 20
"""Most bytes of a configuration file."""
MAX_DEPTH = 64
"""Most levels of tables, mappings and lists in a configuration file."""
MAX_VALUES = 100_000
"""Most values in a configuration file, with those of aliases counted at each place."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open the file *path* for reading. Nothing blocks.

    Raises:
        ConfigError: it is a FIFO, a device or a directory.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO waits for its writer
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError("is not a regular file", path=os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "rb")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of the configuration file *path*.

    Raises:
        ConfigError: it cannot be read, is no regular file, is too long, or is not UTF-8.
    """
    where = os.fspath(path)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", path=where) from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot be read: {error}", path=ascii(where)) from None  # a NUL byte in the path
    if len(data) > MAX_BYTES:
        raise ConfigError(f"has more than {MAX_BYTES:,} bytes", path=where)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", path=where) from None


def check_nodes(node: Any) -> None:
    """Raise ConfigError if *node*, the root of a YAML document, has too many levels or values, or contains itself.

    A node that has several aliases counts at each place.
    """
    counted: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def count(node: Any) -> tuple[int, int]:
        """Return how many values and levels there are at *node*."""
        if not isinstance(node.value, list):
            return 1, 1
        known = counted.get(id(node))
        if known is not None:
            return known
        if id(node) in open_nodes:
            raise ConfigError(f"line {node.start_mark.line + 1} contains itself, by an alias")
        open_nodes.add(id(node))
        below = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        found = [count(part) for part in below]
        values, levels = 1 + sum(size for size, _ in found), 1 + max((deep for _, deep in found), default=0)
        line = node.start_mark.line + 1
        if values > MAX_VALUES:
            raise ConfigError(f"has more than {MAX_VALUES:,} values at line {line}, with those of its aliases")
        if levels > MAX_DEPTH:
            raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels at line {line}")
        open_nodes.discard(id(node))
        counted[id(node)] = values, levels
        return values, levels

    if node is not None:
        count(node)


def wrong_variable(name: object, value: object = "") -> str:
    """Return why an environment cannot have the variable *name* with this *value*; "" if it can."""
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        return f"{ascii(name)[:100]} cannot be the name of an environment variable: it is text without '=' and NUL"
    if isinstance(value, str) and "\0" in value:
        return f"{name[:100]} holds a NUL byte, which no environment can"
    return ""


def check_variables(variables: Mapping[Any, Any], path: str) -> None:
    """Raise ConfigError, with the place *path*, if an environment cannot have one of *variables*."""
    for name, value in variables.items():
        if wrong := wrong_variable(name, value):
            raise ConfigError(wrong, path=path)
