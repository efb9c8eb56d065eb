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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

# no import of a package: interpreters without msgspec run this too
WORKER_MARK = "RLINF_ACTORS_WORKER"
"""The worker mark: an environment variable with the worker's id, by which /proc shows the processes of a worker."""
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_RLIMIT_LOCKS = 10
"""The resource limit that `brand` uses: Linux has ignored it since 2.4.25; systemd and shells leave it unlimited."""
_BRAND_BITS, _MIN_BRAND_BITS = 62, 40

_PIDFD_INFO = struct.Struct("=Q52xi")
"""Mask and exit status in struct pidfd_info."""
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_DEEPEST = 1000
"""Most ancestors that a process can have; a longer chain is a loop of reused pids."""

_libc = ctypes.CDLL(None, use_errno=True)
_MARK = f"{WORKER_MARK}="


def text_of(path: str) -> str:
    """Return the text of the file *path*, "" if the file cannot be read."""
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
    """Open /dev/null in place of each of the descriptors 0, 1 and 2 that is closed (a script run with ``>&-``).

    Otherwise a socket could get such a number. libuv aborts then, and printed text would go into the socket.
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
    """Make this process the new parent of its descendants whose own parents end, in place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int, parent: int | None = None) -> None:
    """Let the kernel send *signal* (0: none) to this process when the thread that started this process ends.

    If *parent* is given and is no longer this process's parent, exit at once, because the signal would never come.
    """
    _prctl(_PR_SET_PDEATHSIG, signal)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


CHANGES_USERS = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""The capabilities that agentd needs to start workers as other users, with their numbers."""
FINDS_LEFTOVERS = {"CAP_SYS_PTRACE": 19}
"""The capability without which it cannot read the worker marks of other users' processes."""


def missing_capabilities(needed: Mapping[str, int], pid: int | str = "self") -> list[str]:
    """Return the names of those capabilities in *needed* that the process *pid* does not have."""
    words = text_of(f"/proc/{pid}/status").partition("\nCapEff:")[2].split(None, 1)
    mask = int(words[0], 16) if words else 0
    return [name for name, number in needed.items() if not mask >> number & 1]


def forbid_dumps() -> None:
    """Close this process's memory, environment and descriptors to other processes of its user: /proc/PID and ptrace are
    for root alone from now on, and a crash leaves no core file.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def set_name(name: str) -> None:
    """Set the name that ps and top show for this process. Only the first 15 bytes are used."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def set_title(title: str) -> None:
    """Set the command line that ps, htop and nvidia-smi show for this process.

    The title takes the place of the words with which the process, or the one that it was forked from, was executed, as
    far as there is room.
    """
    fields = text_of("/proc/self/stat").rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # arg_start and arg_end: fields 48 and 49 of proc_pid_stat(5)
    if begin < end:
        ctypes.memmove(begin, title.encode()[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def mark_slot() -> int:
    """Return where the worker mark's value is in the memory of this process, 0 if the process has no worker mark.

    The mark is an environment variable with a worker's id. The address is valid until the variable is changed.
    """
    _libc.getenv.restype = ctypes.c_void_p
    return _libc.getenv(WORKER_MARK.encode()) or 0


def write_mark(slot: int, size: int, mark: str) -> None:
    """Write a worker's id into the environment that /proc/PID/environ shows for this process.

    By this mark agentd and templates find the processes of a worker. A forked worker must write it, because /proc shows
    the environment with which its parent started, whatever os.environ says.

    Args:
        slot: the address from `mark_slot`; 0 to do nothing.
        size: number of bytes that are free at that address. A longer mark is not written.
        mark: the worker's id.
    """
    data = mark.encode()
    if slot and len(data) <= size:
        ctypes.memmove(slot, data.ljust(size, b"\0"), size)


def mark_of(pid: int) -> str | None:
    """Return the id of the worker that the process *pid* belongs to, by the mark in its environment.

    The result is None if the process has no mark or its environment cannot be read.
    """
    found = (entry for entry in text_of(f"/proc/{pid}/environ").split("\0") if entry.startswith(_MARK))
    return next(found, "").removeprefix(_MARK) or None


def brand(worker: str) -> bool:
    """Mark this process and its later children as processes of a worker, by a resource limit that encodes the worker's
    id.

    The limit is the hard RLIMIT_LOCKS, which the kernel does not enforce any more. A limit is inherited over fork,
    exec, setsid and an empty environment, every user can read it (/proc/PID/limits), and without CAP_SYS_RESOURCE a
    process can only lower it. A worker that another worker started gets a lower number than its ancestor.

    Returns:
        False if the limit was too low already, so that this process could not be marked.
    """
    number, hard = _brand(worker), resource.getrlimit(_RLIMIT_LOCKS)[1]
    while hard != resource.RLIM_INFINITY and number >= hard:
        number >>= 1
    if number.bit_length() < _MIN_BRAND_BITS:
        return False
    resource.setrlimit(_RLIMIT_LOCKS, (number, number))
    return True


def branded(pid: int, workers: Iterable[str]) -> str | None:
    """Return which of *workers* (ids) the process *pid* belongs to, by the resource limit that `brand` sets; None for
    none.

    A process of another user is ignored unless this user is root, because the other user may have set such a limit on
    purpose.
    """
    words = text_of(f"/proc/{pid}/limits").partition("Max file locks")[2].split(None, 2)
    number = int(words[1]) if len(words) == 3 and words[1].isdigit() else 0
    if not _MIN_BRAND_BITS <= number.bit_length() <= _BRAND_BITS:
        return None
    shift = _BRAND_BITS - number.bit_length()
    found = next((worker for worker in workers if _brand(worker) >> shift == number), None)
    return found if found is not None and os.geteuid() in (0, user_of(pid)) else None


def _brand(worker: str) -> int:
    """Return the number that encodes a worker's id as a resource limit: a hash of exactly _BRAND_BITS bits."""
    digest = int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], "big")
    return 1 << (_BRAND_BITS - 1) | digest >> (64 - _BRAND_BITS + 1)


def user_of(pid: int) -> int:
    """Return the real uid of the process *pid*, -1 if the process has ended."""
    words = text_of(f"/proc/{pid}/status").partition("\nUid:")[2].split(None, 1)
    return int(words[0]) if words else -1


class Stat(NamedTuple):
    """State of a process, from /proc/PID/stat.

    Attributes:
        pid: pid of the process.
        state: of its main thread: one letter, such as "R" (running) or "Z" (zombie).
        parent: pid of its parent.
        group: its process group.
        session: its session.
        started: when it started, in clock ticks since boot. pid and start together identify a process.
        threads: number of its threads, including a main thread that has ended before the others.
        status: exit status of a zombie as waitpid() gives it; 0 for a process of another user.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    threads: int
    started: int
    status: int

    @property
    def ended(self) -> bool:
        """True if all threads have ended. A main thread may be a zombie while other threads of its process run."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def stopped(self) -> bool:
        """True if the main thread is stopped by a signal, or by a debugger."""
        return self.state in "Tt"


def stat(pid: int) -> Stat | None:
    """Return the state of the process *pid*, None if it cannot be read."""
    try:
        return stat_of(pid)
    except OSError:
        return None


def stat_of(pid: int) -> Stat:
    """Return the state of the process *pid*.

    Raises:
        OSError: the process has ended, or this process has no free file descriptor.
    """
    text = Path(f"/proc/{pid}/stat").read_bytes()
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), *(int(fields[n]) for n in (1, 2, 3, 17, 19, 49)))


def pidfd_of(pid: int) -> int:
    """Return a new pidfd of the process *pid*.

    Raises:
        ProcessLookupError: the process has ended. Its pid may still name a process group or a session.
        OSError: this process has no free file descriptor.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # EINVAL: the pid of a group or session, before Linux 6.15
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        raise


def open_pidfd(pid: int, started: int) -> int:
    """Return a new pidfd of the process *pid* that started at *started* (clock ticks since boot); -1 if it has ended.

    Raises:
        OSError: this process has no free file descriptor.
    """
    same = False
    try:
        found = stat_of(pid)
        if found.started != started or found.ended:
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
    """Return True if the process of *pidfd* has ended, or ends within *timeout_s* seconds (None:
    wait without limit).
    """
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def is_below(pid: int, ancestor: int) -> bool:
    """Return True if the process *pid* certainly descends from the living process *ancestor*, by its parents or its
    session.

    Only a fork makes a process a member of another process's session, so the session proves the descent even if parents
    have ended. The caller must hold a pidfd of *pid*. The ancestors are read twice, because a pid among them may be
    reused in between.
    """
    found = stat(pid)
    if found is None or pid == ancestor:
        return False
    if found.session == ancestor:
        return True
    chain = _ancestors(pid, ancestor)
    return chain is not None and chain == _ancestors(pid, ancestor)


def _ancestors(pid: int, ancestor: int) -> list[tuple[int, int]] | None:
    """Return (pid, start) of *pid*, its parent and so on, up to the child of *ancestor*; None if *ancestor* is not
    above *pid*.
    """
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

    Before Linux 6.15 it can be read only until the parent reaps the process.

    Args:
        pidfd: pidfd of the process.
        pid: its pid.
        started: when it started, in clock ticks since boot.
    """
    found = stat(pid)
    if found is not None and found.started == started and found.ended:
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
    """Return True if the process *pid* is in the middle of execve(), so that its new environment cannot be read yet."""
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
    """Return the pids of the direct children of the process *pid*, including zombies."""
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
    """Return *pid* and the pids of all descendants of that process, parents before their children."""
    found = [pid]
    for parent in found:
        found += [child for child in children(parent) if child not in found]
    return found


def is_in_our_pid_namespace(pid: int) -> bool:
    """Return False if the process *pid* is certainly in another pid namespace (of a container, for
    example), else True.
    """
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return True


def marked(ids: Iterable[str]) -> list[int]:
    """Return the pids of all processes that belong to the workers *ids*, by their environment mark
    or resource limit.
    """
    wanted = set(ids)
    return [pid for pid in pids() if mark_of(pid) in wanted or branded(pid, wanted) is not None]


def threads() -> list[str]:
    """Return the names of this process's threads, as the kernel has them."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append(Path(f"/proc/self/task/{task}/comm").read_bytes().decode(errors="replace").strip())
    return names


class OomKills(NamedTuple):
    """How many processes the kernel has killed for lack of memory so far. None means that the machine has no such
    counter.

    Attributes:
        group: number in this process's memory cgroup.
        machine: number on the whole machine.
    """

    group: int | None
    machine: int | None

    def blame(self, before: OomKills) -> str:
        """Return whether lack of memory may have caused a SIGKILL that happened between the counts *before* and these
        counts.

        The result is "yes" if the cgroup's counter has grown, "suspected" if only the machine's has, and "no"
        otherwise.
        """
        if self.group is not None and before.group is not None and self.group > before.group:
            return "yes"
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "suspected"
        return "no"


def oom_kills() -> OomKills:
    """Return how many processes the kernel has killed for lack of memory so far."""
    files = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files += [f"{root}{path}/memory.events" for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return OomKills(oom_count(files), oom_count(["/proc/vmstat"]))


def oom_count(files: Iterable[str]) -> int | None:
    """Return the number of processes killed for lack of memory, from the first of the kernel's *files* that has it.

    The result is None if no file has the number.
    """
    for file in files:
        for line in text_of(file).splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill":
                return int(count)
    return None


def locks(kind: str = "FLOCK") -> dict[tuple[int, int], int]:
    """Return the files of this machine that are locked by flock(2), or with *kind* "POSIX" by fcntl(2).

    Each file is given as (device, inode), with the pid of the process that locked it.
    """
    found = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1:2] == [kind]:
            major, minor, inode = words[5].split(":")
            found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(words[4])
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process *pid*. If it has ended or belongs to another user, do nothing."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group *pid*. If it has ended or belongs to another user, do nothing."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
