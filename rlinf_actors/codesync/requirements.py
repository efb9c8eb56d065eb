"""Requirements of an environment: what env_configs lists, or a requirements file of the driver. Pure.

Nodes install them, so nothing in them may name a file of the driver: lines that include other files are resolved on the
driver, and local projects are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import msgspec

from rlinf_actors.errors import ConfigError

MAX_LINES = 2000
MAX_LINE = 2000
MAX_DEPTH = 8
_OPTIONS = (
    "-i", "--index-url", "--extra-index-url", "--no-index", "-f", "--find-links", "--pre", "--prefer-binary",
    "--no-binary", "--only-binary", "--trusted-host", "--require-hashes", "--hash",
)  # fmt: skip
_INCLUDES = ("-r", "--requirement", "-c", "--constraint")
_OPTION = re.compile(r"(-[A-Za-z]|--[A-Za-z-]+)(?:\s+|=|$)\s*(.*)", re.DOTALL)
_LOCAL = re.compile(r"(\.{1,2}(/|$)|~)")


class Requirements(msgspec.Struct, frozen=True):
    """What an environment has in addition to its interpreter's packages.

    Attributes:
        lines: requirements and options of pip, in their order.
        constraints: the lines of constraint files.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lines)


def of_list(given: Sequence[object], path: str) -> Requirements:
    """Return the requirements that a configuration lists. *path* is their config path, for errors.

    Raise ConfigError if an entry cannot be one.
    """
    lines = []
    for index, entry in enumerate(given):
        where = f"{path}[{index}]"
        if not isinstance(entry, str) or len(entry.strip().splitlines()) != 1 or entry.lstrip().startswith("#"):
            raise ConfigError(f"is {entry!r}; it must be a requirement such as 'numpy>=2'", path=where)
        option = _OPTION.match(entry.strip())
        if option is not None and option[1] in _INCLUDES:
            raise ConfigError(f"is {entry!r}: to use a file, write requirements: PATH", path=where)
        lines.append(_checked(entry.strip(), where))
    return _bounded(lines, (), path)


def of_file(name: str, read: Callable[[str], str], path: str) -> Requirements:
    """Return the requirements in the file *name* and in the files that it includes.

    Args:
        name: absolute path of the file on the driver.
        read: returns the text of a file; raises ConfigError.
        path: config path, for errors.

    Raises:
        ConfigError: a file cannot be read, or a line cannot be sent to nodes.
    """
    lines: list[str] = []
    constraints: list[str] = []
    _read_into(lines, constraints, name, read, path, 0)
    return _bounded(lines, constraints, path)


def _read_into(
    lines: list[str], constraints: list[str], name: str, read: Callable[[str], str], path: str, depth: int
) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} is included by {MAX_DEPTH} files, perhaps by itself", path=path)
    try:
        text = read(name)
    except ConfigError as error:
        raise ConfigError(f"the requirements file {error}", path=path) from None
    for number, line in enumerate(_logical(text), 1):
        option = _OPTION.match(line)
        if option is None or option[1] not in _INCLUDES:
            lines.append(_checked(line, f"{path}: {name}, entry {number}"))
            continue
        inner = os.path.normpath(os.path.join(os.path.dirname(name), option[2].strip()))
        if option[1] in ("-c", "--constraint"):
            _read_into(constraints, constraints, inner, read, path, depth + 1)
        else:
            _read_into(lines, constraints, inner, read, path, depth + 1)


def _logical(text: str) -> list[str]:
    """Return the lines of a requirements file without comments, each continued line as one."""
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _checked(line: str, where: str) -> str:
    if len(line) > MAX_LINE or "\0" in line:
        raise ConfigError(f"begins with {line[:60]!r} and is too long to be a requirement", path=where)
    option = _OPTION.match(line)
    if line.startswith("-"):
        if option is None or option[1] not in _OPTIONS:
            raise ConfigError(
                f"is {line!r}, which cannot be sent to nodes: publish the project as a package, or send its code by "
                "cluster.runtime.working_dir",
                path=where,
            )
        if option[1] in ("-f", "--find-links") and _LOCAL.match(option[2]):
            raise ConfigError(f"is {line!r}: nodes need an absolute path or a URL", path=where)
        return line
    if _LOCAL.match(line) or re.search(r"@\s*file:\s*(//)?\.", line):
        raise ConfigError(
            f"is {line!r}, a directory of the driver: publish it as a package, or send its code by "
            "cluster.runtime.working_dir",
            path=where,
        )
    return line


def _bounded(lines: Sequence[str], constraints: Sequence[str], path: str) -> Requirements:
    if len(lines) + len(constraints) > MAX_LINES:
        raise ConfigError(f"has more than {MAX_LINES:,} lines", path=path)
    return Requirements(tuple(lines), tuple(constraints))
