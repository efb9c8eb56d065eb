"""Find the directories in which this process may make cgroups for workers, and which limits hold there. Read only.

cgroup v2 is enough for everything. Of v1 only the memory and pids controllers are used, where v2 lacks them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlinf_actors import procfs

PARENT = "rlinf-actors"
"""Name of the directory below a root (see Roots) that holds only workers' cgroups."""
LEAF = "keeper"
"""Name of the keeper's cgroup in rlinf-workers@.service, since the unit's own cgroup must have no processes."""
CONTROLLERS = ("memory", "pids")
_OTHER_WAYS = (
    "start rlinf-workers@USER.service, set cgroup in [workers] to a directory that is delegated to this user, or start "
    "agentd with systemd-run --scope -p Delegate=yes"
)


class Roots(msgspec.Struct, frozen=True):
    """The directories in which the cgroups of workers can be made, and the limits that can be enforced there.

    Attributes:
        unified: directory in cgroup v2, "" if this process may not make cgroups there.
        enforced: controllers ("memory", "pids") whose limits can be enforced in `unified`.
        v1: for each controller that is missing in `unified`, a directory in cgroup v1 if there is one.
        why: for each of "cgroup", "memory" and "pids" that is unavailable, the reason and what to do.
    """

    unified: str = ""
    enforced: tuple[str, ...] = ()
    v1: dict[str, str] = msgspec.field(default_factory=dict)
    why: dict[str, str] = msgspec.field(default_factory=dict)

    def missing(self, memory: int | None, pids: int | None) -> str:
        """Return why a worker's limits cannot be enforced on this machine, "" if they can.

        *memory* (bytes) and *pids* (number of processes and threads) are the limits; None stands for no limit.
        """
        wanted = [name for name, limit in (("memory", memory), ("pids", pids)) if limit is not None]
        missing = [self.why.get(name, "no cgroups are used") for name in wanted if not self._holds(name)]
        return "; ".join(dict.fromkeys(missing))

    def limits(self, memory: int | None, pids: int | None) -> dict[str, int]:
        """Return those of a worker's limits that can be enforced on this machine, by controller ("memory", "pids").

        *memory* (bytes) and *pids* (number of processes and threads) are the limits; None stands for no limit.
        """
        wanted = {"memory": memory, "pids": pids}
        return {name: limit for name, limit in wanted.items() if limit is not None and self._holds(name)}

    def _holds(self, name: str) -> bool:
        return name in self.enforced or name in self.v1

    def directories(self) -> list[str]:
        return [*([self.unified] if self.unified else []), *self.v1.values()]


class Mount(msgspec.Struct, frozen=True):
    """One mounted cgroup file system: the cgroups from `root` downwards are visible as directories from `point`
    downwards.
    """

    root: str
    point: str
    kind: str
    options: frozenset[str]

    def directory(self, path: str) -> str:
        """Return the directory of a cgroup in this mount; "" if the mount does not show the cgroup.

        *path* is the cgroup's path as in /proc/PID/cgroup.
        """
        relative = os.path.relpath(path, self.root)
        return "" if relative.startswith("..") else os.path.normpath(os.path.join(self.point, relative))


def find(wanted: str = "auto", proc: str = "/proc", under_systemd: bool | None = None, pid: int | None = None) -> Roots:
    """Find out where cgroups for workers can be made, and which limits can be enforced there.

    Args:
        wanted: "auto" to use the process's own cgroup if the process may make cgroups in it; "off" for no cgroups; or a
            directory of cgroup v2.
        proc: path of /proc.
        under_systemd: True if systemd manages this machine's cgroups; None to find out.
        pid: the process that will make the cgroups, None for this process.

    Raises:
        ValueError: *wanted* is a directory that cannot be used; the text says why.
        OSError: process *pid* has ended.
    """
    if wanted == "off":
        return _none("cgroups are switched off: set cgroup to auto in [workers]")
    if under_systemd is None:
        under_systemd = os.path.isdir("/run/systemd/system")
    mounts = read_mounts(proc)
    process = Path(proc, "self" if pid is None else str(pid))
    own = parse_paths(Path(process, "cgroup").read_text())
    user = os.geteuid() if pid is None else process.stat().st_uid
    here = directory_of("", own, mounts)
    if wanted != "auto":
        why = _unusable(wanted, here, mounts, user)
        if why:
            raise ValueError(why)
        return _unified(wanted, own_processes=False)
    unit, leaf = os.path.split(here)
    if leaf == LEAF and unit.endswith(".service"):  # of a keeper, which systemd lets divide its unit
        return _unified(unit, own_processes=False) if _writable(unit, user) else _none(f"{unit} cannot be written")
    if under_systemd and not _is_delegated(here):
        return _none(f"systemd manages the cgroups here: {_OTHER_WAYS}")
    if under_systemd and here.endswith(".service"):
        return _in_service(here, user)
    points = [mount.point for mount in mounts if mount.kind == "cgroup2"]
    if not points:
        found = _none("cgroup v2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup")
    elif not here or not _writable(here, user):
        found = _none(f"{here or points[0]} cannot be written: run as its owner, or give the container a writable one")
    else:
        found = _unified(here, own_processes=True)
    return found if under_systemd else _with_v1(found, own, mounts, user)


def own_directory() -> str:
    """Return the directory of this process's own cgroup in cgroup v2, "" if no mount shows that cgroup."""
    return directory_of("", parse_paths(Path("/proc/self/cgroup").read_text()), read_mounts("/proc"))


def directory_of(controller: str, own: dict[str, str], mounts: Sequence[Mount]) -> str:
    """Return the directory of a process's cgroup; "" if there is no such cgroup or no mount shows it.

    Args:
        controller: a controller of cgroup v1, or "" for cgroup v2.
        own: the paths of the process's cgroups, as `parse_paths` returns them.
        mounts: the mounted cgroup file systems.
    """
    kind = "cgroup" if controller else "cgroup2"
    mount = next((m for m in mounts if m.kind == kind and (not controller or controller in m.options)), None)
    return mount.directory(own[controller]) if mount is not None and controller in own else ""


def _none(why: str) -> Roots:
    return Roots(why=dict.fromkeys(("cgroup", *CONTROLLERS), why))


def read_mounts(proc: str) -> list[Mount]:
    """Return the cgroup file systems that are mounted for this process. *proc* is the path of /proc."""
    found = []
    for line in Path(proc, "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if rest and rest[0] in ("cgroup", "cgroup2"):
            point = fields[4].replace("\\040", " ")
            found.append(Mount(fields[3], point, rest[0], frozenset(rest[-1].split(","))))
    return found


def parse_paths(text: str) -> dict[str, str]:
    """Return the paths of a process's cgroups by controller of cgroup v1; the key "" stands for cgroup v2.

    *text* is the content of /proc/PID/cgroup.
    """
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _writable(directory: str, user: int) -> bool:
    return all(_may_write(path, user) for path in (directory, f"{directory}/cgroup.procs"))


def _may_write(path: str, user: int) -> bool:
    """Return True if the user with uid *user* may write to *path*.

    For another user than this process's, only the owner of the file is compared.
    """
    if user == os.geteuid():
        return os.access(path, os.W_OK)
    try:
        return user in (0, os.stat(path).st_uid)
    except OSError:
        return False


def _is_delegated(directory: str) -> bool:
    """Return True if systemd leaves the cgroup *directory* of a unit to the processes of the unit (Delegate=yes)."""
    if not directory.endswith((".scope", ".service")):
        return False
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(directory, name) == b"1"
    return False


def _in_service(directory: str, user: int) -> Roots:
    """Return the Roots for an agentd in a systemd service with Delegate=yes: workers get cgroups without limits.

    If a controller were enabled for the cgroups below, systemd (249 to 255) could not start a new main process beside
    surviving workers, and so could not restart the service.
    """
    if not _writable(directory, user):
        return _none(f"{directory} cannot be written: {_OTHER_WAYS}")
    why = f"a service with limits for workers could not be restarted while they run: {_OTHER_WAYS}"
    return Roots(directory, why=dict.fromkeys(CONTROLLERS, why))


def _unusable(wanted: str, here: str, mounts: Sequence[Mount], user: int) -> str:
    points = [mount.point for mount in mounts if mount.kind == "cgroup2"]
    point = next((point for point in points if wanted == point or wanted.startswith(f"{point}/")), None)
    if not os.path.isdir(wanted):
        return f"is {wanted!r}, which is no directory: mkdir {wanted}"
    if point is None:
        return f"is {wanted!r}, which is not on cgroup v2 ({', '.join(points) or 'not mounted'})"
    if not _writable(wanted, user):
        return f"is {wanted!r}, which user {user} cannot write: chown -R {user} {wanted}"
    common = os.path.commonpath([wanted, here]) if here else wanted
    if not _may_write(f"{common}/cgroup.procs", user):
        return (
            f"is {wanted!r}, but user {user} may not move processes there from {here}: {common}/cgroup.procs must be "
            "writable, since both are below it"
        )
    return ""


def _unified(directory: str, own_processes: bool) -> Roots:
    """Return the Roots for a writable *directory* of cgroup v2.

    *own_processes* is True if agentd's own processes are in that cgroup. A cgroup with processes cannot enable
    controllers for the cgroups below.
    """
    offered = words(f"{directory}/cgroup.controllers")
    enabled = words(f"{directory}/cgroup.subtree_control")
    is_root = not os.path.exists(f"{directory}/cgroup.events")  # only the root may have processes and controllers
    why = {}
    for name in CONTROLLERS:
        if name in enabled:
            continue
        if name not in offered:
            why[name] = f"cgroup v2 has no {name} controller in {directory}"
        elif not is_root and (own_processes or words(f"{directory}/cgroup.procs")):
            why[name] = (
                f"the {name} controller cannot be passed on by {directory}, which has processes: make an empty "
                "cgroup beside it and name it as cgroup in [workers]"
            )
    return Roots(directory, tuple(name for name in CONTROLLERS if name not in why), why=why)


def _with_v1(found: Roots, own: dict[str, str], mounts: Sequence[Mount], user: int) -> Roots:
    v1 = {}
    for name in CONTROLLERS:
        directory = directory_of(name, own, mounts)
        if name in found.why and directory and _writable(directory, user):
            v1[name] = directory
    why = {name: text for name, text in found.why.items() if name not in v1}
    return Roots(found.unified, found.enforced, v1, why)


def words(path: str) -> list[str]:
    """Return the words in the kernel's file *path*; an empty list if the file cannot be read."""
    return procfs.text_of(path).split()
