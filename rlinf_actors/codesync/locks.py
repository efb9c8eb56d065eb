"""Locks on what a node keeps for several processes: trees of code, and environments. Linux flock, any thread.

The kernel releases a lock when its last holder has ended, however it ended, so a crash leaves nothing locked. A process
that uses an entry holds it shared; one that makes or removes it holds it exclusively. The lock of an entry PATH is the
file PATH.lock beside it.

Who finds no entry takes the turn to make it, PATH.turn.lock, and looks again before it makes the entry. If it waited
for the exclusive lock instead, and another process made the entry meanwhile, it would wait until all users had ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping

from rlinf_actors.settings import CODE_DIR

SUFFIX = ".lock"
TURN = ".turn"
_own: list[Lock] = []


class Lock:
    """A lock that is held. `release` gives it up; processes forked meanwhile go on holding it until they end."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def share(self) -> bool:
        """Turn an exclusive lock into a shared one. Return False if another process has removed the entry in between.

        The kernel gives up the one lock before it takes the other.
        """
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        return self.stands()

    def stands(self) -> bool:
        """Return False if the lock's file was removed: another process may have locked a new one."""
        return _is(self._fd, self._path)

    def touch(self) -> None:
        """Record that the entry was used now; `last_used` returns this time."""
        os.utime(self._fd)

    def remove(self) -> None:
        """Remove the lock's file. Waiting processes notice, and lock a new file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def release(self) -> None:
        """Give up the lock. Calling this twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hold(entry: str, *, wait: bool = True) -> Lock | None:
    """Lock *entry* shared, so that no process removes it.

    Blocks while another process makes or removes the entry; with *wait* False, return None instead.
    """
    return _lock(entry, fcntl.LOCK_SH, wait)


def take(entry: str, *, wait: bool = True) -> Lock | None:
    """Lock *entry* exclusively, to make or remove it.

    Blocks while other processes use the entry; with *wait* False, return None instead.
    """
    return _lock(entry, fcntl.LOCK_EX, wait)


def take_turn(entry: str) -> Lock:
    """Lock the right to make *entry*. Blocks while another process makes it, but not while processes use it.

    Give it up by `Lock.remove` and `Lock.release`.
    """
    lock = take(entry + TURN)
    assert lock is not None
    return lock


def _lock(entry: str, kind: int, wait: bool) -> Lock | None:
    path = entry + SUFFIX
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)
            if _is(fd, path):
                return Lock(fd, path)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed with its entry meanwhile: another has its name, or none


def _is(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def last_used(entry: str) -> float:
    """Return when a holder last called `Lock.touch`, in seconds since the epoch; 0.0 if there is no lock file."""
    try:
        return os.stat(entry + SUFFIX).st_mtime
    except FileNotFoundError:
        return 0.0


def hold_own(environ: Mapping[str, str], prefix: str) -> str:
    """Hold the code directory of *environ* and the environment *prefix* (sys.prefix), if they are of the node's caches.

    A template calls this before it imports anything else, and the workers that it forks inherit the locks. So nothing
    removes what they run before the last of them has ended.

    Return why this process cannot run, "" if it can: a directory was removed since the launch was planned.
    """
    code = environ.get(CODE_DIR, "")
    entries = [code] if code else []
    if os.path.exists(prefix + SUFFIX):
        entries.append(prefix)
    for entry in entries:
        lock = hold(entry, wait=False) if os.path.isdir(entry) else None
        if lock is None or not os.path.isdir(entry):
            return f"{entry} is not there any more, because it was unused for long: launch the group again"
        lock.touch()
        _own.append(lock)
    return ""
