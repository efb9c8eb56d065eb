"""The memory in which agentd lets its workers keep the state of bandwidth groups (`net.shared_budgets`)."""

from __future__ import annotations

import fcntl
import functools
import logging
import os

log = logging.getLogger(__name__)

Place = tuple[int, int, int, int]
"""Where the memory is: pid of agentd, its descriptor, device and inode."""

SIZE = 64 << 10


@functools.cache
def place() -> Place:
    """Make the memory of this agentd, once, and return where it is. (0, 0, 0, 0) if the system provides none."""
    try:
        fd = os.memfd_create("rlinf-actors-budgets", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # no SIGBUS for workers
    except OSError as error:
        log.info("bandwidth groups are not shared between processes: %s", error)
        return (0, 0, 0, 0)
    found = os.fstat(fd)
    return (os.getpid(), fd, found.st_dev, found.st_ino)
