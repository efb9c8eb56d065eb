"""Bandwidth groups whose members are several processes of one node: their state is in memory that they share.

agentd has one small memfd, and tells each worker where it is (`WorkerPlace.budgets`). A worker opens it through
/proc/PID/fd, as it opens the arenas of other processes; no file is left behind by any end of any process. The memory is
a hash table of rows: a key made of namespace and bandwidth group, and the time (CLOCK_MONOTONIC) at which its bandwidth
is free again. A row that has been free for FORGET_S may be used for another key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time

from rlinf_actors.net.budget_memory import SIZE, Place
from rlinf_actors.net.emulated_path import Bandwidth, Span, Stage, carried

log = logging.getLogger(__name__)

FORGET_S = 60.0
_ROW = struct.Struct("<8sd")
_ROWS = SIZE // _ROW.size
_PROBES = 32
_PATIENCE_S = 0.1
"""How long a process waits for the lock, longer than a busy machine keeps its holder from running. A process that was
stopped while it had the lock must not block others: they go on without, and do not wait again until they get it."""


class SharedBudgets:
    """Makes stages whose bandwidth all workers of this node share. Implements `emulated_path.Budgets`.

    If the memory cannot be opened, the stages belong to this process alone, and a warning says so.

    Args:
        place: where agentd's memory is.
        namespace: namespace of the job: jobs do not share bandwidths.
    """

    def __init__(self, place: Place, namespace: str) -> None:
        self._namespace = namespace
        self._fd = -1
        self._memory: mmap.mmap | None = None
        pid, fd, device, inode = place
        try:
            self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            found = os.fstat(self._fd)
            if (found.st_dev, found.st_ino, found.st_size) != (device, inode, SIZE):
                raise OSError(0, "another file is there")
            self._memory = mmap.mmap(self._fd, SIZE)
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            log.warning("each process has the bandwidth of its group for itself: %s", error)

    def __call__(self, name: str, rate: float) -> Stage:
        if self._memory is None:
            return Bandwidth(rate)
        key = hashlib.blake2b(f"{self._namespace} {name}".encode(), digest_size=8).digest()
        return SharedBandwidth(self._fd, self._memory, key, rate)


class SharedBandwidth:
    """A stage that the processes with the same *key* share. One thread of a process at a time."""

    def __init__(self, fd: int, memory: mmap.mmap, key: bytes, rate: float) -> None:
        self._fd = fd
        self._memory = memory
        self._key = key
        self._rate = rate
        self._patience_s = _PATIENCE_S

    def carry(self, span: Span, size: int) -> Span:
        locked = self._lock()
        try:
            at, free = self._row()
            left, free = carried(free, self._rate, span, size)
            if at >= 0:
                _ROW.pack_into(self._memory, at, self._key, free)
            return left
        finally:
            if locked:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        until = 0.0
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._patience_s = _PATIENCE_S
                return True
            now = time.monotonic()
            until = until or now + self._patience_s
            if now >= until:
                self._patience_s = 0.0
                return False
            os.sched_yield()

    def _row(self) -> tuple[int, float]:
        """Return the offset of this stage's row and its time. The offset is -1 if no row is left."""
        first, spare, old = int.from_bytes(self._key, "big"), -1, time.monotonic() - FORGET_S
        for probe in range(_PROBES):
            at = (first + probe) % _ROWS * _ROW.size
            key, free = _ROW.unpack_from(self._memory, at)
            if key == self._key:
                return at, free
            if spare < 0 and (free < old or not free):  # 0: never used, and a machine may run for less than FORGET_S
                spare = at
        return spare, 0.0
