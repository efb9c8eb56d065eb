"""The descriptors of this process, and a process that has run out of them."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


def descriptors() -> set[tuple[str, str]]:
    """The numbers of this process's descriptors, each with what it is: a socket has a number of its own.

    Tests look at what there is more than before, never at a count: libzmq closes what earlier tests left in a thread of
    its own, at any time.
    """
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            opened.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return opened


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Limit this process to *count* more descriptors. Garbage collection is off, since it could close descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    gc.collect()
    gc.disable()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
