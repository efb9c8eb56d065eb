"""``python -m rlinf_actors.dropin SCRIPT ARGS`` or ``python -m rlinf_actors.dropin -m MODULE ARGS``.

Runs a program as `python` would, with `rlinf.scheduler` served from rlinf_actors.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from rlinf_actors.dropin import install
from rlinf_actors.platforms import end_elsewhere

USAGE = (
    "usage: python -m rlinf_actors.dropin SCRIPT [ARGUMENT ...]\n"
    "       python -m rlinf_actors.dropin -m MODULE [ARGUMENT ...]"
)


def main() -> None:
    """Install the finder, then run the program that sys.argv names as ``__main__``."""
    end_elsewhere("python -m rlinf_actors.dropin")
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"] or arguments[0] in ("-h", "--help"):
        sys.exit(USAGE)
    install()
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        spec, code = _module(arguments[1])
        sys.argv[:] = [spec.origin or arguments[1], *arguments[2:]]
        _run(code, spec.origin, spec)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        sys.argv[:] = arguments
        try:
            with io.open_code(os.path.abspath(arguments[0])) as file:
                code = compile(file.read(), arguments[0], "exec")
        except OSError as error:
            sys.exit(f"python -m rlinf_actors.dropin: can't open {arguments[0]!r}: {error.strerror}")
        _run(code, arguments[0], None)


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return spec and code of the module *name*; of a package, those of its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        sys.exit(f"python -m rlinf_actors.dropin: {error}")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        sys.exit(f"python -m rlinf_actors.dropin: no module named {name!r} that can be run")
    return spec, code


def _run(code: CodeType, file: str | None, spec: ModuleSpec | None) -> None:
    """Run *code* in a new ``__main__``, which stays until the end of the process, as the program's own does."""
    program = ModuleType("__main__")
    program.__file__ = file
    program.__spec__ = spec
    program.__loader__ = None if spec is None else spec.loader
    program.__package__ = None if spec is None else spec.parent
    sys.modules["__main__"] = program
    exec(code, program.__dict__)  # the user's program


if __name__ == "__main__":
    main()
