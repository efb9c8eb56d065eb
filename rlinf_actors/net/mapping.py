"""Maps a file into memory without keeping a descriptor of it, which mmap.mmap does before Python 3.13.

A process maps the arena of each process that it talks to: a driver would have two descriptors more for each worker.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class Mapping(ctypes.Array):  # type: ignore[type-arg]
    """The mapped memory, as a writable buffer. It is unmapped after its last view is gone."""

    _type_ = ctypes.c_ubyte
    _length_ = 0

    def madvise(self, option: int, start: int, length: int) -> None:
        """Do the same as mmap.mmap.madvise."""
        if _libc.madvise(ctypes.addressof(self) + start, length, option):
            raise _error("madvise")

    def __del__(self) -> None:
        _libc.munmap(ctypes.addressof(self), len(self))


@functools.lru_cache(maxsize=64)
def _kind(size: int) -> Any:
    return type("Mapping", (Mapping,), {"_length_": size})


def mapped(fd: int, size: int, *, private: bool = False) -> Mapping:
    """Return the first *size* bytes of the file *fd*, mapped for reading and writing.

    *private*: True if this process's writes change only its own copy of the written pages.

    Raises:
        OSError: the file cannot be mapped.
    """
    kind = _kind(size)
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        raise _error("mmap")
    memory: Mapping = kind.from_address(address)
    return memory


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
