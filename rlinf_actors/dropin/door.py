"""Installs the import finders in this process, and prepares the environment of the processes that it starts."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from rlinf_actors.dropin.finder import SCHEDULER, RayFinder, SchedulerFinder, ServedModule

DROPIN = "RLINF_ACTORS_DROPIN"  # settings.DROPIN, which takes longer to import
SITE = Path(__file__).parent / "site"
"""Directory with the sitecustomize.py that prepares the Python processes that this one starts."""

_OURS = os.path.join(os.sep, *SITE.parts[-3:])
"""End of the path of that directory in every installation: processes of a job may have several."""

_finders = (SchedulerFinder(), RayFinder())


def install() -> None:
    """See rlinf_actors.dropin.install."""
    loaded = sys.modules.get(SCHEDULER)
    if loaded is not None and not isinstance(loaded, ServedModule):
        raise ImportError(
            f"{SCHEDULER} was imported from {getattr(loaded, '__file__', 'another place')} before rlinf_actors.dropin "
            f"was installed, so its classes are those of Ray. Start the program with 'python -m rlinf_actors.dropin "
            f"SCRIPT', or call rlinf_actors.dropin.install() before the first import of rlinf"
        )
    if _finders[0] not in sys.meta_path:
        sys.meta_path[:0] = _finders
    wanted = environment(os.environ.get("PYTHONPATH", ""))
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # a worker has these already, and threads may be reading its environment
            os.environ[name] = value


def environment(python_path: str) -> dict[str, str]:
    """Return the variables that make a Python process serve rlinf.scheduler; *python_path* is its PYTHONPATH.

    The directory of our sitecustomize is the last entry, because programs read the first one. If another entry has a
    sitecustomize, our directory is the first entry, because Python runs only the first sitecustomize.
    """
    entries = [entry for entry in python_path.split(os.pathsep) if entry and not entry.endswith(_OURS)]
    others = any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in entries)
    entries.insert(0 if others else len(entries), str(SITE))
    return {DROPIN: "1", "PYTHONPATH": os.pathsep.join(entries)}


def find_spec(name: str) -> ModuleSpec | None:
    """Return what the finders find for the module *name*."""
    return next((spec for finder in _finders if (spec := finder.find_spec(name)) is not None), None)
