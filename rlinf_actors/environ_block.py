"""Environment variables of a process that has threads.

C code calls getenv() on threads of its own: libzmq's when it resolves a name, torch's, glibc's. In glibc no variable
may be added or removed beside that: the array of entries may move, or close a gap, under a reader. So a worker has room
for what comes late before its first thread starts (`reserve`). From then on nothing here moves an entry: the pointer of
one entry is replaced, which is what setenv() does with a variable that is there, or one byte of an entry is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping

_SIZE = 256
"""Bytes of a slot's entry, with its name and the NUL at its end."""
_OFF = b"_"
"""First byte of a slot's entry while it is no variable."""

_slots: list[_Slot] = []
"""Those in this process's environment: what putenv() was given must stay there for ever."""
_lock = threading.Lock()


class _Slot:
    """An entry whose text this process owns: POSIX's putenv() makes changing it a change of the environment."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(b"_RLINF_ACTORS_SLOT_%d=" % len(_slots), _SIZE)
        self.used = False
        if ctypes.CDLL(None).putenv(self._text):
            raise MemoryError("no memory for an environment variable")

    def write(self, entry: bytes) -> None:
        """Make *entry* (NAME=VALUE) part of the environment."""
        if len(entry) >= _SIZE:
            raise ValueError(f"{entry!r} has {len(entry)} bytes; at most {_SIZE - 1} fit")
        self.used = True
        ctypes.memmove(ctypes.addressof(self._text) + 1, entry[1:] + b"\0", len(entry))  # a variable _..., as yet
        self._text[0] = entry[:1]

    def clear(self) -> None:
        """Take it out."""
        self._text[0] = _OFF
        self.used = False


def reserve(names: Iterable[str], slots: int = 0) -> None:
    """Make room for variables that come later. For a process that has one thread.

    Args:
        names: for `replace`; those that are not set are set to "".
        slots: how many variables that are not set `overridden` can set at a time.
    """
    for name in names:
        if name not in os.environ:
            os.environ[name] = ""
    while len(_slots) < slots:
        _slots.append(_Slot())


def replace(values: Mapping[str, str]) -> None:
    """Give variables that are set other values. Any thread.

    Raises:
        ValueError: one of them is not set: adding it is not safe beside other threads.
    """
    missing = sorted(values.keys() - os.environ.keys())
    if missing:
        raise ValueError(f"{', '.join(missing)} cannot be set any more: this process has threads, and no room for it")
    os.environ.update(values)


@contextlib.contextmanager
def overridden(values: Mapping[str, str]) -> Iterator[None]:
    """Let getenv() and os.environ have *values* for a while. Any thread; one at a time.

    A process that has reserved too few slots gets more, which is not safe beside threads that read the environment.
    """
    with _lock, contextlib.ExitStack() as after:
        for name, value in values.items():
            if name in os.environ:
                after.callback(replace, {name: os.environ[name]})
                replace({name: value})
                continue
            slot = next((one for one in _slots if not one.used), None)
            if slot is None:
                _slots.append(slot := _Slot())
            after.callback(slot.clear)
            key, text = os.fsencode(name), os.fsencode(value)
            slot.write(key + b"=" + text)
            # Python's own copy: os.environ[name] = value would call setenv(), which moves entries
            known: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
            after.callback(known.pop, key, None)
            known[key] = text
        yield
