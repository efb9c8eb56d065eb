"""The memory in which agentd lets the workers of a user keep the state of bandwidth groups (`net.shared_budgets`).

Templates inherit the descriptor, and workers open it in /proc/TEMPLATE/fd: agentd's own descriptors are closed to them.
"""

from __future__ import annotations

import fcntl
import logging
import os

log = logging.getLogger(__name__)

Place = tuple[int, int, int, int]
"""Where the memory is: pid of a process that has it open, its descriptor there, device and inode."""

SIZE = 64 << 10


def make() -> Place:
    """Make such memory and return where it is. (0, 0, 0, 0) if the system provides none. The caller closes it."""
    try:
        fd = os.memfd_create("rlinf-actors-budgets", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # no SIGBUS for workers
    except OSError as error:
        log.info("bandwidth groups are not shared between processes: %s", error)
        return (0, 0, 0, 0)
    found = os.fstat(fd)
    return (os.getpid(), fd, found.st_dev, found.st_ino)


def inherited(fd: int, device: int, inode: int) -> tuple[int, int, int]:
    """Return the arguments if this process has inherited such memory as *fd*, and keep it from the programs that this
    process executes. Otherwise return (-1, 0, 0).
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return (-1, 0, 0)
    if (found.st_dev, found.st_ino) != (device, inode):
        return (-1, 0, 0)
    os.set_inheritable(fd, False)
    return (fd, device, inode)
