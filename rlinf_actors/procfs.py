"""Functions on Linux processes: prctl, /proc and pidfds. Stateless; starts no process. Any thread."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import resource
import select
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# no import of a package: interpreters without msgspec run this too
WORKER_MARK = "RLINF_ACTORS_WORKER"
"""The worker mark: an environment variable set to the worker's id, so that /proc shows which processes a worker
started."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_RLIMIT_LOCKS = 10
"""The resource limit that `brand` uses: Linux has ignored it since 2.4.25; systemd and shells leave it unlimited."""
_BRAND_BITS, _MIN_BRAND_BITS = 62, 40

_PIDFD_INFO = struct.Struct("=Q52xi")
"""The mask and the exit status in struct pidfd_info."""
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_DEEPEST = 1000
"""Most ancestors that a process can have; a longer chain is a loop of reused pids."""

_libc = ctypes.CDLL(None, use_errno=True)
_MARK = f"{WORKER_MARK}="


def text_of(path: str) -> str:
    """Return the text of a file, "" if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def open_standard_descriptors() -> None:
    """Open /dev/null in place of each closed descriptor among 0, 1 and 2 (``script >&-``).

    If a socket got such a number, libuv would abort, and printed text would go into the socket.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            null = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)


def set_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int, parent: int | None = None) -> None:
    """Let the kernel send *signal* (0: none) to this process when the thread that started this process ends.

    If the parent is not *parent* any more (None: any parent), this process exits at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """Set the name of this process in ps and top (15 bytes)."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def mark_slot() -> int:
    """Return the memory address of the worker mark's value in this process's initial environment, 0 without a mark.

    The address is valid until the variable is changed.
    """
    _libc.getenv.restype = ctypes.c_void_p
    return _libc.getenv(WORKER_MARK.encode()) or 0


def write_mark(slot: int, size: int, mark: str) -> None:
    """Write the worker's id into the environment that /proc/PID/environ shows for this process and its children.

    A forked worker needs this, since /proc shows its parent's initial environment, whatever os.environ says. *slot* is
    the address from `mark_slot` (0: do nothing), *size* the bytes that are free there; a longer mark is not written.
    """
    data = mark.encode()
    if slot and len(data) <= size:
        ctypes.memmove(slot, data.ljust(size, b"\0"), size)


def mark_of(pid: int) -> str | None:
    """Return the worker id in the mark of process *pid*; None if it has no mark or its environment cannot be read."""
    found = (entry for entry in text_of(f"/proc/{pid}/environ").split("\0") if entry.startswith(_MARK))
    return next(found, "").removeprefix(_MARK) or None


def brand(worker: str) -> bool:
    """Brand this process and its later children: set a resource limit that encodes the worker's id.

    The limit is the hard RLIMIT_LOCKS, which the kernel does not enforce any more. A limit is inherited over fork,
    exec, setsid and an empty environment, every user can read it (/proc/PID/limits), and without CAP_SYS_RESOURCE a
    process can only lower it. A worker that another worker started gets a lower number than its ancestor. Return False
    if the limit was too low already, so that the process has no brand of its own.
    """
    number, hard = _brand(worker), resource.getrlimit(_RLIMIT_LOCKS)[1]
    while hard != resource.RLIM_INFINITY and number >= hard:
        number >>= 1
    if number.bit_length() < _MIN_BRAND_BITS:
        return False
    resource.setrlimit(_RLIMIT_LOCKS, (number, number))
    return True


def branded(pid: int, workers: Iterable[str]) -> str | None:
    """Return the id among *workers* that the brand of process *pid* encodes (see `brand`); None if it encodes none.

    A process of another user is ignored unless this user is root: that user may have set such a limit on purpose.
    """
    words = text_of(f"/proc/{pid}/limits").partition("Max file locks")[2].split(None, 2)
    number = int(words[1]) if len(words) == 3 and words[1].isdigit() else 0
    if not _MIN_BRAND_BITS <= number.bit_length() <= _BRAND_BITS:
        return None
    shift = _BRAND_BITS - number.bit_length()
    found = next((worker for worker in workers if _brand(worker) >> shift == number), None)
    return found if found is not None and os.geteuid() in (0, _user(pid)) else None


def _brand(worker: str) -> int:
    """Return the brand of a worker id: a hash of exactly _BRAND_BITS bits."""
    digest = int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], "big")
    return 1 << (_BRAND_BITS - 1) | digest >> (64 - _BRAND_BITS + 1)


def _user(pid: int) -> int:
    """Return the real user id of a process, -1 if the process has ended."""
    words = text_of(f"/proc/{pid}/status").partition("\nUid:")[2].split(None, 1)
    return int(words[0]) if words else -1


@dataclass(frozen=True)
class Stat:
    """Fields of /proc/PID/stat.

    `started` is in clock ticks since boot; with the pid it identifies a process. `status` is a zombie's exit status as
    waitpid() gives it; 0 for a process of another user.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int
    status: int


def stat(pid: int) -> Stat | None:
    """Return the fields of /proc/PID/stat, None if they cannot be read."""
    try:
        return stat_of(pid)
    except OSError:
        return None


def stat_of(pid: int) -> Stat:
    """Return the fields of /proc/PID/stat. Raises OSError if the process has ended, or this process has no free file
    descriptor.
    """
    text = Path(f"/proc/{pid}/stat").read_bytes()
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), *(int(fields[n]) for n in (1, 2, 3, 19, 49)))


def pidfd_of(pid: int) -> int:
    """Open a pidfd of a process.

    Raises ProcessLookupError if the process has ended, even if its pid still names a process group or a session, and
    OSError if this process has no free file descriptor.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # EINVAL: the pid of a group or session, before Linux 6.15
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        raise


def open_pidfd(pid: int, started: int) -> int:
    """Open a pidfd of the process with this pid and start (clock ticks since boot). Return -1 if that process has
    ended. Raises OSError if this process has no free file descriptor.
    """
    same = False
    try:
        found = stat_of(pid)
        if found.started != started or found.state in "ZX":
            return -1
        pidfd = pidfd_of(pid)
        try:
            same = stat_of(pid).started == started
        finally:
            if not same:
                os.close(pidfd)
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return pidfd if same else -1


def has_ended(pidfd: int, timeout_s: float | None = 0.0) -> bool:
    """Wait until a process ends, at most *timeout_s* seconds (None: no limit). Return False if it still runs."""
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def is_below(pid: int, ancestor: int) -> bool:
    """True if process *pid* certainly descends from the living process *ancestor*, by its parents or by its session.

    Only a fork makes a process a member of another process's session, so the session tells even if parents have ended.
    The caller must hold a pidfd of *pid*. The ancestors are read twice, since a pid among them may be reused in
    between.
    """
    found = stat(pid)
    if found is None or pid == ancestor:
        return False
    if found.session == ancestor:
        return True
    chain = _ancestors(pid, ancestor)
    return chain is not None and chain == _ancestors(pid, ancestor)


def _ancestors(pid: int, ancestor: int) -> list[tuple[int, int]] | None:
    """Return the processes from *pid* up to *ancestor*, as (pid, start); None if *ancestor* is none of them."""
    chain: list[tuple[int, int]] = []
    while pid != ancestor:
        found = stat(pid)
        if found is None or found.parent == 0 or len(chain) > _DEEPEST:
            return None
        chain.append((pid, found.started))
        pid = found.parent
    return chain


def exit_of(pidfd: int, pid: int, started: int) -> tuple[int | None, int | None] | None:
    """Return how a process of this user ended: (exit code, None) or (None, signal); None if that cannot be read.

    It can be read until the parent reaps the process, and since Linux 6.15 also afterwards by the pidfd.
    """
    found = stat(pid)
    if found is not None and found.started == started and found.state in "ZX":
        status = found.status
    else:
        info = bytearray(_PIDFD_INFO.size)
        _PIDFD_INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, 0)
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except OSError:  # an older kernel
            return None
        mask, status = _PIDFD_INFO.unpack(info)
        if not mask & _PIDFD_INFO_EXIT:
            return None
    return (os.WEXITSTATUS(status), None) if os.WIFEXITED(status) else (None, os.WTERMSIG(status))


def in_exec(pid: int) -> bool:
    """True if process *pid* is in the middle of execve(), so that its new environment cannot be read yet."""
    try:
        between = not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    now = stat(pid) if between else None
    return now is not None and now.state not in "ZX"


def pids() -> list[int]:
    """Return the pids of all processes that /proc shows to this process."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process, including zombies."""
    while True:
        try:
            found: list[int] = []
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
            return found
        except (FileNotFoundError, ProcessLookupError):
            if os.path.exists("/proc/self/task") and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
                return [c for c in pids() if (at := stat(c)) and at.parent == pid]  # a kernel without PROC_CHILDREN
            if not os.path.exists(f"/proc/{pid}/task"):
                return []
            # a listed thread has ended: its children have gone to another thread, which may have been read before


def subtree(pid: int) -> list[int]:
    """Return *pid* and the pids of all its descendants, parents first."""
    found = [pid]
    for parent in found:
        found += [child for child in children(parent) if child not in found]
    return found


def is_in_our_pid_namespace(pid: int) -> bool:
    """Return False if process *pid* is certainly in another pid namespace, for example a container's; else True."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return True


def marked(ids: Iterable[str]) -> list[int]:
    """Return the pids of the processes that the workers with these ids started: by WORKER_MARK or by their `brand`."""
    wanted = set(ids)
    return [pid for pid in pids() if mark_of(pid) in wanted or branded(pid, wanted) is not None]


def threads() -> list[str]:
    """Return the names that the kernel has for the threads of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append(Path(f"/proc/self/task/{task}/comm").read_bytes().decode(errors="replace").strip())
    return names


@dataclass(frozen=True)
class OomKills:
    """Numbers of processes that the kernel killed for lack of memory; None where the machine has no such counter.

    `group` counts those in this process's memory cgroup, `machine` those on the whole machine.
    """

    group: int | None
    machine: int | None

    def blame(self, before: OomKills) -> str:
        """Return if an unexpected SIGKILL since *before* was for lack of memory: "yes", "suspected" or "no"."""
        if self.group is not None and before.group is not None and self.group > before.group:
            return "yes"
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "suspected"
        return "no"


def oom_kills() -> OomKills:
    """Return the present numbers of processes that the kernel killed for lack of memory."""
    files = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files += [f"{root}{path}/memory.events" for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return OomKills(oom_count(files), oom_count(["/proc/vmstat"]))


def oom_count(files: Iterable[str]) -> int | None:
    """Return the number of OOM kills in the first of these kernel files that has one, None if none has."""
    for file in files:
        for line in text_of(file).splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill":
                return int(count)
    return None


def flocks() -> dict[tuple[int, int], int]:
    """Return, for each file locked by flock(2) as (device, inode), the pid of the process that locked the file."""
    found = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1:2] == ["FLOCK"]:
            major, minor, inode = words[5].split(":")
            found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(words[4])
    return found


def kill(pid: int) -> None:
    """Send SIGKILL to a process; do nothing if it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Send SIGKILL to process group *pid*; do nothing if the group has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
