"""Installs the import finder in this process, and in the Python processes that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlinf_actors.dropin.finder import SCHEDULER, RayFinder, SchedulerFinder, ServedModule
from rlinf_actors.settings import DROPIN

SITE = Path(__file__).parent / "site"
"""Directory with the sitecustomize.py that installs the finder in child processes."""


def installed() -> bool:
    """True if `install` has run in this process."""
    return any(isinstance(finder, SchedulerFinder) for finder in sys.meta_path)


def install() -> None:
    """Serve `rlinf.scheduler` from rlinf_actors in this process and in all Python processes that it starts.

    The second call does nothing. The environment variables RLINF_ACTORS_DROPIN and PYTHONPATH carry it to child
    processes.

    Raises:
        ImportError: rlinf.scheduler was imported from elsewhere before.
    """
    loaded = sys.modules.get(SCHEDULER)
    if loaded is not None and not isinstance(loaded, ServedModule):
        raise ImportError(
            f"{SCHEDULER} was imported from {getattr(loaded, '__file__', 'another place')} before rlinf_actors.dropin "
            f"was installed, so its classes are those of Ray. Start the program with 'python -m rlinf_actors.dropin "
            f"SCRIPT', or call rlinf_actors.dropin.install() before the first import of rlinf"
        )
    if not installed():
        sys.meta_path.insert(0, SchedulerFinder())
        sys.meta_path.append(RayFinder())
    _prepare_children()


def install_if_asked() -> None:
    """Call `install` if RLINF_ACTORS_DROPIN is 1 in this process."""
    if os.environ.get(DROPIN) == "1":
        install()


def _prepare_children() -> None:
    """Set the environment variables that install the finder in child processes."""
    os.environ[DROPIN] = "1"
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(SITE) not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *entries])
