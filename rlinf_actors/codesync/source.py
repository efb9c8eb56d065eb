"""Which directory of the driver is sent as code: from the configuration and RLINF_CODE_WORKING_DIR. Reads the disk.

`find_source` runs once, when a Cluster starts. `CodeSource.placed` then says, for each launch, which directories of the
driver have a copy on the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import msgspec
from msgspec.structs import replace

from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import CODE_WORKING_DIR

CONFIG_PATH = "cluster.runtime.working_dir"
OFF = ("0", "false", "off", "no")
AUTO = "auto"
DEFAULT_FILE_BYTES = 16 << 20
_PROJECT = "pyproject.toml"
_PACKAGE = "__init__.py"
_RLINF = "rlinf"


class CodeSource(msgspec.Struct, frozen=True):
    """The code of a driver that its workers run.

    Attributes:
        root: directory, without symbolic links; paths in the tree are relative to it.
        only: the entries of *root* that are sent; empty to send all.
        excludes: patterns of files and directories that are not sent, beside the default ones (codesync.code_scan).
        file_bytes: size of the largest file that is sent.
        asked_by: the key or variable that names the directory, for errors.
    """

    root: str
    only: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    file_bytes: int = DEFAULT_FILE_BYTES
    asked_by: str = CONFIG_PATH

    def placed(self, path: str, copy: str, directories: Collection[str]) -> str | None:
        """Return the directory below *copy* that is the copy of the driver's directory *path*; None if it has none.

        *directories* are the directories that were sent, relative to the root, with "" for the root.
        """
        inside = self._inside(path)
        if inside is None or inside not in directories:
            return None
        return f"{copy}/{inside}" if inside else copy

    def holds(self, path: str) -> bool:
        """Return True if the directory *path* was sent as a whole, apart from excluded files."""
        inside = self._inside(path)
        return inside is not None and (not self.only or inside.partition("/")[0] in self.only)

    def _inside(self, path: str) -> str | None:
        if path == self.root:
            return ""
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root.rstrip('/')}/") else None


def find_source(
    working_dir: str | None,
    variable: str | None,
    excludes: Sequence[str] = (),
    file_bytes: int = DEFAULT_FILE_BYTES,
    *,
    find: Callable[[str], ModuleSpec | None] = find_spec,
) -> CodeSource | None:
    """Return the code that workers of this driver run, None if each node has its own code.

    Args:
        working_dir: ``cluster.runtime.working_dir``.
        variable: RLINF_CODE_WORKING_DIR, which has precedence: a directory, "auto", or "0" for off.
        excludes, file_bytes: from ``cluster.runtime``.
        find: finds a module without importing it.

    Raises:
        ConfigError: the directory does not exist, or "auto" finds none.
    """
    asked = (variable or "").strip()
    if asked.lower() in OFF:
        return None
    if not asked:
        found = None if working_dir is None else _directory(working_dir, CONFIG_PATH)
    elif asked.lower() == AUTO:
        found = _of_project(_project(find))
    else:
        if not os.path.isabs(os.path.expanduser(asked)):
            raise ConfigError(f"is {asked!r}; it must be auto, an absolute path, or 0 for off", path=CODE_WORKING_DIR)
        found = _of_project(_directory(asked, CODE_WORKING_DIR))
    return None if found is None else replace(found, excludes=tuple(excludes), file_bytes=file_bytes)


def _directory(given: str, asked_by: str) -> CodeSource:
    path = os.path.realpath(os.path.expanduser(given))
    if not os.path.isdir(path):
        raise ConfigError(f"is {given!r}, and {path} is not a directory on this machine", path=asked_by)
    if path in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise ConfigError(f"is {path}, which is more than a directory of code: name the project's own", path=asked_by)
    return CodeSource(path, asked_by=asked_by)


def _of_project(found: CodeSource) -> CodeSource:
    """Return what to send of the directory that RLINF_CODE_WORKING_DIR names.

    As in RLinf, only the package ``rlinf`` of an RLinf checkout is sent, since data and results are beside it. A
    directory that is itself a package keeps its name.
    """
    if os.path.isfile(os.path.join(found.root, _RLINF, _PACKAGE)):
        return replace(found, only=(_RLINF,))
    if os.path.isfile(os.path.join(found.root, _PACKAGE)):
        parent, name = os.path.split(found.root)
        return replace(found, root=parent, only=(name,))
    return found


def _project(find: Callable[[str], ModuleSpec | None]) -> CodeSource:
    """Return the project's root: the checkout of RLinf if its package can be found, else the one around the working
    directory.
    """
    try:
        spec = find(_RLINF)
    except (ImportError, ValueError):  # ValueError: a module without a spec
        spec = None
    starts = [os.path.realpath(place) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    for start in [*starts, os.getcwd()]:
        place = os.path.realpath(start)
        while place != os.path.dirname(place):
            if os.path.isfile(os.path.join(place, _PROJECT)):
                return CodeSource(place, asked_by=CODE_WORKING_DIR)
            place = os.path.dirname(place)
    raise ConfigError(
        f"is auto, and neither the package {_RLINF} nor {os.getcwd()} is in a directory with {_PROJECT}: name the "
        "project's directory instead",
        path=CODE_WORKING_DIR,
    )
