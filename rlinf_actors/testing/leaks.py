"""LeakCheck: find processes, threads, file descriptors, files and shared memory that a test has left behind.

A process belongs to the test if its environment has the test's value of TEST_MARK. Every process that the test starts
inherits that value, also through setsid and double forks. The check waits for processes and threads that are ending, at
most GRACE_S seconds in all.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

from rlinf_actors import procfs
from rlinf_actors.cluster.local_daemon import processes_with
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.zmq_network import start_shared_thread
from rlinf_actors.settings import RUN_DIR, TEST_MARK

GRACE_S = 5.0
SHM = "/dev/shm"
_NOT_OURS = ("asyncio_", "pytest_timeout", "ThreadPoolExecutor")
"""Beginnings of the names of threads that belong to the event loop or to pytest."""
_MAX_BASE = 24
"""Longest temporary directory, in bytes, because the paths of sockets in run directories below it must be short."""

_numbers = itertools.count(1)


class LeakCheck:
    """Finds what a test leaves behind: processes, threads, file descriptors, files and shared memory.

    Make it before the test makes resources, and call `problems` after the test has closed them.
    """

    def __init__(self) -> None:
        self._mark = f"{os.getpid()}-{next(_numbers)}"
        base = tempfile.gettempdir()
        self.run_dir = tempfile.mkdtemp(prefix="rlt-", dir=base if len(os.fsencode(base)) <= _MAX_BASE else "/tmp")
        self._environ = {name: os.environ.get(name) for name in (TEST_MARK, RUN_DIR)}
        os.environ[TEST_MARK] = self._mark
        os.environ[RUN_DIR] = self.run_dir
        new_event_loop().close()  # uvloop's first loop of a process makes a pipe that stays
        start_shared_thread()
        self._threads = set(threading.enumerate())
        self._fds = _fds()
        self._shm = _shm()
        self._children = set(procfs.children(os.getpid()))

    def problems(self) -> list[str]:
        """Return a sentence for each thing that the test has left behind. Kill left processes, remove files in run
        directories, and restore the environment variables that the check changed.
        """
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        deadline = time.monotonic() + GRACE_S
        found = [*self._processes(deadline), *self._left_threads(deadline), *self._left_fds()]
        files = sorted(str(path.relative_to(self.run_dir)) for path in Path(self.run_dir).rglob("*"))
        if files:
            found.append(f"files in run directories: {', '.join(files)}")
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shm = sorted(name for name in _shm() - self._shm if not _used_by_others(name))
        if shm:
            found.append(f"shared memory: {', '.join(shm)}")
        return found

    def _processes(self, deadline: float) -> list[str]:
        found = []
        for pid in processes_with(TEST_MARK, self._mark):
            if not _gone(pid, deadline):
                found.append(f"process {pid}: {_command(pid)}")
        while left := processes_with(TEST_MARK, self._mark):
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                _gone(pid, time.monotonic() + GRACE_S)
        zombies = set(procfs.children(os.getpid())) - self._children
        found += [f"child process {pid} was not waited for" for pid in sorted(zombies)]
        return found

    def _left_threads(self, deadline: float) -> list[str]:
        left = [t for t in threading.enumerate() if t not in self._threads and not t.name.startswith(_NOT_OURS)]
        for thread in left:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [f"thread {thread.name!r}" for thread in left if thread.is_alive()]

    def _left_fds(self) -> list[str]:
        left = {fd: what for fd, what in _fds().items() if self._fds.get(fd) != what}
        return [f"file descriptor {fd}: {what}" for fd, what in left.items()]


def _fds() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this listing itself
    return found


def _shm() -> set[str]:
    try:
        return set(os.listdir(SHM))
    except FileNotFoundError:
        return set()


def _used_by_others(name: str) -> bool:
    """Return True if the shared memory *name* is not a leak of the test: it belongs to another program, or no longer
    exists.

    It belongs to another program if a process that is not a descendant of this process has it open or mapped. Mappings
    are compared by inode, because sem_open maps a file before it gives the file its name.
    """
    try:
        found = os.stat(f"{SHM}/{name}")
    except FileNotFoundError:
        return True
    mapped = b" %02x:%02x %d " % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
    ours = set(procfs.subtree(os.getpid()))
    for pid in procfs.pids():
        try:
            if pid not in ours and (_has_open(pid, found) or mapped in Path(f"/proc/{pid}/maps").read_bytes()):
                return True
        except OSError:
            continue
    return not os.path.exists(f"{SHM}/{name}")  # its program may have ended during the search


def _has_open(pid: int, file: os.stat_result) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), file):
                return True
        except OSError:  # closed by now
            continue
    return False


def _gone(pid: int, deadline: float) -> bool:
    try:
        pidfd = procfs.pidfd_of(pid)
    except ProcessLookupError:
        return True
    try:
        return procfs.has_ended(pidfd, max(0.0, deadline - time.monotonic()))
    finally:
        os.close(pidfd)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "(gone now)"
