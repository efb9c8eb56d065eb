"""The import finder that serves `rlinf.scheduler`, and `ray` where Ray is not installed.

The modules that it makes are real modules: they can be imported by any form of import, inspected and patched. A name is
loaded from its place in rlinf_actors when it is first used. Nothing of the scheduler in RLinf's checkout is loaded.

Any thread; the import system holds its lock of the module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf_actors.dropin.table import CHECKOUT, MODULES, PACKAGES, Absent
from rlinf_actors.errors import UsageError

SCHEDULER = "rlinf.scheduler"
RAY = "ray"
STAND_IN = Path(__file__).parent / "ray_stand_in"


def _relative(name: str) -> str:
    """Return the path of module *name* below rlinf.scheduler, "" for rlinf.scheduler itself."""
    return name[len(SCHEDULER) + 1 :]


def names_of(module: str) -> dict[str, str | Absent]:
    """Return the names of *module*, a path below rlinf.scheduler, each with its place in rlinf_actors or an Absent."""
    if module in PACKAGES:
        exported = PACKAGES[module]
        return {name: MODULES[origin][name] for origin, names in exported.items() for name in names}
    return dict(MODULES[module])


class ServedModule(ModuleType):
    """A module of rlinf.scheduler whose names are those of rlinf_actors.

    In a module that defines names (not in a package), setting a name sets it in its home module too. So a patch has the
    same effect as in the original: code of the home module uses the patched value.
    """

    def __init__(self, name: str) -> None:
        """Create the module with the full name *name*. Its names are loaded when they are first used."""
        super().__init__(name)
        path = _relative(name)
        self.__dict__["_places"] = names_of(path)
        self.__dict__["_patched"] = {}
        self.__dict__["_children"] = children(path)
        present = [key for key, place in self._places.items() if isinstance(place, str)]
        self.__dict__["__all__"] = sorted(present)
        self.__doc__ = f"{name}, served from rlinf_actors (rlinf_actors.dropin.table says from where)."

    def __getattr__(self, name: str) -> Any:
        """Load *name* from its home, or the module below this package that has that name."""
        place = self._places.get(name)
        if isinstance(place, str):
            home, _, attribute = place.partition(":")
            value = getattr(importlib.import_module(f"rlinf_actors.{home}"), attribute)
            self.__dict__[name] = value
            return value
        if isinstance(place, Absent) and place.importable:
            return self.__dict__.setdefault(name, unserved(self.__name__, name, place))
        if name in self._children:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(missing(self.__name__, name, place), name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        """Set *name* here and, if this module defines it, in its home."""
        home = self._home(name)
        if home is not None:
            module, attribute = home
            self._patched.setdefault(name, getattr(module, attribute))
            setattr(module, attribute, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Remove a value that was set here, so that the home's own value is used again."""
        home = self._home(name)
        if home is not None and name in self._patched:
            module, attribute = home
            setattr(module, attribute, self._patched.pop(name))
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        """Return the names that exist, loaded or not, and the modules below."""
        return sorted({*self.__dict__, *self.__all__, *self._children} - {"_places", "_patched", "_children"})

    def _home(self, name: str) -> tuple[ModuleType, str] | None:
        place = None if _relative(self.__name__) in PACKAGES else self._places.get(name)
        if not isinstance(place, str):
            return None
        module, _, attribute = place.partition(":")
        return importlib.import_module(f"rlinf_actors.{module}"), attribute


def children(package: str) -> frozenset[str]:
    """Return the last parts of the names of the modules directly below *package*."""
    prefix = f"{package}." if package else ""
    return frozenset(
        path[len(prefix) :].partition(".")[0]
        for path in (*MODULES, *PACKAGES, *CHECKOUT)
        if path and path != package and path.startswith(prefix)
    )


class _Unserved(type):
    """The type of the classes that `unserved` makes."""

    _text: str

    def __call__(cls, *_args: object, **_options: object) -> Any:
        raise UsageError(cls._text)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # of inspection and pickling
            raise AttributeError(name)
        raise UsageError(cls._text)


def unserved(module: str, name: str, place: Absent) -> type:
    """Return a class that raises UsageError when it is called, or when an attribute of it is read."""
    return _Unserved(name, (), {"__module__": module, "_text": missing(module, name, place)})


def missing(module: str, name: str, place: Absent | None) -> str:
    """Return the text of the error for *name*, which module *module* of rlinf.scheduler does not serve."""
    if place is not None:
        return f"{module}.{name} is not served by rlinf_actors: {place.text}"
    return (
        f"rlinf_actors.dropin has no {module}.{name}. It serves the names of docs/reference/rlinf-names.md: if RLinf "
        f"has this one, it is private there or newer. Use another name, or run this program on Ray"
    )


class SchedulerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes rlinf.scheduler and the modules below it. First in sys.meta_path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of rlinf.scheduler; None for all other modules.

        Every module is a package for the import system. So ``from MODULE import NAME`` with an unknown name gets here,
        and fails with an error that says what to do. That error has no `name`, because importlib would swallow it.

        Raises:
            ModuleNotFoundError: rlinf.scheduler has no such module or name here.
        """
        if fullname != SCHEDULER and not fullname.startswith(SCHEDULER + "."):
            return None
        path_below = _relative(fullname)
        if path_below in CHECKOUT:
            return _in_checkout(fullname)
        if path_below.partition(".")[0] in CHECKOUT:
            return None  # its package is in the checkout, and knows its directory
        if path_below not in MODULES and path_below not in PACKAGES:
            module, _, name = fullname.rpartition(".")
            place = names_of(_relative(module)).get(name) if module.startswith(SCHEDULER) else None
            raise ModuleNotFoundError(missing(module, name, place if isinstance(place, Absent) else None))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make the module; importlib calls this."""
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are loaded when they are used."""


def _in_checkout(fullname: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of a package below rlinf.scheduler as it is in RLinf's checkout.

    Raises:
        ModuleNotFoundError: the checkout is not on sys.path, or lacks the package.
    """
    checkout = importlib.import_module(SCHEDULER.partition(".")[0])
    directories = [str(Path(directory, "scheduler")) for directory in checkout.__path__]
    spec = importlib.machinery.PathFinder.find_spec(fullname, directories)
    if spec is None:
        raise ModuleNotFoundError(
            f"{fullname} is used as it is in RLinf's checkout, and is not there: {', '.join(directories)}. Put the "
            f"checkout of RLinf on sys.path",
            name=fullname,
        )
    return spec


class RayFinder(importlib.abc.MetaPathFinder):
    """Finds the stand-in of `ray`, if Ray is not installed. Before the other finders in sys.meta_path.

    It asks them for Ray itself, because a directory with the name "ray" is a package too: Ray leaves one in /tmp.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the stand-in; None for all other modules.

        A module of Ray that the stand-in lacks is an ordinary ModuleNotFoundError: programs ask for modules of Ray to
        learn what is installed.
        """
        first, *below = fullname.split(".")
        if first != RAY or (below and not getattr(sys.modules.get(RAY), "__stand_in__", False)):
            return None
        if not below:
            for finder in [one for one in sys.meta_path if one is not self]:
                found = finder.find_spec(RAY, None)
                if found is not None and found.origin is not None:
                    return found
        location = STAND_IN / f"{'_'.join(below) or '__init__'}.py"
        if not location.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, location, submodule_search_locations=[])
