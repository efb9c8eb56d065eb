"""Collects the facts about this machine that `rlinf-actors doctor` checks. Changes nothing.

The checks in doctor.machine_checks turn the facts into findings.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import leftovers
from rlinf_actors.cli.doctor.agentds import (
    Agentd,
    agentds,
    asked,
    environment,
    log_dir_of,
    recorded,
    table,
    usual_log_dir,
    words_of,
)
from rlinf_actors.cli.doctor.machine_checks import AgentdFacts, Directory, Disk, KeyOnDisk, MachineFacts, OwnProcess
from rlinf_actors.cli.process_figures import figures_of
from rlinf_actors.cli.queries import fetch_status
from rlinf_actors.diagnosis.machine import collect, has_template, holders
from rlinf_actors.errors import AuthenticationError, ConfigError, RlinfActorsError
from rlinf_actors.hardware.probe import run_probe
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.net.discovery import endpoint_at, named, standing_heads
from rlinf_actors.net.enrolment import PENDING
from rlinf_actors.net.head_records import parents
from rlinf_actors.net.host import route_ip
from rlinf_actors.net.link import Diagnosis
from rlinf_actors.net.rpc import KeyRefusedError
from rlinf_actors.security import keyfile
from rlinf_actors.settings import HEAD, KEEPER, Settings
from rlinf_actors.version import VERSION
from rlinf_actors.wire.check_values import NodeFacts
from rlinf_actors.wire.client_messages import Status


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


_DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "cloudpickle": "cloudpickle",
    "uvloop": "uvloop",
    "cryptography": "cryptography",
    "torch": "torch",
}


def inspect_machine(settings: Settings, head: str | None = None) -> MachineFacts:
    """Collect the facts about this machine from which the checks of `rlinf-actors doctor` find problems. *head* is the
    value of --head. Blocks for up to about 15 s while vendors' libraries and the head answer.
    """
    report, facts = asyncio.run(_inspect())
    heads = standing_heads(settings)
    given = named(head, settings)[0]
    endpoint = given or (heads[0].ways[0] if len(heads) == 1 else "")
    answer = _ask(endpoint, settings) if endpoint else HeadAnswer()
    running = asked(agentds([*parents(settings), *recorded(settings)]), settings, answer.endpoint, bool(given))
    agentd_facts = [_agentd(settings, one) for one in running] or [_agentd(settings, None)]
    mapping = table(settings, "workers").get("users", {})
    users = {str(name): str(user) for name, user in mapping.items()} if isinstance(mapping, dict) else {}
    return MachineFacts(
        user=os.getuid(),
        python=sys.version_info[:3],
        interpreter=sys.executable,
        modules={name: _version(package) for name, package in _DISTRIBUTIONS.items()},
        run_parent=directory(settings.run_dir or tempfile.gettempdir()),
        memfd=_memfd_error(),
        peers=_peer_memory_error(),
        agentds=agentd_facts,
        facts=facts,
        cipher_error=_cipher_error(),
        users=users,
        unknown_users=[name for name in dict.fromkeys(users.values()) if not _is_user(name)],
        head=endpoint,
        head_error=answer.error,
        head_fix=answer.fix,
        head_version=answer.version,
        heads=[record.address for record in heads],
        key_left_s=answer.key_left_s,
        closed=answer.closed,
        num_nodes=answer.num_nodes,
        status=answer.status,
        endpoint=answer.endpoint if answer.status is not None else "",
        joining=[str(path) for path in sorted(keyfile.directory(settings).glob(f"*{PENDING}"))],
        version=VERSION,
        keys=key_files(settings),
        accelerators={one.type: len(one.infos) for one in report.resources},
        faults=report.faults,
        stale=stale_run_dirs(parents(settings)),
        processes=processes(),
        disks=disks(_places_on_disk(settings, running)),
        stale_cgroups=list(
            dict.fromkeys(cgroup.directories[0] for one in agentd_facts for cgroup in leftovers(one.cgroups))
        ),
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


def disks(places: Iterable[tuple[str, str]]) -> list[Disk]:
    """Return the file systems of directories, each once. *places* are their paths, and what is kept in each. For a
    directory that is not made yet, the one in which it will be made counts.
    """
    found: dict[object, Disk] = {}
    for path, what in places:
        there = path
        try:
            while not _exists(there):
                there = os.path.dirname(there)
            disk, device = os.statvfs(there), os.stat(there).st_dev
        except OSError as error:
            found[path] = Disk([f"{path} ({what})"], 0, 0, error.strerror or str(error))
            continue
        sizes = (disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
        later = "" if there == path else "; not made yet"
        found.setdefault(device, Disk([], *sizes)).places.append(f"{path} ({what}{later})")
    return list(found.values())


def _exists(path: str) -> bool:
    """Return True if *path* exists. Raise OSError if this user may not know."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _places_on_disk(settings: Settings, running: Sequence[Agentd]) -> list[tuple[str, str]]:
    """Return the directories in which the agentds *running*, or one that is started here, keep log files and sockets,
    and what each has.
    """
    places = []
    for one in running:
        logs = log_dir_of(one)
        places += [(logs, f"logs of agentd {one}")] * bool(logs) + [(one.run_dir, f"sockets of agentd {one.pid}")]
    if not running:
        logs = settings.log_dir or str(table(settings, "paths").get("log_dir", usual_log_dir(os.getuid(), os.environ)))
        places.append((os.path.abspath(logs), "logs of an agentd that is started from here"))
    return [*places, (os.path.abspath(settings.run_dir or tempfile.gettempdir()), "sockets of private clusters")]


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
    for path in sorted({os.path.realpath(lock.parent) for one in places for lock in Path(one).glob("rl*-*/lock")}):
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
    run_dirs = {pid: _run_dir_of(pid) or "" for pid in templates}
    found = []
    for pid in sorted(stats):
        kind = "template" if pid in templates else "worker"
        orphan = not _is_served(pid) if pid in templates else not has_template(pid)
        template = next((one for one in _with_ancestors(pid) if one in templates), 0)
        run_dir = run_dirs.get(template, "")
        found.append(OwnProcess(pid, kind, _command(pid)[:60], orphan, figures_of(pid), run_dir))
    return found


def _with_ancestors(pid: int) -> Iterator[int]:
    while pid > 1 and (found := procfs.stat(pid)) is not None:
        yield pid
        pid = found.parent


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
    return " ".join(words_of(pid)).strip()


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


def _agentd(settings: Settings, one: Agentd | None) -> AgentdFacts:
    """Return the facts about a running agentd, None for one that would be started from this shell: as which user it
    runs, and the directories in which its workers' cgroups can be made.
    """
    wanted = str(table(settings, "workers").get("cgroup", "auto"))
    pid, cgroups, cgroup_error = one.pid if one is not None else None, Roots(), ""
    try:
        cgroups = find(wanted, pid=pid if pid is None else _keeper_of(pid) or pid)
    except (OSError, ValueError) as error:  # the agentd has just ended, or the configured directory is wrong
        cgroup_error = str(error)
    missing = procfs.missing_capabilities(procfs.CHANGES_USERS, "self" if pid is None else pid)
    user = None if pid is None else procfs.user_of(pid)
    return AgentdFacts(cgroups, "" if one is None else str(one), cgroup_error, user, missing)


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
    path = (environment(agentd) or {}).get(KEEPER)
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
    full = ""
    try:
        full = endpoint_at(endpoint, HEAD, resolve=False)
        if full.startswith("tcp://"):
            route_ip(full[6:].rpartition(":")[0].strip("[]"))
        status = fetch_status(full, settings)
    except RlinfActorsError as error:  # before OSError: some of them are both
        return HeadAnswer(error=str(error), fix=fix_of(error), endpoint=full)
    except OSError as error:
        return HeadAnswer(
            error=f"there is no route to it: {error.strerror or error}", fix="look at the network", endpoint=full
        )
    left = None if status.key_ends_at is None else status.key_ends_at - status.at
    nodes = [node for node in status.nodes if node.state != "lost"]
    closed = tuple(node.closed for node in nodes if node.closed)
    return HeadAnswer(
        status.version, key_left_s=left, closed=closed, num_nodes=len(nodes), status=status, endpoint=full
    )
