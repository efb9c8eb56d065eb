"""Compute a fingerprint of the packages that an interpreter would import now, from stat calls. Any thread. Say how to
install an extra.

A template forks workers from modules that it imported long ago. It remembers the fingerprint of its start; agentd
compares that with the current fingerprint before each launch, and replaces an outdated template.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rlinf_actors.config_files import open_regular
from rlinf_actors.errors import ConfigError

PACKAGE = "rlinf_actors"
_SITE = ("site-packages", "dist-packages")
_RECORDS = (".dist-info", ".egg-info", ".egg", ".egg-link", ".pth")
"""Endings of entries in site-packages that pip and setuptools replace with each installation."""
_MAX_FILES = 2000
"""Most files of one package outside of site-packages that the fingerprint covers."""

EXTRAS = {"cli": ("rich", "psutil"), "stack": ("py-spy",), "web": ("aiohttp", "jinja2", "prometheus-client")}
"""The packages of the extras that commands ask for, as in pyproject.toml."""


def install_extra(extra: str) -> str:
    """Return the command that installs an extra's packages for this interpreter.

    By their own names, which works from any directory: no index has rlinf-actors yet.
    """
    return f"{sys.executable} -m pip install {' '.join(EXTRAS[extra])}"


class Looks:
    """A budget of directory entries to read, because users can fill the directories of their interpreters."""

    def __init__(self, left: int = 300_000) -> None:
        self.left = left


def fingerprint(paths: Sequence[str], modules: Iterable[str] = (), looks: Looks | None = None) -> str:
    """Return a hash of the packages that an interpreter would import now.

    The hash changes when pip installs, upgrades or removes a distribution in one of *paths*. It also changes when a
    source file of this package or of *modules* changes, if the file is outside of site-packages (editable
    installations, PYTHONPATH).

    Args:
        paths: sys.path of the interpreter. An entry that is no directory counts as empty.
        modules: modules that a template imports beside this package.
        looks: bounds the work, also that of several calls together; None for a bound of this call alone. Entries
            beyond it count as absent.
    """
    looks = looks or Looks()
    names = dict.fromkeys((PACKAGE, *(module.partition(".")[0] for module in modules)))
    places = [*paths, *(source for path in paths if _is_site(path) for source in _editable(path, looks))]
    found, walked = hashlib.sha256(), set[str]()
    for place in dict.fromkeys(map(os.path.normpath, places)):
        for line in _distributions(place, looks) if _is_site(place) else _sources(place, names, looks, walked):
            found.update(line.encode(errors="surrogateescape") + b"\n")
    return found.hexdigest()[:32]


def _is_site(path: str) -> bool:
    return os.path.basename(path) in _SITE


def _distributions(site: str, looks: Looks) -> Iterator[str]:
    yield site
    for entry in _entries(site, looks):
        if entry.name.endswith(_RECORDS):
            yield f"{entry.name} {_changed(entry.path)}"


def _editable(site: str, looks: Looks) -> Iterator[str]:
    """Yield the directories that .pth and .egg-link files in *site*, a site-packages directory, add to sys.path."""
    for entry in _entries(site, looks):
        if not entry.name.endswith((".pth", ".egg-link")):
            continue
        try:
            with open_regular(entry.path) as file:  # a user's, and a FIFO there would stop agentd
                lines = file.read(65536).decode(errors="replace").splitlines()
        except (OSError, ConfigError):
            continue
        yield from (os.path.join(site, line.strip()) for line in lines if not line.startswith(("#", "import", "\n")))


def _sources(place: str, names: Iterable[str], looks: Looks, walked: set[str]) -> Iterator[str]:
    """Yield a line for each source file in *place* of the modules *names*, with its modification time.

    For a module that is a link into site-packages, yield lines for the distributions there instead. *walked* has the
    directories that need no second look, since several places have links to them; this function adds to it.
    """
    for name in names:
        directory = os.path.realpath(os.path.join(place, name))
        if os.path.isfile(f"{directory}.py"):
            yield f"{directory}.py {_changed(f'{directory}.py')}"
        if not os.path.isdir(directory):
            continue
        yield directory
        if directory in walked:
            continue
        walked.add(directory)
        if _is_site(os.path.dirname(directory)):
            yield from _distributions(os.path.dirname(directory), looks)
            continue
        left, inner = _MAX_FILES, [directory]
        while inner:
            for entry in _entries(inner.pop(), looks):
                if entry.name.endswith((".py", ".so")):
                    if left > 0:
                        yield f"{entry.name} {_changed(entry.path)}"
                    left -= 1
                elif entry.name != "__pycache__" and _is_directory(entry):
                    inner.append(entry.path)


def _entries(directory: str, looks: Looks) -> list[os.DirEntry[str]]:
    """Return the entries of *directory* by name."""
    try:
        with os.scandir(directory) as entries:
            found = sorted(itertools.islice(entries, looks.left), key=lambda entry: entry.name)
    except OSError:
        return []
    looks.left -= len(found)
    return found


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return True for a directory, False for a link to one. Most file systems say it without a stat call."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _changed(path: str) -> str:
    """Return when the file *path* was last modified, in nanoseconds as text; "" if there is no such file."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return ""
