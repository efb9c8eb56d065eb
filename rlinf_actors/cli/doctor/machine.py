"""Collects the facts about this machine that `rlinf-actors doctor` checks. Changes nothing.

The checks in doctor.machine_checks turn the facts into findings. Running agentds are
found by the locks in their run directories. An agentd is left out if this user may not see its run directory or its
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.metadata
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import leftovers
from rlinf_actors.cli.doctor.machine_checks import Directory, Disk, KeyOnDisk, MachineFacts, OwnProcess
from rlinf_actors.cli.process_figures import figures_of
from rlinf_actors.cli.queries import fetch_status
from rlinf_actors.config_files import read_text
from rlinf_actors.diagnosis.machine import collect, has_template, holders
from rlinf_actors.errors import AuthenticationError, ConfigError, RlinfActorsError
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.net.discovery import named, standing_heads
from rlinf_actors.net.enrolment import PENDING
from rlinf_actors.net.head_records import parents
from rlinf_actors.net.host import endpoint_of, route_ip
from rlinf_actors.net.link import Diagnosis
from rlinf_actors.net.rpc import KeyRefusedError
from rlinf_actors.security import keyfile
from rlinf_actors.settings import CLUSTER_MARK, HEAD, KEEPER, Settings
from rlinf_actors.toml_text import parse_toml
from rlinf_actors.version import VERSION
from rlinf_actors.wire.check_values import NodeFacts
from rlinf_actors.wire.client_messages import Status

OF_UNITS = "/run/rlinf-agentd"
"""Directory in which the shipped systemd unit makes a run directory for the agentd of each user."""


LOGS_OF_UNITS = "/var/log/rlinf-agentd"
"""Directory in which the shipped systemd unit makes a directory of log files for the agentd of each user."""


@dataclass(frozen=True)
class Agentd:
    pid: int
    run_dir: str


def agentds(parents: Iterable[str], of_units: str = OF_UNITS) -> list[Agentd]:
    """Return the agentds that run on this machine, except those of private clusters. The agentds of systemd units come
    first.

    Args:
        parents: directories that contain the run directories of agentds started by hand.
        of_units: directory that contains the run directories of systemd units.
    """
    locks = [*sorted(Path(of_units).glob("*/lock"))]
    locks += [lock for parent in parents for lock in sorted(Path(parent).glob("rlinf-*/lock"))]
    held = procfs.locks()
    found = {}
    for lock in locks:
        try:
            info = lock.stat()
        except OSError:  # another user's, or just removed
            continue
        pid = held.get((info.st_dev, info.st_ino))
        # else it belongs to a private cluster; only root may read an agentd's environment
        if pid is not None and not _variable(pid, CLUSTER_MARK) and "--embedded" not in _command(pid).split():
            found[pid] = Agentd(pid, str(lock.parent))
    return list(found.values())


def is_locked(path: str) -> bool:
    """Return True if a process holds a flock(2) lock on the file *path*. Raise OSError if the file cannot be opened.

    The path may be in a directory of a user, whose link to a device root must not follow.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _variable(pid: int, name: str) -> str | None:
    """Return the value of the environment variable *name* of the process *pid*: "" if it is not set, None if this user
    may not read the environment of the process.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((os.fsdecode(one.partition(b"=")[2]) for one in entries if one.startswith(f"{name}=".encode())), "")


_DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "cloudpickle": "cloudpickle",
    "uvloop": "uvloop",
    "cryptography": "cryptography",
    "torch": "torch",
}
_CONFIG = "/etc/rlinf-actors/agentd.toml"


def inspect_machine(settings: Settings, head: str | None = None) -> MachineFacts:
    """Collect the facts about this machine from which the checks of `rlinf-actors doctor` find problems. *head* is the
    value of --head. Blocks for up to about 15 s while vendors' libraries and the head answer.
    """
    report, facts = asyncio.run(_inspect())
    running = agentds(parents(settings))
    cgroups, cgroup_error = _cgroups(settings, running)
    heads = standing_heads(settings)
    endpoint = named(head, settings)[0] or (heads[0].ways[0] if len(heads) == 1 else "")
    asked = _ask(endpoint, settings) if endpoint else HeadAnswer()
    mapping = _table(settings, "workers").get("users", {})
    users = {str(name): str(user) for name, user in mapping.items()} if isinstance(mapping, dict) else {}
    return MachineFacts(
        user=os.getuid(),
        python=sys.version_info[:3],
        interpreter=sys.executable,
        modules={name: _version(package) for name, package in _DISTRIBUTIONS.items()},
        run_parent=directory(settings.run_dir or tempfile.gettempdir()),
        memfd=_memfd_error(),
        peers=_peer_memory_error(),
        cgroups=cgroups,
        facts=facts,
        cipher_error=_cipher_error(),
        cgroup_error=cgroup_error,
        agentd=f"{running[0].pid} in {running[0].run_dir}" if running else "",
        users=users,
        unknown_users=[name for name in dict.fromkeys(users.values()) if not _is_user(name)],
        agentd_user=procfs.user_of(running[0].pid) if running else None,
        missing=procfs.missing_capabilities(procfs.CHANGES_USERS, running[0].pid if running else "self"),
        head=endpoint,
        head_error=asked.error,
        head_fix=asked.fix,
        head_version=asked.version,
        heads=[record.address for record in heads],
        key_left_s=asked.key_left_s,
        closed=asked.closed,
        num_nodes=asked.num_nodes,
        status=asked.status,
        endpoint=asked.endpoint,
        joining=[str(path) for path in sorted(keyfile.directory(settings).glob(f"*{PENDING}"))],
        version=VERSION,
        keys=key_files(settings),
        accelerators={one.type: len(one.infos) for one in report.resources},
        faults=report.faults,
        stale=stale_run_dirs(parents(settings)),
        processes=processes(),
        disks=disks(_places_on_disk(settings)),
        stale_cgroups=[cgroup.directories[0] for cgroup in leftovers(cgroups)],
    )


async def _inspect() -> tuple[ProbeReport, NodeFacts]:
    """Probe the hardware, and collect the facts that nodes have too."""
    report = await run_probe()
    held, faults = await holders([one.type for one in report.resources], os.environ)
    facts = collect(Roots())
    count = sum(len(one.infos) for one in report.resources)
    return report, msgspec.structs.replace(facts, holders=held, faults=faults, accelerators=count)


def directory(path: str) -> Directory:
    try:
        found = os.stat(path)
    except OSError as error:
        return Directory(path, error=error.strerror or str(error))
    writable = os.access(path, os.W_OK | os.X_OK)
    return Directory(path, stat.S_IMODE(found.st_mode), found.st_uid, "" if writable else "permission denied")


def disks(places: Iterable[str]) -> list[Disk]:
    """Return the file systems of the directories *places*, each once. A directory that does not exist is left out."""
    found: dict[int, Disk] = {}
    for path in places:
        with contextlib.suppress(OSError):  # not made yet
            disk, device = os.statvfs(path), os.stat(path).st_dev
            found.setdefault(device, Disk(path, disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize))
    return list(found.values())


def _places_on_disk(settings: Settings) -> list[str]:
    """Return where agentds of this machine may keep log files of workers, and where they keep sockets."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    usual = "/var/log/rlinf-actors" if os.getuid() == 0 else os.path.join(state, "rlinf-actors", "logs")
    logs = settings.log_dir or str(_table(settings, "paths").get("log_dir", usual))
    return [logs, LOGS_OF_UNITS, OF_UNITS, settings.run_dir or tempfile.gettempdir()]


def stale_run_dirs(places: Iterable[str]) -> list[str]:
    """Return the run directories of this user that an ended agentd has left behind. *places* are the directories in
    which run directories are searched.

    A run directory counts as left behind if it still has sockets of a head or of workers, its lock is not held, and no
    process uses the directory: none has its path on the command line, and no template was started from it.
    """
    pids = procfs.pids()
    commands = [_command(pid) for pid in pids]
    served = {_run_dir_of(pid) for pid in pids if not (procfs.mark_of(pid) or "x").strip("-")}
    found = []
    for path in sorted({os.path.realpath(lock.parent) for one in places for lock in Path(one).glob("rlinf-*/lock")}):
        with contextlib.suppress(OSError):
            if os.stat(path).st_uid == os.getuid() and not is_locked(f"{path}/lock"):
                used = path in served or any(path in command for command in commands)
                if not used and (os.path.exists(f"{path}/head") or os.listdir(f"{path}/w")):
                    found.append(path)
    return found


def key_files(settings: Settings) -> list[KeyOnDisk]:
    """Check the key files of this user. Return an entry for each directory of key files, and then one for each key
    file.
    """
    paths = [path for role in keyfile.ROLES if (path := keyfile.locate(settings, role)) is not None]
    found = [KeyOnDisk(str(folder), _private(folder)) for folder in sorted({path.parent for path in paths})]
    for path in paths:
        try:
            key = keyfile.load(path)
        except ConfigError as error:
            found.append(KeyOnDisk(str(path), _private(path), error=str(error.args[0])))
        else:
            found.append(KeyOnDisk(str(path), True, f"{key.role} {key.name!r}"))
    return found


def _private(path: Path) -> bool:
    found = path.stat()
    return keyfile.is_private(found.st_mode, found.st_uid, os.geteuid())


def processes() -> list[OwnProcess]:
    """Return the templates and workers of this user on this machine, and the processes that workers started. Each
    entry says whether its process is an orphan: a template without an agentd, or another process that does not
    descend from a running template.

    Processes in containers are left out. The lock of their agentd cannot be seen from outside the container's pid
    namespace, so each would look like an orphan.
    """
    marks = {pid: mark for pid in procfs.pids() if (mark := procfs.mark_of(pid)) is not None}
    marks = {pid: mark for pid, mark in marks.items() if procfs.is_in_our_pid_namespace(pid)}
    stats = {pid: at for pid in marks if (at := procfs.stat(pid)) is not None and not at.ended}
    templates = {pid for pid in stats if not marks[pid].strip("-")}
    found = []
    for pid in sorted(stats):
        kind = "template" if pid in templates else "worker"
        orphan = not _is_served(pid) if pid in templates else not has_template(pid)
        found.append(OwnProcess(pid, kind, _command(pid)[:60], orphan, figures_of(pid)))
    return found


def _is_served(template: int) -> bool:
    """Return True if an agentd runs for the template process with pid *template*, that is, if the run directory of the
    template is locked. Also True if this user may not know the run directory.

    The template's parent process does not show this, because a later agentd may have taken over the template.
    """
    run_dir = _run_dir_of(template)
    if run_dir is None:
        return True
    with contextlib.suppress(OSError):
        # through the template's root directory, because a unit may have a /tmp of its own
        return is_locked(f"/proc/{template}/root{run_dir}/lock")
    return False


def _run_dir_of(template: int) -> str | None:
    """Return the run directory of the agentd that started a template, by the file for the template's stderr: its title
    has taken the place of its command line. None if this user may not see the file.
    """
    try:
        return os.path.dirname(os.path.dirname(os.readlink(f"/proc/{template}/fd/2")))
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cipher_error() -> str:
    code = "from rlinf_actors.net.bulk_framing import Cipher; Cipher(bytes(32))"  # a broken library may end the process
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


def _memfd_error() -> str:
    try:
        fd = os.memfd_create("doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, 1 << 20)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _peer_memory_error() -> str:
    """Check that one process can open shared memory of another process through /proc, as workers do. Return the error
    text, or "" if it works.
    """
    fd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    try:
        code = f"open('/proc/{os.getpid()}/fd/{fd}', 'r+b').close()"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, timeout=30
        )
    finally:
        os.close(fd)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def _cgroups(settings: Settings, running: Sequence[Agentd]) -> tuple[Roots, str]:
    """Return the directories in which workers' cgroups can be made, and an error text ("" if there is no error).

    If agentds run (*running*), the directories are those of the first agentd. Otherwise they are those that an agentd
    would use if it were started from this shell.
    """
    wanted = str(_table(settings, "workers").get("cgroup", "auto"))
    try:
        agentd = running[0].pid if running else None
        return find(wanted, pid=agentd if agentd is None else _keeper_of(agentd) or agentd), ""
    except (OSError, ValueError) as error:  # the agentd has just ended, or the configured directory is wrong
        return Roots(), str(error)


def _table(settings: Settings, name: str) -> dict[str, Any]:
    """Return the table *name*, such as workers, of agentd's configuration files."""
    found: dict[str, Any] = {}
    file = Path(settings.config_file or _CONFIG)
    for path in (file, *sorted((file.parent / "agentd.d").glob("*.toml"))):
        # agentd --check-config reports the faults of these files
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            found.update(parse_toml(read_text(path), str(path))[name])
    return found


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _keeper_of(agentd: int) -> int | None:
    """Return the pid of the keeper in rlinf-workers@.service that the agentd with pid *agentd* uses, or None if this
    agentd does not use that unit. Workers run in the cgroup of that keeper.
    """
    path = _variable(agentd, KEEPER)
    return next((pid for pid in procfs.pids() if path and path in _command(pid).split()), None)


@dataclass(frozen=True)
class HeadAnswer:
    """The head's answer. Without one, `error` says why, and `fix` what to do ("": start the head)."""

    version: str = ""
    error: str = ""
    fix: str = ""
    key_left_s: float | None = None
    closed: tuple[str, ...] = ()
    num_nodes: int = 0
    status: Status | None = None
    endpoint: str = ""


_BUSY = (Diagnosis.MUTE, Diagnosis.CLOSES, Diagnosis.KEYED, Diagnosis.PLAIN)


def fix_of(error: Exception) -> str:
    """Return what to do about an error of the connection to the head; "" to start the head, or look at the network."""
    text = str(error)
    if isinstance(error, KeyRefusedError):
        return (
            "the head does not list this user's key: it has expired, was revoked, or was never enrolled. `rlinf-actors "
            "keys list --all` on the head's machine says which, `rlinf-actors keys enroll` makes another"
        )
    if isinstance(error, AuthenticationError):
        return "use the key of this head; if the head has a new key: `rlinf-actors keys trust KEY`"
    if any(found.value in text for found in _BUSY):
        return "it runs, but is busy or stopped: try again, and look at its log (journalctl -u rlinf-head) and its CPU"
    return ""


def _ask(endpoint: str, settings: Settings) -> HeadAnswer:
    """Ask the head at *endpoint* for its version, and for the time that this user's key has left."""
    try:
        full = endpoint if "://" in endpoint else endpoint_of(endpoint, HEAD)
        if full.startswith("tcp://"):
            route_ip(full[6:].rpartition(":")[0].strip("[]"))
        status = fetch_status(full, settings)
    except RlinfActorsError as error:  # before OSError: some of them are both
        return HeadAnswer(error=str(error), fix=fix_of(error))
    except OSError as error:
        return HeadAnswer(error=f"there is no route to it: {error.strerror or error}", fix="look at the network")
    left = None if status.key_ends_at is None else status.key_ends_at - status.at
    nodes = [node for node in status.nodes if node.state != "lost"]
    closed = tuple(node.closed for node in nodes if node.closed)
    return HeadAnswer(
        status.version, key_left_s=left, closed=closed, num_nodes=len(nodes), status=status, endpoint=full
    )
