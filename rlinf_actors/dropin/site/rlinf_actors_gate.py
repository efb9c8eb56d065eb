"""Installs rlinf_actors.dropin when a process first imports `rlinf.scheduler` or `ray`.

sitecustomize.py and the .pth file of ``rlinf-actors dropin --install`` call `set_up` at the start of every Python
of a job. So this module imports only modules that every Python has loaded by then. The interpreter may be of any
version from 3.7 up, and may lack rlinf_actors.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing would take long to import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class DoorGate:
    """A finder that stands in sys.meta_path until the module *root* is imported, and then installs the real finders."""

    def __init__(self, root: str) -> None:
        """Make the gate of *root* and the modules below it."""
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Install rlinf_actors.dropin and return its spec if *name* is the root or below it, else None."""
        if name != self._root and not name.startswith(self._root + "."):
            return None
        try:
            door = _door()
        except ImportError as error:
            if self._root == "ray":
                return None  # rlinf.scheduler still raises
            raise ImportError(
                f"RLINF_ACTORS_DROPIN is 1, so rlinf_actors is to serve {name}, but {sys.executable} cannot import it "
                f"({error}). Install rlinf-actors there, or start that process without RLINF_ACTORS_DROPIN"
            ) from error
        remove()
        door.install()
        found: ModuleSpec | None = door.find_spec(name)
        return found


def set_up() -> None:
    """Put the gates in place, if RLINF_ACTORS_DROPIN is 1 and they are not there."""
    if os.environ.get("RLINF_ACTORS_DROPIN") == "1" and not any(isinstance(one, DoorGate) for one in sys.meta_path):
        sys.meta_path[:0] = [DoorGate("rlinf.scheduler"), DoorGate("ray")]


def remove() -> None:
    """Take the gates away."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, DoorGate)]


def _door() -> ModuleType:
    """Return rlinf_actors.dropin.door; of the package around this file if the interpreter has no rlinf_actors."""
    from importlib import import_module
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    if find_spec("rlinf_actors") is None:
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        init = os.path.join(package, "__init__.py")
        spec = spec_from_file_location("rlinf_actors", init, submodule_search_locations=[package])
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["rlinf_actors"] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return import_module("rlinf_actors.dropin.door")
