"""Imports every module of RLinf's workers and runners on rlinf_actors.dropin, each in a process of its own.

    RLINF_SRC=~/RLinf python -m tests.rlinf.imports [MODULE ...]

Prints what each module that fails lacks: a third-party package, or a name of rlinf_actors. Exit status: 0 if all that
fail lack third-party packages, else 1. The processes are forked from one that has imported torch, transformers and
pandas.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlinf_actors import dropin

BELOW = ("rlinf/workers", "rlinf/runners")
OURS = ("rlinf", "rlinf_actors", "ray")


class Imported(NamedTuple):
    """The result of one import.

    Attributes:
        module: the module's name.
        lacks: the third-party package that is missing or too old, "" if the import did not fail for one.
        error: the error in one line, "" if the import succeeded.
        trace: the traceback.
    """

    module: str
    lacks: str
    error: str
    trace: str

    @property
    def is_ours(self) -> bool:
        """True if the import failed for a reason other than a third-party package."""
        return bool(self.error) and not self.lacks


def modules(source: Path) -> list[str]:
    """Return the names of all modules below the directories BELOW of the checkout *source*."""
    found = set()
    for path in [path for folder in BELOW for path in (source / folder).rglob("*.py")]:
        parts = path.relative_to(source).with_suffix("").parts
        found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def third_party(error: BaseException) -> str:
    """Return the top-level package for whose lack or age *error* was raised, "" if it is none or ours.

    A ModuleNotFoundError names the package, and so do errors of RLinf that begin so. An ImportError ("cannot import
    name") counts for the package that it names, any other error for the package in whose code it was raised.
    """
    if said := re.search(r"(\w+)( package)? is not installed", str(error)):
        return said[1]
    root = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if not root and error.__context__ is not None:  # RLinf raises another error for a missing package
        return third_party(error.__context__)
    if root:
        return "" if root in OURS else root
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if package not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            return "" if package in (*OURS, "__main__", "tests") else package
    return ""


def try_import(module: str) -> Imported:
    """Import *module* in this process."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - SystemExit and errors of C extensions too: this is the result
        line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        return Imported(module, third_party(error), line, traceback.format_exc())
    return Imported(module, "", "", "")


def import_in_child(module: str) -> Imported:
    """Fork a child that imports *module*; return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        with open(writer, "w") as answer:
            json.dump(try_import(module), answer)
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Imported(module, "", f"the process ended with status {os.waitstatus_to_exitcode(status)}", "")
    return Imported(*json.loads(text))


def check(source: Path, names: Sequence[str] = ()) -> Iterator[Imported]:
    """Import the modules *names* of the checkout *source*, all without one, each in a child; yield the results."""
    sys.path.insert(0, str(source))
    dropin.install()
    for name in ("torch", "transformers", "pandas"):  # the slowest; a child that needs one has it from the fork
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in names or modules(source):
        yield import_in_child(name)


def main() -> None:
    """Print the results for the checkout that RLINF_SRC names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", help="modules to import; all of rlinf.workers and rlinf.runners without one"
    )
    parser.add_argument("--source", type=Path, default=os.environ.get("RLINF_SRC"), help="RLinf's checkout (RLINF_SRC)")
    args = parser.parse_args()
    if args.source is None:
        parser.error("RLINF_SRC or --source must name a checkout of RLinf")
    results = []
    lacking: dict[str, list[str]] = collections.defaultdict(list)
    for one in check(args.source.resolve(), args.modules):
        results.append(one)
        if one.is_ours:
            print(f"{one.module}: {one.error}\n{one.trace if args.modules else ''}", flush=True)
        elif one.error:
            lacking[f"{one.lacks} ({one.error})" if one.lacks not in one.error else one.error].append(one.module)
    for error, names in sorted(lacking.items(), key=lambda item: -len(item[1])):
        print(f"{len(names)} lack a package: {error}\n    {' '.join(names)}")
    ours = sum(one.is_ours for one in results)
    good = sum(not one.error for one in results)
    print(f"{len(results)} modules: {good} imported, {len(results) - good - ours} lack a package, {ours} fail here")
    sys.exit(1 if ours else 0)


if __name__ == "__main__":
    main()
