"""Compute a fingerprint of the packages that an interpreter would import now, from stat calls. Any thread.

A template forks workers from modules that it imported long ago. It remembers the fingerprint of its start; agentd
compares that with the current fingerprint before each launch, and replaces an outdated template.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

PACKAGE = "rlinf_actors"
_SITE = ("site-packages", "dist-packages")
_RECORDS = (".dist-info", ".egg-info", ".egg", ".egg-link", ".pth")
"""Endings of entries in site-packages that pip and setuptools replace with each installation."""
_MAX_FILES = 2000
"""Most files of one package outside of site-packages that the fingerprint covers."""


def fingerprint(paths: Sequence[str], modules: Iterable[str] = ()) -> str:
    """Return a hash of the packages that an interpreter would import now.

    The hash changes when pip installs, upgrades or removes a distribution in one of *paths*. It also changes when a
    source file of this package or of *modules* changes, if the file is outside of site-packages (editable
    installations, PYTHONPATH).

    Args:
        paths: sys.path of the interpreter. An entry that is no directory counts as empty.
        modules: modules that a template imports beside this package.
    """
    names = dict.fromkeys((PACKAGE, *(module.partition(".")[0] for module in modules)))
    places = [*paths, *(source for path in paths if _is_site(path) for source in _editable(path))]
    found = hashlib.sha256()
    for place in dict.fromkeys(map(os.path.normpath, places)):
        for line in _distributions(place) if _is_site(place) else _sources(place, names):
            found.update(line.encode(errors="surrogateescape") + b"\n")
    return found.hexdigest()[:32]


def _is_site(path: str) -> bool:
    return os.path.basename(path) in _SITE


def _distributions(site: str) -> Iterator[str]:
    yield site
    for name in _names(site):
        if name.endswith(_RECORDS):
            yield f"{name} {_changed(os.path.join(site, name))}"


def _editable(site: str) -> Iterator[str]:
    """Yield the directories that .pth and .egg-link files in *site*, a site-packages directory, add to sys.path."""
    for name in _names(site):
        if not name.endswith((".pth", ".egg-link")):
            continue
        try:
            with open(os.path.join(site, name), encoding="utf-8", errors="replace") as file:
                lines = file.read(65536).splitlines()
        except OSError:
            continue
        yield from (os.path.join(site, line.strip()) for line in lines if not line.startswith(("#", "import", "\n")))


def _sources(place: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each source file in *place* of the modules *names*, with its modification time.

    For a module that is a link into site-packages, yield lines for the distributions there instead.
    """
    for name in names:
        directory = os.path.realpath(os.path.join(place, name))
        if os.path.isfile(f"{directory}.py"):
            yield f"{directory}.py {_changed(f'{directory}.py')}"
        if not os.path.isdir(directory):
            continue
        yield directory
        if _is_site(os.path.dirname(directory)):
            yield from _distributions(os.path.dirname(directory))
            continue
        left = _MAX_FILES
        for parent, inner, files in os.walk(directory):
            inner[:] = sorted(one for one in inner if one != "__pycache__")
            for file in sorted(one for one in files if one.endswith((".py", ".so")))[:left]:
                yield f"{file} {_changed(os.path.join(parent, file))}"
            left = max(0, left - len(files))


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _changed(path: str) -> str:
    """Return when the file *path* was last modified, in nanoseconds as text; "" if there is no such file."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return ""
