"""Directories of `rlinf-actors run`: of the run, and of its nodes. Each is locked by the process that removes it.

The lock, which the kernel frees with the process, tells a directory in use from one that a killed process has left: a
batch system that kills all processes of a job leaves such directories. The next run of the user here removes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from rlinf_actors.settings import Settings

PREFIX = "rlinf-run-"
LOCK = "lock"
"""Name of the file in the directory that its process locks. agentd locks that of its run directory."""
_MAX_PARENT = 40
"""Longest parent, in bytes: the path of a unix socket has at most 107."""


def make(kind: str, settings: Settings) -> str:
    """Return a new directory of mode 0700, with *kind* in its name, for the caller to lock (`lock`) or to pass on.

    Remove directories that killed runs of this user have left in the same place.
    """
    parent = settings.run_dir or tempfile.gettempdir()
    parent = parent if len(os.fsencode(parent)) <= _MAX_PARENT else "/tmp"
    for path in Path(parent).glob(f"{PREFIX}*"):
        if _is_left(path):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{PREFIX}{kind}", dir=parent)


def lock(directory: str) -> int:
    """Lock a new directory for the life of this process. Return the descriptor, for the caller to close."""
    fd = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _is_left(directory: Path) -> bool:
    """Return True if *directory* is ours, and was locked by a process that has ended. A new one is not locked yet."""
    try:
        if os.lstat(directory).st_uid != os.geteuid():
            return False
        with open(directory / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it has no lock yet, is in use, or another run has removed it
        return False
    return True
