"""Environment variables of a process that has threads.

C code calls getenv() on its own threads: libzmq resolves names, torch and glibc read settings. glibc allows no change
of the set of variables meanwhile: the array of entries may move, or close a gap, under a reader. So a worker makes room
before its first thread starts (`reserve`). After that no entry moves: a change replaces the pointer of one entry, as
setenv() does for an existing variable, or one byte of an entry.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping

_SIZE = 256
"""Bytes of the entry of a slot, with name and final NUL."""
_OFF = b"_"
"""First byte of the environment entry of an unused slot."""

_slots: list[_EnvironSlot] = []
"""Slots in the environment of this process, which never frees them: memory given to putenv() must stay."""
_lock = threading.Lock()


class _EnvironSlot:
    """Room for one later variable in the environment: an entry whose text this process may change in place.

    After putenv() a change of the text changes the environment (POSIX). No other entry moves, so other threads may
    read.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(b"_RLINF_ACTORS_SLOT_%d=" % len(_slots), _SIZE)
        self.used = False
        if ctypes.CDLL(None).putenv(self._text):
            raise MemoryError("no memory for an environment variable")

    def write(self, entry: bytes) -> None:
        """Put *entry* (NAME=VALUE) into the environment by means of this slot."""
        if len(entry) >= _SIZE:
            raise ValueError(f"{entry!r} has {len(entry)} bytes; at most {_SIZE - 1} fit")
        self.used = True
        ctypes.memmove(ctypes.addressof(self._text) + 1, entry[1:] + b"\0", len(entry))  # still the variable _...
        self._text[0] = entry[:1]

    def clear(self) -> None:
        """Remove this slot's variable from the environment. The slot can be used for another variable then."""
        self._text[0] = _OFF
        self.used = False


def reserve(names: Iterable[str], slots: int = 0) -> None:
    """Make room in the environment for variables that are set later, when the process has several threads.

    Must be called while the process has one thread.

    Args:
        names: variables that `replace` will change. Those that are not set yet are set to "".
        slots: number of further variables that `overridden` can set at one time.
    """
    for name in names:
        if name not in os.environ:
            os.environ[name] = ""
    while len(_slots) < slots:
        _slots.append(_EnvironSlot())


def replace(values: Mapping[str, str]) -> None:
    """Change the values of environment variables that exist. Any thread.

    Raises:
        ValueError: a variable does not exist. Adding one is not safe beside other threads.
    """
    missing = sorted(values.keys() - os.environ.keys())
    if missing:
        raise ValueError(f"{', '.join(missing)} cannot be set any more: this process has threads, and no room for it")
    os.environ.update(values)


@contextlib.contextmanager
def overridden(values: Mapping[str, str]) -> Iterator[None]:
    """Set *values* in the environment, for getenv() and os.environ, for the length of a ``with`` block. Any thread.

    A second block waits until the first has ended. If `reserve` made too few slots, more are added, which is not safe
    beside threads that read the environment.
    """
    with _lock, contextlib.ExitStack() as after:
        for name, value in values.items():
            if name in os.environ:
                after.callback(replace, {name: os.environ[name]})
                replace({name: value})
                continue
            slot = next((one for one in _slots if not one.used), None)
            if slot is None:
                _slots.append(slot := _EnvironSlot())
            after.callback(slot.clear)
            key, text = os.fsencode(name), os.fsencode(value)
            slot.write(key + b"=" + text)
            # the copy of Python: os.environ[name] = value would call setenv(), which moves entries
            known: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
            after.callback(known.pop, key, None)
            known[key] = text
        yield
