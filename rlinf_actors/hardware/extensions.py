"""Load extensions: code of other packages that registers hardware types or accelerator types.

The environment variable RLINF_EXT_MODULE or an entry point of group ``rlinf_actors.robots`` or
``rlinf_actors.accelerators`` names an extension. An entry point may name a module (imported, and its ``register()``
called if it has one), a class (only its module is imported) or a function (called). A broken entry point affects only
the types of its own package. A process searches for entry points only when it needs a type that is not registered in
it. The functions here may be called on any thread; a process loads each extension once.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import is_accelerator_type
from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.wire.values import Extension

log = logging.getLogger(__name__)

ROBOTS = "rlinf_actors.robots"
ACCELERATORS = "rlinf_actors.accelerators"
GROUPS = (ACCELERATORS, ROBOTS)
"""The groups of entry points that a package can use in its pyproject.toml."""

_loaded: dict[Extension, str] = {}
"""The extensions that this process has tried to load, each with its error message; "" if it was loaded."""
_scanned: set[str] = set()
"""The groups whose installed entry points this process has loaded."""


def load_module(name: str) -> None:
    """Import module *name*, which RLINF_EXT_MODULE names, and call its ``register()``, once in each process.

    Raise ConfigError if the module cannot be imported, or its ``register`` is missing or raised.
    """
    extension = Extension(name, EXT_MODULE)
    if _loaded.get(extension) == "":
        return
    module = _import(name)
    register = getattr(module, "register", None)
    if not callable(register):
        raise ConfigError(f"module {name!r} has no function register()", path=EXT_MODULE)
    try:
        register()
    except Exception as error:
        raise ConfigError(
            f"register() of module {name!r} raised {type(error).__name__}: {error}", path=EXT_MODULE
        ) from error
    _loaded[extension] = ""


def installed(groups: Sequence[str] = GROUPS) -> list[Extension]:
    """Return the entry points of *groups* in the packages on sys.path, without importing them.

    If no package has such an entry point, this takes milliseconds: importlib.metadata, which takes 30 ms to import, is
    not needed.
    """
    if not any(_mentions(directory) for directory in dict.fromkeys(sys.path)):
        return []
    from importlib import metadata

    found: dict[Extension, None] = {}
    for group in groups:
        for point in sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value)):
            package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
            found[Extension(point.value, group, package)] = None
    return list(found)


def load_installed(groups: Sequence[str] = GROUPS) -> list[str]:
    """Load the entry points of *groups* in all installed packages, once in each process.

    Return a sentence for each extension of *groups* that could not be loaded, now or in an earlier call.
    """
    wanted = [group for group in groups if group not in _scanned]
    _scanned.update(wanted)
    for extension in installed(wanted) if wanted else ():
        _try(extension)
    return [fault for extension, fault in _loaded.items() if extension.group in groups and fault]


def load(extension: Extension) -> None:
    """Load one extension, so that its hardware or accelerator types are registered in this process.

    Raise ConfigError if the extension is missing or broken.
    """
    if fault := _try(extension):
        raise ConfigError(fault)


def load_for(kind: str, extensions: Iterable[Extension], module: str | None) -> list[str]:
    """Load the extensions that may register hardware type *kind*, in the process that enumerates a node's hardware.

    First load *module*, the value of RLINF_EXT_MODULE, and *extensions*, which the driver has loaded. If the type is
    still unknown, load the extensions of all installed packages. Return [] if the type is known now, else a sentence
    for each extension that could not be loaded.
    """
    wanted = [*([Extension(module, EXT_MODULE)] if module else []), *extensions]
    faults = [*filter(None, map(_try, wanted)), *load_types([kind])]
    return [] if is_known(kind) else list(dict.fromkeys(faults))


def load_types(kinds: Iterable[str]) -> list[str]:
    """Load the entry points of installed packages, unless all hardware types *kinds* are known in this process.

    Return [] if all types are known now; else a sentence for each entry point that could not be loaded.
    """
    wanted = list(kinds)
    if all(map(is_known, wanted)):
        return []
    faults = load_installed([ROBOTS])
    return [] if all(map(is_known, wanted)) else faults


def load_accelerators(kinds: Iterable[str]) -> None:
    """Load the entry points of installed packages, unless all accelerator types *kinds* are known in this process.

    Log a warning for each entry point that could not be loaded. A type that stays unknown raises no error here; a
    launch that places a worker on accelerators of that type fails.
    """
    if not all(map(is_accelerator_type, kinds)):
        for fault in load_installed([ACCELERATORS]):
            log.warning("%s", fault)


def is_known(kind: str) -> bool:
    """True if hardware type *kind* is built in, or has a config class that is registered in this process."""
    from rlinf_actors.hardware.registry import hardware_types  # not at the top: agentd's probe needs no types

    return kind in hardware_types()


def load_driver_extensions(extensions: Iterable[Extension], where: str) -> None:
    """Load *extensions* in a worker. The driver has loaded them for the hardware of this worker.

    If an extension is missing or broken, raise ConfigError, which says what to install. *where* names this worker's
    interpreter and node in the message.
    """
    for extension in extensions:
        fault = _try(extension)
        if fault:
            package = extension.package or f"the package that has module {_module_of(extension)}"
            raise ConfigError(
                f"the driver has loaded {title_of(extension)} for the hardware of this worker, which {where} cannot: "
                f"{fault}. Install {package} there, or name an interpreter that has it (env_configs: "
                "python_interpreter_path)"
            )


def loaded() -> list[Extension]:
    """Return the extensions that this process has loaded."""
    return [extension for extension, fault in _loaded.items() if not fault]


def providers(modules: Iterable[str]) -> list[Extension]:
    """Return the extensions that another process must load to have the hardware types that *modules* define here.

    For each module, these are the loaded extensions of its top-level package; if there are none, the module itself
    becomes an extension. Modules of rlinf_actors (except rlinf_actors.testing) and ``__main__`` become no extensions.
    """
    found: dict[Extension, None] = {}
    for module in modules:
        top = module.partition(".")[0]
        mine = [one for one in loaded() if _module_of(one).partition(".")[0] == top]
        ours = top == "rlinf_actors" and not module.startswith("rlinf_actors.testing.")
        known = ours or top in ("__main__", "__mp_main__")
        if not mine and not known:
            mine = [Extension(module)]
        found.update(dict.fromkeys(mine))
    return list(found)


def _try(extension: Extension) -> str:
    """Load an extension, unless this process has tried before. Return its error message; "" if it is loaded."""
    if extension not in _loaded:
        try:
            _load(extension)
        except ConfigError as error:
            _loaded[extension] = str(error)
        except Exception as error:  # noqa: BLE001 - another package's code; reported when its type is needed
            _loaded[extension] = f"{title_of(extension)} cannot be loaded: {type(error).__name__}: {error}"
        else:
            _loaded[extension] = ""
    return _loaded[extension]


def _load(extension: Extension) -> None:
    if extension.group == EXT_MODULE:
        load_module(extension.name)
        return
    found: Any = importlib.import_module(_module_of(extension))
    for part in filter(None, extension.name.partition(":")[2].partition("[")[0].strip().split(".")):
        found = getattr(found, part)
    if isinstance(found, type):
        return  # registered by its decorator when its module was imported
    if extension.group and not callable(found):
        found = getattr(found, "register", None)
    if extension.group and callable(found):
        found()


def _module_of(extension: Extension) -> str:
    return extension.name.partition(":")[0].strip()


def title_of(extension: Extension) -> str:
    """Return the text that names an extension in messages: its module, or its entry point and package."""
    if extension.group == EXT_MODULE:
        return f"{EXT_MODULE}={extension.name}"
    if not extension.group:
        return f"module {extension.name}"
    package = f" of package {extension.package}" if extension.package else ""
    return f"entry point {extension.name} ({extension.group}){package}"


def _mentions(directory: str) -> bool:
    """True if a package in *directory* has an entry point in a group whose name begins with ``rlinf_actors.``."""
    files = [*glob.iglob(f"{glob.escape(directory)}/*-info/entry_points.txt")] if directory else []
    for file in files:
        with contextlib.suppress(OSError):  # it was uninstalled meanwhile
            if b"[rlinf_actors." in Path(file).read_bytes():
                return True
    return False


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {error.name!r} on this interpreter's path; install it there, or add its directory "
                "to PYTHONPATH",
                path=EXT_MODULE,
            ) from error
        raise ConfigError(f"module {name!r} cannot be imported: {error}", path=EXT_MODULE) from error
    except Exception as error:
        raise ConfigError(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}", path=EXT_MODULE
        ) from error
