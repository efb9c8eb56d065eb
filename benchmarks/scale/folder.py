"""The folder of a simulation. A run that was killed leaves its folder, and the next run removes it."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "scale-"
LOCK = "run.lock"
"""A run holds a lock on this file of its folder while it lives."""


@contextlib.contextmanager
def folder_of_run() -> Iterator[str]:
    """Make the folder of this run, and remove it at the end. Before, remove the folders of runs that were killed."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, open(f"{folder}/{LOCK}", "x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def remove_left() -> None:
    """Remove the folders of runs that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), open(path) as lock:  # the lock is held, or the folder is another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
