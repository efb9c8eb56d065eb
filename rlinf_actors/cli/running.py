"""Which agentds run on this machine, as far as this user can see: by the locks of their run directories."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors import procfs
from rlinf_actors.settings import CLUSTER_MARK

OF_UNITS = "/run/rlinf-agentd"
"""RuntimeDirectory= of the shipped unit, with a directory for each user."""


@dataclass(frozen=True)
class Agentd:
    """One that runs."""

    pid: int
    run_dir: str


def agentds(parents: Iterable[str], of_units: str = OF_UNITS) -> list[Agentd]:
    """Those that run: of units first, then those that were started by hand. Private clusters' are left out: a driver
    starts those where it is itself.

    Args:
        parents: where run directories lie.
        of_units: where those of units do.
    """
    locks = [*sorted(Path(of_units).glob("*/lock"))]
    locks += [lock for parent in parents for lock in sorted(Path(parent).glob("rlinf-*/lock"))]
    held = procfs.flocks()
    found = {}
    for lock in locks:
        try:
            info = lock.stat()
        except OSError:  # another user's, or just removed
            continue
        pid = held.get((info.st_dev, info.st_ino))
        if pid is not None and not _is_private(pid):
            found[pid] = Agentd(pid, str(lock.parent))
    return list(found.values())


def is_locked(path: str) -> bool:
    """Whether some process holds this lock.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_private(pid: int) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True
    return any(entry.startswith(f"{CLUSTER_MARK}=".encode()) for entry in environ.split(b"\0"))
