"""Workers' cgroups: made before the worker runs, entered by itself before any code of the user's, removed at its end.

A cgroup's name tells the process that answers for it, so that whoever comes next knows what is left over.
Stateless beside the file system.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import LEAF, PARENT, Roots, own_directory, words

_LIMIT_FILES = {
    ("memory", 2): "memory.max",
    ("pids", 2): "pids.max",
    ("memory", 1): "memory.limit_in_bytes",
    ("pids", 1): "pids.max",
}


def prepare(roots: Roots) -> Roots:
    """Make the parents of workers' cgroups and have the controllers passed on; what cannot be is left out, with why."""
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
    """Move this process into a leaf below its own cgroup, so that that one can pass controllers on to workers.

    Returns:
        Why that cannot be, "" if it is done.
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


@dataclass(frozen=True)
class Cgroup:
    """One worker's: a directory per hierarchy. Made or not; what is not there is as if it were empty.

    Attributes:
        unified: its directory of v2, "" without.
        v1: controller to its directory of v1.
    """

    unified: str = ""
    v1: dict[str, str] = field(default_factory=dict)

    @property
    def worker(self) -> str:
        """Id of the worker that it is, or was, made for; "" without any directory."""
        return _worker_name(os.path.basename(self.directories[0])) if self.directories else ""

    @property
    def directories(self) -> list[str]:
        """All of them."""
        return [*([self.unified] if self.unified else []), *self.v1.values()]

    def make(self, limits: Mapping[str, int]) -> None:
        """Make it, with `Roots.limits`.

        Raises:
            OSError: it cannot be made; nothing of it is left then.
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

    def enter(self) -> None:
        """Move the calling process into it; what it starts from now on follows.

        Raises:
            OSError: the kernel refuses.
        """
        for directory in self.directories:
            if os.path.isdir(directory):
                _write(f"{directory}/cgroup.procs", "0")

    def kill(self) -> None:
        """SIGKILL to all that is in it: v2 reaches also what forks meanwhile, v1 what can be read now."""
        if self.unified:
            with contextlib.suppress(OSError):  # gone already, or a kernel before 5.14
                _write(f"{self.unified}/cgroup.kill", "1")
                return
        for pid in self.processes():
            # one that has become another user's stays, and its cgroup, which whoever comes next finds
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The living ones in it."""
        found: dict[int, None] = {}
        for directory in self.directories:
            found.update(dict.fromkeys(map(int, words(f"{directory}/cgroup.procs"))))
        return list(found)

    def oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed for want of memory; None without a memory controller."""
        files = [f"{self.v1['memory']}/memory.oom_control"] if "memory" in self.v1 else []
        for path in [*files, f"{self.unified}/memory.events"]:
            for line in _lines(path):
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None

    def remove(self) -> bool:
        """Remove the directories that are empty; returns whether all are gone."""
        for directory in self.directories:
            for inner, _, _ in os.walk(directory, topdown=False):  # a cluster in a worker has its own below
                with contextlib.suppress(OSError):  # populated: somebody looks again
                    os.rmdir(inner)
        return self.gone()

    def gone(self) -> bool:
        """Whether it is not there."""
        return not any(map(os.path.isdir, self.directories))


def cgroup_of(roots: Roots, keeper: procfs.Stat, worker: str) -> Cgroup:
    """Where the cgroup of a worker is, or would be.

    Args:
        roots: as `prepare` gave them.
        keeper: the process that answers for it: its template.
        worker: its id.
    """
    name = f"{PARENT}/{_keeper_name(keeper)}.{worker}"
    unified = f"{roots.unified}/{name}" if roots.unified else ""
    return Cgroup(unified, {controller: f"{root}/{name}" for controller, root in roots.v1.items()})


def workers_of(pid: int) -> list[str]:
    """Ids of the workers whose cgroups a process is in, or was when it died: nothing it does can hide that."""
    found: dict[str, None] = {}
    for line in _lines(f"/proc/{pid}/cgroup"):
        parts = line.split(":", 2)[2].removesuffix(" (deleted)").split("/")
        for parent, name in itertools.pairwise(parts):
            if parent == PARENT:
                found[_worker_name(name)] = None
    return list(found)


def leftovers(roots: Roots) -> list[Cgroup]:
    """Workers' cgroups whose template is gone. Those of other pid namespaces are nobody's here."""
    names = {name for root in roots.directories() for name in _names(f"{root}/{PARENT}")}
    found = []
    for name in sorted(names):
        if _is_gone(".".join(name.split(".", 3)[:3])):
            unified = f"{roots.unified}/{PARENT}/{name}" if roots.unified else ""
            found.append(Cgroup(unified, {c: f"{root}/{PARENT}/{name}" for c, root in roots.v1.items()}))
    return found


def _names(directory: str) -> Iterable[str]:
    try:
        return [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except OSError:
        return []


def _worker_name(name: str) -> str:
    return name.split(".", 3)[-1]


def _keeper_name(keeper: procfs.Stat) -> str:
    return f"{_pid_namespace()}.{keeper.pid}.{keeper.started}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_gone(name: str) -> bool:
    try:
        namespace, pid, started = map(int, name.split("."))
    except ValueError:
        return False
    now = procfs.stat(pid)
    return namespace == _pid_namespace() and (now is None or now.started != started or now.state in "ZX")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
