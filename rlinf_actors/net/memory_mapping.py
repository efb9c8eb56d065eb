"""Maps a file into memory without keeping a descriptor of it, which mmap.mmap does before Python 3.13.

A process maps the arena of each process that it talks to: a driver would have two descriptors more for each worker.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10  # MAP_FIXED, of every architecture that we run on
_NORESERVE = 0x4000


def mapped(fd: int, size: int, *, private: bool = False) -> mmap.mmap:
    """Return the first *size* bytes of the file *fd*, mapped for reading and writing.

    They are unmapped after the last view is gone, and not by a finalizer: the garbage collector calls those of a cycle
    in any order, and others of the cycle may still read the memory.

    *private*: True if this process's writes change only its own copy of the written pages.

    Raises:
        OSError: the file cannot be mapped.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)  # owns the addresses
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    flags = _FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap: {os.strerror(number)}")
    return memory
