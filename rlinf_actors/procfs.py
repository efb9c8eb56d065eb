"""What Linux says and does about processes: prctl and /proc. Stateless; no process is started here."""

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
"""Variable that is set in every worker to its id, so that a search of /proc finds the processes that it started."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_RLIMIT_LOCKS = 10
"""A resource limit that Linux has ignored since 2.4.25, and that systemd and shells leave at infinity."""
_BRAND_BITS, _MIN_BRAND_BITS = 62, 40

_PIDFD_INFO = struct.Struct("=Q52xi")
"""The mask and the exit status in struct pidfd_info."""
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_DEEPEST = 1000
"""Processes on a way up; a longer one is no way."""

_libc = ctypes.CDLL(None, use_errno=True)
_MARK = WORKER_MARK.encode() + b"="


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def open_standard_descriptors() -> None:
    """Put /dev/null where descriptor 0, 1 or 2 is closed (``script >&-``), before anything else gets its number.

    libuv aborts at a socket that has one of them, and what is printed would go to that socket.
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
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int, parent: int | None = None) -> None:
    """Get *signal* when the thread that started this process ends; 0 takes it back.

    Args:
        signal: its number.
        parent: pid that the parent must have; the process exits when that one is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """What ps and top call this process (15 bytes)."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def mark_slot() -> int:
    """Address of the value of the worker mark in the environment this process was started with, 0 without one.

    Only true until somebody changes the variable.
    """
    _libc.getenv.restype = ctypes.c_void_p
    return _libc.getenv(WORKER_MARK.encode()) or 0


def write_mark(slot: int, size: int, mark: str) -> None:
    """Write *mark* into the environment block that /proc/PID/environ shows.

    A forked process keeps the block of the process it came from, whatever os.environ says; this
    makes it, and what it forks, recognisable. Does nothing when *mark* is longer than *size* bytes.
    """
    data = mark.encode()
    if slot and len(data) <= size:
        ctypes.memmove(slot, data.ljust(size, b"\0"), size)


def mark_of(pid: int) -> str | None:
    """Id of the worker that *pid* is, or comes from; None if it has none, cannot be read or is gone."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    at = 0 if environ.startswith(_MARK) else environ.find(b"\0" + _MARK) + 1
    if at == 0 and not environ.startswith(_MARK):
        return None
    return environ[at + len(_MARK) :].split(b"\0", 1)[0].decode(errors="replace") or None


def brand(worker: str) -> bool:
    """Give this process, and all that it starts from now on, a mark that only root can take off again.

    It is the hard limit of a resource that the kernel counts no more. A limit is inherited over fork, exec, setsid and
    an empty environment, everybody can read it (/proc/PID/limits), and without CAP_SYS_RESOURCE it can only be lowered.
    A worker below another worker (a cluster within a worker) gets a number below that of the other one.

    Args:
        worker: its id.

    Returns:
        Whether the process has it. It has not where its limit had been lowered to nearly nothing before.
    """
    number, hard = _brand(worker), resource.getrlimit(_RLIMIT_LOCKS)[1]
    while hard != resource.RLIM_INFINITY and number >= hard:
        number >>= 1
    if number.bit_length() < _MIN_BRAND_BITS:
        return False
    resource.setrlimit(_RLIMIT_LOCKS, (number, number))
    return True


def branded(pid: int, workers: Iterable[str]) -> str | None:
    """Return which of these workers *pid* is, or comes from, by its brand; None if none of them, or it is gone.

    A process of another user is none of them, unless this user is root: it may have chosen such a limit itself.
    """
    number = _limit(pid)
    if number is None or not _MIN_BRAND_BITS <= number.bit_length() <= _BRAND_BITS:
        return None
    shift = _BRAND_BITS - number.bit_length()
    found = next((worker for worker in workers if _brand(worker) >> shift == number), None)
    return found if found is not None and os.geteuid() in (0, _user(pid)) else None


def _brand(worker: str) -> int:
    """A number of exactly _BRAND_BITS bits."""
    digest = int.from_bytes(hashlib.sha256(worker.encode()).digest()[:8], "big")
    return 1 << (_BRAND_BITS - 1) | digest >> (64 - _BRAND_BITS + 1)


def _limit(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            text = file.read()
    except OSError:
        return None
    at = text.find(b"Max file locks")
    words = text[at + 14 :].split(None, 2)[:2] if at >= 0 else []
    return int(words[1]) if len(words) == 2 and words[1].isdigit() else None


def _user(pid: int) -> int:
    """The real user of a process, -1 if it is gone. Its directory in /proc is root's where it may not be traced."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return -1
    return int(text[text.index(b"\nUid:") + 5 :].split(None, 1)[0])


@dataclass(frozen=True)
class Stat:
    """Some of /proc/PID/stat. `started` is in clock ticks since boot; with the pid it names a process for good."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int


def stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        return stat_of(pid)
    except OSError:
        return None


def stat_of(pid: int) -> Stat:
    """The same of a process that is certainly there.

    Raises:
        OSError: it cannot be looked at: no descriptor is left, perhaps.
    """
    text = Path(f"/proc/{pid}/stat").read_bytes()
    fields = text[text.rindex(b")") + 2 :].split()
    state, parent, group, session = fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3])
    return Stat(pid, state, parent, group, session, int(fields[19]))


def pidfd_of(pid: int) -> int:
    """A pidfd of a process.

    Raises:
        ProcessLookupError: it is gone, though its number may be a group's or a session's yet.
        OSError: it cannot be made: no descriptor is left.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # EINVAL: a number that is one still, before Linux 6.15
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
        raise


def open_pidfd(pid: int, started: int) -> int:
    """A pidfd of a process that began then (clock ticks since the boot); -1 if it is gone.

    The pid may be another's by now, or a thread's.

    Raises:
        OSError: nobody can tell: no descriptor is left.
    """
    pidfd = -1
    try:
        found = stat_of(pid)
        if found.started != started or found.state in "ZX":
            return -1
        pidfd = pidfd_of(pid)
        same = stat_of(pid).started == started
    except (FileNotFoundError, ProcessLookupError):
        same = False
    except OSError:
        if pidfd >= 0:
            os.close(pidfd)
        raise
    if same:
        return pidfd
    if pidfd >= 0:
        os.close(pidfd)
    return -1


def has_ended(pidfd: int, timeout_s: float | None = 0.0) -> bool:
    """Wait for the end of a process; whether it has come.

    By poll: select() takes no descriptor above 1023, and a process with many connections has such.

    Args:
        pidfd: of the process.
        timeout_s: how long to wait, in seconds; None waits for ever.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def is_below(pid: int, ancestor: int) -> bool:
    """True if *pid* certainly comes from the living process *ancestor*: by its parents, or as a member of its session.

    Only a fork makes a process a member of a session that another one leads, so those whose own parents have ended are
    told by that. Hold a pidfd of *pid* while this looks; it reads the way up twice, since a number on it may be given
    to another process meanwhile.
    """
    found = stat(pid)
    if found is None or pid == ancestor:
        return False
    if found.session == ancestor:
        return True
    way = _way_up(pid, ancestor)
    return way is not None and way == _way_up(pid, ancestor)


def _way_up(pid: int, ancestor: int) -> list[tuple[int, int]] | None:
    """The processes from *pid* to *ancestor*, as (pid, start); None if it does not lead there."""
    way: list[tuple[int, int]] = []
    while pid != ancestor:
        found = stat(pid)
        if found is None or found.parent == 0 or len(way) > _DEEPEST:
            return None
        way.append((pid, found.started))
        pid = found.parent
    return way


def exit_of(pidfd: int, pid: int, started: int) -> tuple[int | None, int | None] | None:
    """Return how a process of this user ended, as (exit code, signal); None if the kernel does not tell.

    It tells as long as the process's parent has not reaped it, and since Linux 6.15 whoever held a pidfd before.

    Args:
        pidfd: of the process, which has ended.
        pid, started: of the process; see Stat.
    """
    status = _status_of_zombie(pid, started)
    if status is None:
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


def _status_of_zombie(pid: int, started: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[49]) if fields[0] in (b"Z", b"X") and int(fields[19]) == started else None


def in_exec(pid: int) -> bool:
    """Whether *pid* is just between two programs: its new environment, and mark, can be read in a moment."""
    try:
        between = not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    now = stat(pid) if between else None
    return now is not None and now.state not in "ZX"


def pids() -> list[int]:
    """Every process that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies too."""
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
            # a thread has ended since it was listed: its children are another's now, which may have been read before


def subtree(pid: int) -> list[int]:
    """*pid* and all its descendants, parents first."""
    found = [pid]
    for parent in found:
        found += [child for child in children(parent) if child not in found]
    return found


def is_in_our_pid_namespace(pid: int) -> bool:
    """True unless *pid* certainly belongs to a container: then its parents and its agentd may be out of sight."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return True


def marked(ids: Iterable[str]) -> list[int]:
    """Living processes that carry the mark or the brand of one of these workers, wherever they are in the tree."""
    wanted = set(ids)
    return [pid for pid in pids() if mark_of(pid) in wanted or branded(pid, wanted) is not None]


def threads() -> list[str]:
    """Names of this process's threads, in the kernel's words."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append(Path(f"/proc/self/task/{task}/comm").read_bytes().decode(errors="replace").strip())
    return names


@dataclass(frozen=True)
class OomKills:
    """How often the kernel has killed for want of memory: in our memory cgroup, and on the machine."""

    group: int | None
    machine: int | None

    def blame(self, before: OomKills) -> str:
        """Whether one unexpected SIGKILL since *before* was that: yes, suspected or no."""
        if self.group is not None and before.group is not None and self.group > before.group:
            return "yes"
        if self.machine is not None and before.machine is not None and self.machine > before.machine:
            return "suspected"
        return "no"


def oom_kills() -> OomKills:
    """The counters now; None for one that this machine does not have."""
    return OomKills(_first_count(_memory_files(), b"oom_kill"), _first_count([Path("/proc/vmstat")], b"oom_kill"))


def _memory_files() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files += [Path(f"{root}{path}/memory.events") for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return files


def _first_count(files: list[Path], name: bytes) -> int | None:
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, count = line.partition(b" ")
            if key == name:
                return int(count)
    return None


def flocks() -> dict[tuple[int, int], int]:
    """Files that are locked by flock(2), as (device, inode), and which process has done so."""
    found = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1:2] == ["FLOCK"]:
            major, minor, inode = words[5].split(":")
            found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(words[4])
    return found


def kill(pid: int) -> None:
    """Send SIGKILL to a process; one that is gone, or is not ours, is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process group; one that is gone, or is not ours, is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
