"""Make, enter, kill and remove the cgroups of workers.

The template makes a worker's cgroup before the worker runs; the worker enters it before any user code runs. The name of
a cgroup contains the template's pid and start, so that a later agentd finds the cgroups of templates that have ended.
All state is in the file system.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import signal
from collections.abc import Mapping

import msgspec

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import LEAF, PARENT, Roots, own_directory, words

_LIMIT_FILES = {
    ("memory", 2): "memory.max",
    ("pids", 2): "pids.max",
    ("memory", 1): "memory.limit_in_bytes",
    ("pids", 1): "pids.max",
}


def prepare(roots: Roots) -> Roots:
    """Make the directory in which the workers' cgroups are made, in each of *roots*, and enable the controllers there.

    Returns:
        The *roots* without the directories and controllers that failed; `Roots.why` has the reasons.
    """
    why = dict(roots.why)
    unified, enforced, v1 = roots.unified, [], {}
    try:
        if unified:
            os.makedirs(f"{unified}/{PARENT}", exist_ok=True)
    except OSError as error:
        unified = ""
        why["cgroup"] = f"{roots.unified}/{PARENT} cannot be made: {error.strerror}"
    for name in roots.enforced:
        try:
            for directory in (roots.unified, f"{roots.unified}/{PARENT}"):
                if name not in words(f"{directory}/cgroup.subtree_control"):
                    _write(f"{directory}/cgroup.subtree_control", f"+{name}")
            enforced.append(name)
        except OSError as error:
            why[name] = f"the {name} controller cannot be passed on by {roots.unified}: {error.strerror}"
    for name, directory in roots.v1.items():
        try:
            os.makedirs(f"{directory}/{PARENT}", exist_ok=True)
            v1[name] = directory
        except OSError as error:
            why[name] = f"{directory}/{PARENT} cannot be made: {error.strerror}"
    return Roots(unified, tuple(enforced), v1, why)


def enter_leaf() -> str:
    """Move this process out of its own cgroup into a child of that cgroup.

    The cgroup then has no processes of its own, and so can enable controllers for workers' cgroups.

    Returns:
        "" on success, otherwise why it failed.
    """
    here = own_directory()
    if not here:
        return "cgroup v2 is not mounted"
    try:
        os.makedirs(f"{here}/{LEAF}", exist_ok=True)
        _write(f"{here}/{LEAF}/cgroup.procs", "0")
    except OSError as error:
        return f"{here} cannot be divided: {error.strerror} (Delegate=yes in the unit)"
    return ""


class Cgroup(msgspec.Struct, frozen=True):
    """The cgroup of one worker: one directory in cgroup v2 and one for each controller of cgroup v1 that is used.

    The directories need not exist. A missing directory counts as a cgroup without processes.

    Attributes:
        unified: directory in cgroup v2, "" if v2 is not used.
        v1: directories in cgroup v1, by controller.
    """

    unified: str = ""
    v1: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def worker(self) -> str:
        """The id of the worker whose cgroup this is, "" if the cgroup has no directories."""
        return _worker_name(os.path.basename(self.directories[0])) if self.directories else ""

    @property
    def directories(self) -> list[str]:
        return [*([self.unified] if self.unified else []), *self.v1.values()]

    def make(self, limits: Mapping[str, int]) -> None:
        """Make the directories of the worker's cgroup and set its limits. *limits* is a result of `Roots.limits`.

        Raises:
            OSError: the cgroup cannot be made. Directories that were made so far are removed again.
        """
        try:
            if self.unified:
                os.mkdir(self.unified)
            for name in self.v1:
                if name in limits:
                    os.mkdir(self.v1[name])
            for name, limit in limits.items():
                version = 1 if name in self.v1 else 2
                _write(f"{self.v1.get(name, self.unified)}/{_LIMIT_FILES[name, version]}", str(limit))
            if "memory" in limits and "memory" not in self.v1:
                _write(f"{self.unified}/memory.oom.group", "1")  # a worker and its processes are of no use in part
        except OSError:
            self.remove()
            raise

    def enter(self, pid: int = 0) -> None:
        """Move the process *pid*, 0 for the calling process, and so its later children, into the worker's cgroup.

        Raises:
            OSError: that fails.
        """
        for directory in self.directories:
            if os.path.isdir(directory):
                _write(f"{directory}/cgroup.procs", str(pid))

    def kill(self) -> None:
        """Kill all processes in the worker's cgroup. With cgroup v1, processes forked meanwhile may survive."""
        if self.unified:
            with contextlib.suppress(OSError):  # already removed, or a kernel before 5.14
                _write(f"{self.unified}/cgroup.kill", "1")
                return
        for pid in self.processes():
            # a process of another user stays, and so does the cgroup, for the next cleaner
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the pids of the living processes in the worker's cgroup."""
        found: dict[int, None] = {}
        for directory in self.directories:
            found.update(dict.fromkeys(map(int, words(f"{directory}/cgroup.procs"))))
        return list(found)

    def oom_kills(self) -> int | None:
        """Return how many processes in the worker's cgroup the kernel has killed for lack of memory.

        The result is None if no memory controller counts that.
        """
        files = [f"{self.v1['memory']}/memory.oom_control"] if "memory" in self.v1 else []
        return procfs.oom_count([*files, f"{self.unified}/memory.events"])

    def remove(self) -> bool:
        """Remove the directories of the worker's cgroup that have no processes. Return True if no directory is left."""
        for directory in self.directories:
            for inner, _, _ in os.walk(directory, topdown=False):  # a cluster in a worker has cgroups below
                with contextlib.suppress(OSError):  # populated: removed later
                    os.rmdir(inner)
        return self.gone()

    def gone(self) -> bool:
        return not any(map(os.path.isdir, self.directories))


def cgroup_of(roots: Roots, keeper: procfs.Stat, worker: str) -> Cgroup:
    """Return the Cgroup of a worker, without making its directories.

    Args:
        roots: the directories for cgroups, as `prepare` returned them.
        keeper: the template process that forks the worker.
        worker: the worker's id.
    """
    return _cgroup(roots, f"{_pid_namespace()}.{keeper.pid}.{keeper.started}.{worker}")


def _cgroup(roots: Roots, name: str) -> Cgroup:
    unified = f"{roots.unified}/{PARENT}/{name}" if roots.unified else ""
    return Cgroup(unified, {controller: f"{root}/{PARENT}/{name}" for controller, root in roots.v1.items()})


def workers_of(pid: int) -> list[str]:
    """Return the ids of the workers whose cgroups contain the process *pid*, or contained it when it ended.

    There can be several, because the cgroup of a worker is below that of the worker that started it, if any. A process
    cannot hide its cgroup.
    """
    found: dict[str, None] = {}
    for line in procfs.text_of(f"/proc/{pid}/cgroup").splitlines():
        parts = line.split(":", 2)[2].removesuffix(" (deleted)").split("/")
        for parent, name in itertools.pairwise(parts):
            if parent == PARENT:
                found[_worker_name(name)] = None
    return list(found)


def leftovers(roots: Roots) -> list[Cgroup]:
    """Return the cgroups of workers whose template has ended. Templates of another pid namespace are ignored."""
    names = {
        os.path.basename(path) for root in roots.directories() for path in glob.glob(f"{glob.escape(root)}/{PARENT}/*")
    }
    return [_cgroup(roots, name) for name in sorted(names) if _is_gone(".".join(name.split(".", 3)[:3]))]


def _worker_name(name: str) -> str:
    return name.split(".", 3)[-1]


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_gone(name: str) -> bool:
    try:
        namespace, pid, started = map(int, name.split("."))
    except ValueError:
        return False
    now = procfs.stat(pid)
    return namespace == _pid_namespace() and (now is None or now.started != started or now.ended)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
