"""Where this process imports its own modules from: others look there too, if they have it."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def import_paths() -> list[str]:
    """This process's import paths, less those that belong to its interpreter."""
    own = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    paths = []
    for entry in sys.path:
        path = os.path.realpath(entry or os.getcwd())
        inside = any(path == root or path.startswith(root + os.sep) for root in own)
        if not inside and os.path.isdir(path) and path not in paths and not path.endswith(".zip"):
            paths.append(path)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and (folder := str(Path(main).resolve().parent)) not in paths and folder in map(os.path.realpath, sys.path):
        paths.append(folder)
    return paths
