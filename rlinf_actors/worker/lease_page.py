"""The lease page: a page of shared memory that says until when a worker may move its robots.

Code that runs without the interpreter's lock cannot be stopped by the guard. Such code reads the page in each cycle.
The guard writes the page; nobody else can, so it is not renewed when the guard is dead or cannot run.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from pathlib import Path

NEVER = (1 << 63) - 1
"""The deadline of a worker without robots: it has no lease to lose."""
INCLUDE_DIR = str(Path(__file__).resolve().parents[1] / "include")
"""Directory of ``rlinf_lease.h``, for ``cc -I``."""
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it before Python 3.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class LeasePage:
    """Until when this worker may move its robots, for code that does not wait for Python. See `Worker.lease_page`.

    The page begins with the deadline: an unsigned 64-bit number in the machine's byte order (the page never leaves the
    machine; workers run in 64-bit interpreters alone, so it is read and written at once), nanoseconds of
    CLOCK_MONOTONIC. It is 0 once the lease is lost, and never changes again then. In a worker without robots it is
    2**63 - 1.

    Attributes:
        fd: read-only descriptor of the page, to be mapped by another process that inherits or is sent it.
        address: of the page in this process, and in those that it forks. Reading is all that is allowed.
        include_dir: directory of ``rlinf_lease.h``, which has ``rlinf_lease_held(address)`` for C and C++.
    """

    include_dir = INCLUDE_DIR

    def __init__(self, fd: int) -> None:
        self.fd = fd
        address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the lease page cannot be mapped")
        self.address: int = address

    @property
    def deadline_ns(self) -> int:
        """The deadline that the page shows now."""
        return ctypes.c_uint64.from_address(self.address).value

    def held(self) -> bool:
        """True while the worker may move its robots. Any thread, and processes that this one has forked."""
        return time.monotonic_ns() < self.deadline_ns


class LeasePageWriter:
    """The guard's side of the page. Its thread only, once that runs.

    Attributes:
        page: what user code gets.
    """

    def __init__(self, deadline_ns: int = NEVER) -> None:
        fd = os.memfd_create("rlinf-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:  # ours is the last mapping that can write, whoever opens /proc/PID/fd
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
            except OSError:  # an older kernel: only the descriptor that we give away is read-only
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._lost = False
        self._deadline = ctypes.c_uint64.from_buffer(self._memory)
        self._deadline.value = deadline_ns
        self.page = LeasePage(readable)

    def renew(self, deadline_ns: int) -> None:
        """Move the deadline forward. Does nothing once `lose` was called."""
        if not self._lost and deadline_ns > self._deadline.value:
            self._deadline.value = deadline_ns

    def lose(self) -> None:
        """Write 0, for good."""
        self._lost = True
        self._deadline.value = 0
