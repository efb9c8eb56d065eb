"""Memory into which large parts from other nodes are received. It is used again when its last view is gone.

The kernel clears the pages of new memory, which takes longer than to receive into them. So memory is kept for the next
receive, and given back when the process has received nothing for a while (`trim`).

Any thread. Finalizers of views run on any thread with any lock held, so they only append to a deque.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import mmap
import threading

from rlinf_actors.net.shared_memory import bytes_at

KEPT = 512 << 20
"""Most bytes that are kept for later. The memory that users hold is not limited here."""
_STEP = 1 << 20
"""Sizes are rounded up to multiples of this many bytes, so that memory fits a later part of about the same size."""


class ReceiveMemory:
    """Allocates memory for received parts, and keeps what was freed.

    Attributes:
        takes: number of allocations so far.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._limit = kept
        self._lock = threading.Lock()
        self._ended: collections.deque[mmap.mmap] = collections.deque()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._kept = 0
        self.takes = 0

    @property
    def kept(self) -> int:
        """Number of bytes that are kept for later and in no use."""
        with self._lock:
            self._reclaim()
            return self._kept

    def take(self, size: int) -> memoryview:
        """Return *size* bytes of memory, 1 or more, with any contents. Raises OSError if the system has no memory."""
        room = -(-size // _STEP) * _STEP
        with self._lock:
            self.takes += 1
            self._reclaim()
            free = self._free.get(room)
            memory = free.pop() if free else None
            if memory is not None:
                self._kept -= room
        if memory is None:
            memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return bytes_at(memory, 0, size, functools.partial(self._ended.append, memory))

    def trim(self) -> None:
        """Give all memory that is in no use back to the system."""
        with self._lock:
            self._reclaim()
            self._free.clear()
            self._kept = 0

    def _reclaim(self) -> None:
        while self._ended:
            memory = self._ended.popleft()
            if self._kept + len(memory) > self._limit:  # what is kept has other sizes than those that come now
                self._free.clear()
                self._kept = 0
            if len(memory) <= self._limit:
                self._free.setdefault(len(memory), []).append(memory)
                self._kept += len(memory)
