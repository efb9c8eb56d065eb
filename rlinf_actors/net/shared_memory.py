"""Shared memory of one process, lent to others on its node: a memfd, which needs no name and leaves no file behind.

Theory of operation. An `Arena` is one memfd, divided into blocks by `Extents`. A block is written once by its owner and
read by the processes that it is lent to (`net.buffer_lending`). It is free again when no view of it is left in any
process. The kernel frees the memory with the last process that maps it, so a view outlives the process that wrote it.
`Borrowed` is another process's arena. Its owner passes the descriptor, or it is opened through /proc/PID/fd. It is
checked by device, inode, size and seals.

Bytes lie in a block as in the writer's memory: all readers are on this machine and have its byte order.

Any thread. `_Bytes.__del__` runs on the thread that drops the last view, which may hold any lock: it must never take a
lock. It only appends to a deque, or hands a function to the loop.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import fcntl
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.descriptors import part_of
from rlinf_actors.net.memory_mapping import mapped

PAGE = 4096
"""Extents begin and end at multiples of this many bytes, so that each can be returned to the kernel on its own."""


class Extents:
    """Keeps account of which parts of an arena are used. It manages *size* bytes, a multiple of PAGE. Not thread-safe.

    `used` is the number of used bytes. The free extent with the lowest address is used first: its pages were probably
    touched before, and a touched page costs a tenth of a new one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._starts = [0]
        self._lengths = [size]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Mark *size* contiguous free bytes (1 or more) as used. Return their offset, None if no free extent is long
        enough.
        """
        need = -(-size // PAGE) * PAGE
        for n, length in enumerate(self._lengths):
            if length >= need:
                start = self._starts[n]
                if length == need:
                    del self._starts[n], self._lengths[n]
                else:
                    self._starts[n] += need
                    self._lengths[n] -= need
                self._taken[start] = need
                self.used += need
                return start
        return None

    def give(self, start: int) -> None:
        """Mark the extent at offset *start*, which `take` returned, as free again."""
        length = self._taken.pop(start)
        self.used -= length
        n = bisect.bisect(self._starts, start)
        if n < len(self._starts) and start + length == self._starts[n]:
            length += self._lengths[n]
            del self._starts[n], self._lengths[n]
        if n > 0 and self._starts[n - 1] + self._lengths[n - 1] == start:
            self._lengths[n - 1] += length
        else:
            self._starts.insert(n, start)
            self._lengths.insert(n, length)

    def free(self) -> list[tuple[int, int]]:
        """Return the offset and length of every free extent, in the order of the offsets."""
        return list(zip(self._starts, self._lengths, strict=True))


SHARED_FROM = 128 << 10
"""Size in bytes from which a part is lent. Smaller parts are cheaper to send (measured)."""
SHORT = 2 << 20
"""Size in bytes below which a copy holds the GIL, for 0.1 ms at most."""
WARM = 64 << 20
"""Bytes of free memory that `Arena.trim` keeps: a new page costs ten times as much as a used one."""


class Offer(msgspec.Struct, frozen=True):
    """Tells another process where to open an arena, and how to recognize it.

    The arena is the file ``/proc/{pid}/fd/{fd}``, and must have the offer's device, inode and size.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size: int


class _Bytes(ctypes.Array):  # type: ignore[type-arg]
    """A piece of an arena's memory. `ended` is called after the last view of the piece is gone."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    crowded = False
    ended: Callable[[], object] | None = None
    kept: Borrowed | None = None  # the arena of a block that was handed over to this process

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended()


@functools.lru_cache(maxsize=512)
def _kind(size: int) -> Any:
    return type("_Bytes", (_Bytes,), {"_length_": size})


def bytes_at(memory: mmap.mmap, offset: int, size: int, ended: Callable[[], object]) -> memoryview:
    """Return a view of *size* bytes of *memory*. *ended* is called, on any thread, after its last view is gone."""
    step = max(PAGE, (1 << size.bit_length()) // 16)  # a type per length would be many types
    whole = _kind(min(-(-size // step) * step, len(memory) - offset)).from_buffer(memory, offset)
    whole.ended = ended
    return memoryview(whole).cast("B")[:size]


class Arena:
    """This process's own shared memory: large message parts are copied into blocks of it, which other processes read.

    Args:
        limit: most bytes that blocks may occupy. The system provides memory only when a page is first written.

    Attributes:
        size: size in bytes.
        offer: tells other processes where to open this arena.
        stores: number of blocks made so far.
        on_store: called after a block was made, unless `watched`.
        watched: True while the owner knows that blocks are made.
        another: makes another arena of this process, with a limit.

    Raises:
        OSError: the system provides no memfd.
    """

    def __init__(self, limit: int) -> None:
        self.size = max(PAGE, limit // PAGE * PAGE)
        self._fd = os.memfd_create("rlinf-actors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # no SIGBUS for readers
            self._memory: mmap.mmap | None = mmap.mmap(self._fd, self.size)
        except OSError:
            os.close(self._fd)
            raise
        found = os.fstat(self._fd)
        self.offer = Offer(os.getpid(), self._fd, found.st_dev, found.st_ino, self.size)
        self._lock = threading.Lock()
        self._extents = Extents(self.size)
        self._ended: collections.deque[int] = collections.deque()
        self._touched = 0
        self.stores = 0
        self.on_store: Callable[[], object] = lambda: None
        self.watched = False
        self.another: Callable[[int], Arena] = Arena

    @property
    def used(self) -> int:
        """Number of bytes of this arena that blocks occupy, in whole pages."""
        with self._lock:
            self._reclaim()
            return self._extents.used

    @property
    def crowded(self) -> bool:
        """True if more than half of the arena is in use. Receivers of blocks are then asked to copy and return them
        soon.
        """
        return self._extents.used > self.size // 2

    def store(self, data: Buffer) -> memoryview | None:
        """Copy *data* (1 byte or more) into a new block. Return a view of the block, None if the arena has no room."""
        source = data if type(data) is bytes else memoryview(data).cast("B")
        block = self.allocate(len(source))
        if block is not None:
            copy(block, source, len(source))
        return block

    def allocate(self, size: int) -> memoryview | None:
        """Return a view of a new block of *size* bytes (1 or more), not written yet; None if the arena has no room."""
        with self._lock:
            if self._ended:
                self._reclaim()
            memory = self._memory
            start = None if memory is None else self._extents.take(size)
            if memory is None or start is None:
                return None
            self.stores += 1
            self._touched = max(self._touched, start + size)
            block = bytes_at(memory, start, size, functools.partial(self._ended.append, start))
        if not self.watched:
            self.on_store()
        return block

    def copy(self, data: Buffer) -> Buffer:
        """Return a copy of *data*: a block of the arena if *data* is large and the arena has room, otherwise bytes."""
        if memoryview(data).nbytes >= SHARED_FROM:
            block = self.store(data)
            if block is not None:
                return block
        return bytes(data)

    def descriptors(self) -> list[Buffer]:
        """Return a part with a descriptor of this arena, for `Borrowed`; no part if there is no free descriptor."""
        return _passed(self._fd)

    def place(self, part: Buffer) -> int | None:
        """Return the offset in this arena of the block that *part* is a view of; None if *part* lies elsewhere."""
        if type(part) is not memoryview or part.readonly or not isinstance(part.obj, _Bytes) or self._memory is None:
            return None
        offset = ctypes.addressof(ctypes.c_ubyte.from_buffer(part)) - self._base
        return offset if 0 <= offset < self.size else None

    @functools.cached_property
    def _base(self) -> int:
        assert self._memory is not None
        return _address(self._memory)

    def trim(self) -> None:
        """Give the memory of free blocks back to the system, except for WARM bytes, which are faster to use again."""
        with self._lock:
            self._reclaim()
            kept = 0
            if self._memory is None:
                return
            for start, length in self._extents.free():
                keep = min(length, max(0, WARM - kept)) // PAGE * PAGE
                kept += keep
                end = min(start + length, -(-self._touched // PAGE) * PAGE)
                if start + keep < end:
                    self._memory.madvise(mmap.MADV_REMOVE, start + keep, end - start - keep)

    def close(self) -> None:
        """Store no further blocks. The memory stays as long as views of it exist in any process."""
        with self._lock:
            if self._memory is not None:
                self._memory = None
                os.close(self._fd)

    def _reclaim(self) -> None:
        while self._ended:
            self._extents.give(self._ended.popleft())


class Borrowed:
    """Another process's arena, mapped into this process to read the blocks that are lent to it.

    Args:
        offer: describes the arena.
        fd: a descriptor of the arena that its owner has passed; None to open it in /proc.
        keep: True for an arena whose blocks are handed over to this process: it stays open, so that this process can
            offer it to others, also after its owner's end.

    Attributes:
        offer: tells other processes where this process has the arena open; None unless *keep*.
        on_unused: by owner, callbacks for when the arena is abandoned and no block is used any more. They are called on
            any thread, with any lock held.

    Raises:
        OSError: the arena cannot be opened (it belongs to another user or container, or its process has ended), or it
            is not the one that was offered.
    """

    def __init__(self, offer: Offer, fd: int | None = None, keep: bool = False) -> None:
        self.offer: Offer | None = None
        self.on_unused: dict[object, Callable[[], object]] = {}
        self._used: dict[int, int] = {}  # size of each kept block that has views, by offset
        self._abandoned = False
        if fd is None:
            fd = _opened(offer)
        try:
            _check(fd, offer)
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"the arena of process {offer.pid} is not sealed, and could shrink while we read it")
            self._size = offer.size
            self._alone = mapped(fd, offer.size)
            # for blocks that several processes borrow: a borrower that writes gets pages of its own
            self._together = self._alone if keep else mapped(fd, offer.size, private=True)
            if keep:
                self.offer = Offer(os.getpid(), fd, offer.device, offer.inode, offer.size)
                weakref.finalize(self, os.close, fd)
        finally:
            if self.offer is None:
                os.close(fd)

    def view(self, offset: int, size: int, alone: bool, crowded: bool, ended: Callable[[], object]) -> memoryview:
        """Return a writable view of a block of the other process's arena.

        Args:
            offset: place of the block in the arena.
            size: size of the block in bytes.
            alone: True if no other process borrows the block. If False, writes to the view change only this process's
                copy.
            crowded: True if the arena's owner asks to copy the block soon, because it has little room left.
            ended: called on any thread when the last view of the block is gone.

        Raises:
            ValueError: the block is not inside the arena.
        """
        if not 0 <= offset <= offset + size <= self._size or size == 0:
            raise ValueError(f"bytes {offset} to {offset + size} are outside an arena of {self._size}")
        if self.offer is not None:
            if offset % PAGE or offset in self._used:
                raise ValueError(f"the block at {offset} does not begin a page, or was handed over before")
            self._used[offset] = size
            part = bytes_at(self._alone, offset, size, functools.partial(self._unused, offset, ended))
            part.obj.kept = self  # type: ignore[attr-defined]
        elif alone:
            part = bytes_at(self._alone, offset, size, ended)
        else:
            memory = self._together

            def forget() -> None:
                # our own pages would hide what the owner writes here next
                memory.madvise(mmap.MADV_DONTNEED, offset, size)
                ended()

            part = bytes_at(memory, offset, size, forget)
        assert isinstance(part.obj, _Bytes)
        part.obj.crowded = crowded
        return part

    def descriptors(self) -> list[Buffer]:
        """Return what `Arena.descriptors` returns, for an arena that is kept."""
        assert self.offer is not None
        return _passed(self.offer.fd)

    def place(self, part: memoryview) -> int:
        """Return the offset of the kept block that *part* is a view of."""
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(part)) - self._base

    def abandon(self) -> None:
        """Give the memory of all blocks without views back to the system, and that of others when their views end.

        Called when the arena's owner has ended, or will not write into the arena any more.
        """
        self._abandoned = True  # first: a view that ends from now on frees its own block
        start = 0
        for offset, size in [*sorted(self._used.items()), (self._size, 0)]:
            self._free(start, offset - start)
            start = max(start, offset + -(-size // PAGE) * PAGE)
        self._end_if_unused()

    def _unused(self, offset: int, ended: Callable[[], object]) -> None:
        size = self._used.pop(offset)
        ended()
        if self._abandoned:
            self._free(offset, -(-size // PAGE) * PAGE)
            self._end_if_unused()

    def _free(self, start: int, length: int) -> None:
        if length > 0:
            self._alone.madvise(mmap.MADV_REMOVE, start, length)

    def _end_if_unused(self) -> None:
        if not self._used:
            while self.on_unused:
                self.on_unused.popitem()[1]()

    @functools.cached_property
    def _base(self) -> int:
        return _address(self._alone)


def kept(part: Buffer) -> Borrowed | None:
    """Return the arena of the block that *part* is a view of, if the block was handed over to this process."""
    return part.obj.kept if type(part) is memoryview and isinstance(part.obj, _Bytes) else None


def _passed(fd: int) -> list[Buffer]:
    try:
        return [part_of(os.dup(fd))]
    except OSError:
        return []


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def _opened(offer: Offer) -> int:
    # O_PATH first: opening anything else that may be there, such as a device, could have effects
    there = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        _check(there, offer)
        return os.open(f"/proc/self/fd/{there}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(there)


def _check(fd: int, offer: Offer) -> None:
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino, found.st_size) != (offer.device, offer.inode, offer.size):
        raise OSError(f"descriptor {offer.fd} of process {offer.pid} is not the arena that was offered")


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, which describes the memory of an object. It is part of CPython's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def copy(target: memoryview, source: Buffer, size: int) -> None:
    """Copy *source* to *target*, both of *size* bytes. From SHORT bytes on, without the GIL.

    A slice assignment holds the GIL, and stops the I/O thread; to give the GIL back and forth takes long beside little.
    """
    if size < SHORT:
        target[:] = source
        return
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(view), 0)
    try:
        ctypes.memmove(ctypes.addressof(ctypes.c_ubyte.from_buffer(target)), view.buf, size)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
