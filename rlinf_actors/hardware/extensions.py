"""Extensions: other packages' code that registers hardware types, by RLINF_EXT_MODULE or by entry points.

An entry point of group ``rlinf_actors.robots`` or ``rlinf_actors.accelerators`` names a module, which registers by
being imported (its ``register()`` is called if it has one), a class of it, or a function, which is called. A package
with a broken entry point loses only its own types. A process searches for entry points only when it needs a type that
it does not know. Any thread; each extension is tried once a process.
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
"""Groups of entry points, as a package's pyproject.toml names them."""

_loaded: dict[Extension, str] = {}
"""Extensions that this process has tried to load, to their fault, "" for none."""
_scanned: set[str] = set()


def load_module(name: str) -> None:
    """Import module *name* and call its ``register()``; once per process and name, later calls do nothing.

    Raises:
        ConfigError: the module is missing, cannot be imported, has no ``register`` or that raised;
            ``path`` is ``RLINF_EXT_MODULE``.
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
    """Return the entry points of installed packages on this process's import path. Reads files; imports none of them.

    Takes milliseconds without any: importlib.metadata, which takes 30 ms to import, is not imported then.
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
    """Load the entry points of all installed packages; once per process.

    Returns:
        Faults of those that could not be loaded, a sentence each, this time or before.
    """
    wanted = [group for group in groups if group not in _scanned]
    _scanned.update(wanted)
    for extension in installed(wanted) if wanted else ():
        _try(extension)
    return [fault for extension, fault in _loaded.items() if extension.group in groups and fault]


def load(extension: Extension) -> None:
    """Load one extension.

    Raises:
        ConfigError: it is missing or broken.
    """
    if fault := _try(extension):
        raise ConfigError(fault)


def load_for(kind: str, extensions: Iterable[Extension], module: str | None) -> list[str]:
    """Load extensions until type *kind* is known, in a process that enumerates its pieces.

    Args:
        kind: the hardware type.
        extensions: the extensions that the driver has loaded.
        module: RLINF_EXT_MODULE's here, None without.

    Returns:
        If the type is still unknown: faults of the extensions that could not be loaded, a sentence each.
    """
    faults = []
    for extension in [*([Extension(module, EXT_MODULE)] if module else []), *extensions]:
        fault = _try(extension)
        if fault and fault not in faults:
            faults.append(fault)
    if is_known(kind):
        return []
    faults += load_installed([ROBOTS])
    return [] if is_known(kind) else faults


def load_types(kinds: Iterable[str]) -> list[str]:
    """Load the entry points of installed packages if one of these hardware types is not known.

    Returns:
        If a type is still unknown: faults of those that could not be loaded.
    """
    wanted = list(kinds)
    if all(map(is_known, wanted)):
        return []
    faults = load_installed([ROBOTS])
    return [] if all(map(is_known, wanted)) else faults


def load_accelerators(kinds: Iterable[str]) -> None:
    """Load the entry points of installed packages if one of these accelerator types is not known.

    A type that stays unknown is an error for the launch that places a worker on such a device.
    """
    if not all(map(is_accelerator_type, kinds)):
        for fault in load_installed([ACCELERATORS]):
            log.warning("%s", fault)


def is_known(kind: str) -> bool:
    """True if hardware type *kind* is built in or registered in this process, at least its config class."""
    from rlinf_actors.hardware.registry import hardware_types  # not at the top: agentd's probe needs no types

    return kind in hardware_types()


def load_driver_extensions(extensions: Iterable[Extension], where: str) -> None:
    """Load the extensions that the driver has loaded for this process's hardware.

    Args:
        extensions: the extensions.
        where: this interpreter and node, for the message.

    Raises:
        ConfigError: one of them is missing or broken; the message says what to install where.
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
    """What this process has loaded."""
    return [extension for extension, fault in _loaded.items() if not fault]


def providers(modules: Iterable[str]) -> list[Extension]:
    """What another process has to load so that it knows what was defined in *modules* of this one.

    Loaded extensions of the same top-level packages; for a module without one, the module itself. Types that every
    node knows by itself, this library's but for those for tests, and those of a script that was started (``__main__``)
    need, or have, none.
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
    """Load an extension once, and return its fault, "" for none."""
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
    if extension.group == EXT_MODULE:
        return f"{EXT_MODULE}={extension.name}"
    if not extension.group:
        return f"module {extension.name}"
    package = f" of package {extension.package}" if extension.package else ""
    return f"entry point {extension.name} ({extension.group}){package}"


def _mentions(directory: str) -> bool:
    """True if a package installed in *directory* has an entry point of ours."""
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
