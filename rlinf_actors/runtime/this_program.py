"""What a driver tells the head about its own process."""

from __future__ import annotations

import os
import socket
import sys
import time

from rlinf_actors.procfs import stat
from rlinf_actors.security.keyfile import user
from rlinf_actors.wire.program import Program


def this_program() -> Program:
    """Return who runs what in this process. Any thread."""
    name = socket.gethostname()
    return Program(user()[:256], name[:256], _script()[-4096:], _started())


def _script() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"-m {spec.name.removesuffix('.__main__')}"
    path: str | None = getattr(main, "__file__", None)
    if path:
        return os.path.abspath(path)
    return "-c" if sys.argv[:1] == ["-c"] else "-"


def _started() -> float:
    found = stat(os.getpid())
    if found is None:
        return 0.0  # no /proc: nothing depends on it
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - found.started / os.sysconf("SC_CLK_TCK")
    return time.time() - age
