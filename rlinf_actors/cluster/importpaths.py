"""Where this process imports its own modules from: others look there too, if they have it."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig

_real: dict[str, str] = {}
"""Absolute paths with their symbolic links resolved. Resolving reads directories, which may be on NFS."""


def import_paths() -> list[str]:
    """Return this process's import paths, less those that belong to its interpreter.

    In a running event loop no file system is asked: a path that was not resolved before is taken as it is written.
    The start of a Cluster resolves those of its time. Receivers leave out what they do not have.
    """
    own = {_resolved(path) for path in sysconfig.get_paths().values()}
    entries = [_resolved(entry) for entry in sys.path]
    paths = []
    for path in entries:
        inside = any(path == root or path.startswith(root + os.sep) for root in own)
        if not inside and path not in paths and not path.endswith(".zip"):
            paths.append(path)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and (folder := os.path.dirname(_resolved(main))) not in paths and folder in entries:
        paths.append(folder)
    return paths


def _resolved(path: str) -> str:
    path = os.path.normpath(os.path.join(os.getcwd(), path))  # getcwd() asks the kernel alone
    known = _real.get(path)
    if known is None:
        if asyncio._get_running_loop() is not None:
            return path
        known = _real[path] = os.path.realpath(path)
    return known
