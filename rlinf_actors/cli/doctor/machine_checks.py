"""The checks of `rlinf-actors doctor`. Each check is a pure function from MachineFacts to Findings."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cli.doctor.finding import FAIL, PASS, WARN, Check, Finding
from rlinf_actors.cli.doctor.node_checks import NODE_CHECKS
from rlinf_actors.cli.output import mib
from rlinf_actors.cli.process_figures import Figures
from rlinf_actors.head.key_registry import WARNINGS_S
from rlinf_actors.model.readable import duration
from rlinf_actors.plurals import counted
from rlinf_actors.wire.check_values import NodeFacts
from rlinf_actors.wire.client_messages import Status

OLDEST_PYTHON = (3, 10)
REQUIRED = ("zmq", "msgspec", "cloudpickle")
MAX_RUN_DIR = 60
"""Longest path, in bytes, of the parent of run directories, since a unix socket's path has at most 107 bytes."""
GOOD_DISK = 2 << 30
"""Free bytes below which the disk of log files or sockets is reported as low."""
SHOWN_PLACES = 10
"""Most directories of one disk that are named."""
_PACKAGES = {"zmq": "pyzmq"}


@dataclass(frozen=True)
class OwnProcess:
    """A process of this user that `rlinf-actors doctor` reports: a template, a worker, or a process that a worker
    started.
    """

    pid: int
    kind: str  # "template" or "worker"; a process that a worker started counts as a worker
    command: str  # its command line, shortened
    orphan: bool  # True if the agentd of the template, or the template of the worker, has ended
    figures: Figures | None = None
    run_dir: str = ""  # of its agentd, "" if that is not known


@dataclass(frozen=True)
class Directory:
    path: str
    mode: int | None = None  # permission bits, None if the directory does not exist
    uid: int = 0  # of its owner
    error: str = ""  # why files cannot be created in it, "" if they can


@dataclass(frozen=True)
class Disk:
    """The file system of directories in which agentds keep something."""

    places: list[str]  # the directories, and what each has
    total: int  # bytes
    free: int
    error: str = ""  # why it is not known, "" if it is


@dataclass(frozen=True)
class KeyOnDisk:
    """Findings about a key file of this user, or about the directory of key files."""

    path: str
    private: bool  # True if no other user can read it
    whose: str = ""  # role and name in the key file, "" for a directory or an unreadable file
    error: str = ""  # why the key file cannot be read, "" if it can


@dataclass(frozen=True)
class AgentdFacts:
    """Findings about a running agentd, or about one as it would be started from this shell."""

    cgroups: Roots  # directories in which its workers' cgroups can be made
    name: str = ""  # PID in RUN_DIR; "" if it does not run
    cgroup_error: str = ""  # why the configured cgroup directory cannot be used
    user: int | None = None  # its uid, None if it does not run
    missing: Sequence[str] = ()  # capabilities that it lacks to change users


@dataclass(frozen=True)
class MachineFacts:
    """The facts about this machine from which the checks find problems. doctor.machine collects them; tests invent
    them.
    """

    user: int
    python: tuple[int, int, int]
    interpreter: str
    modules: dict[str, str | None]  # version of each module, None if it is not installed
    run_parent: Directory  # parent of run directories
    memfd: str  # why shared memory cannot be made, "" if it can
    peers: str  # why a process cannot open the memory of another process, "" if it can
    agentds: Sequence[AgentdFacts]  # those that the user asks about, or one that does not run
    facts: NodeFacts  # those that nodes have too
    cipher_error: str = ""  # why the installed package cryptography cannot encrypt, "" if it can
    users: Mapping[str, str] = field(default_factory=dict)  # user of each driver's workers, from agentd.toml
    unknown_users: Sequence[str] = ()  # those of `users` that do not exist here
    head: str = ""  # the configured head
    head_error: str = ""  # why the configured head cannot be used
    head_fix: str = ""  # what to do about head_error, "" to start the head
    head_version: str = ""
    heads: Sequence[str] = ()  # the standing heads of this machine that this user may ask, by address
    key_left_s: float | None = None  # seconds until this user's key ends, None for never or if no head says it
    closed: Sequence[str] = ()  # why this user may not launch on nodes of the cluster, one text for each such node
    num_nodes: int = 0  # number of nodes of the cluster that are there
    status: Status | None = None  # what the head has said, None without an answer
    endpoint: str = ""  # of that head
    joining: Sequence[str] = ()  # files that an interrupted `keys join` has left
    version: str = ""  # of this package
    keys: Sequence[KeyOnDisk] = ()
    accelerators: dict[str, int] = field(default_factory=dict)  # number of accelerators by type
    faults: Sequence[str] = ()  # of the hardware probe
    stale: Sequence[str] = ()  # run directories whose agentd has ended
    processes: Sequence[OwnProcess] = ()
    disks: Sequence[Disk] = ()  # of log files of workers and of run directories
    stale_cgroups: Sequence[str] = ()  # cgroup directories of workers whose template has ended


def diagnose(machine: MachineFacts) -> list[Finding]:
    found = [finding for check in CHECKS for finding in check.run(machine)]
    return found + [finding for check in NODE_CHECKS for finding in check.run(machine.facts)]


def python(machine: MachineFacts) -> list[Finding]:
    """Python from 3.10 on, and the packages: fails if one that is required is missing, warns without uvloop, and
    without cryptography if there are keys.
    """
    version = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        text = f"{machine.interpreter} is Python {version}; 3.10 is the oldest that works"
        return [Finding("python", FAIL, text, "make the environment with a newer Python")]
    found = [Finding("python", PASS, f"Python {version}, {machine.interpreter}")]
    for name in REQUIRED:
        if machine.modules.get(name) is None:
            package = _PACKAGES.get(name, name)
            fix = f"{machine.interpreter} -m pip install {package}"
            found.append(Finding(name, FAIL, f"{package} is not installed", fix))
        else:
            found.append(Finding(name, PASS, f"{name} {machine.modules[name]}"))
    if machine.modules.get("uvloop") is None:
        fix = f"{machine.interpreter} -m pip install uvloop"
        found.append(
            Finding("uvloop", WARN, "uvloop is not installed: asyncio's own loop is used, calls are slower", fix)
        )
    else:
        found.append(Finding("uvloop", PASS, f"uvloop {machine.modules['uvloop']}"))
    found.append(_cryptography(machine))
    torch = machine.modules.get("torch")
    text = f"torch {torch}" if torch else "torch is not installed; only workers that use it need it"
    return [*found, Finding("torch", PASS, text)]


def _cryptography(machine: MachineFacts) -> Finding:
    version = machine.modules.get("cryptography")
    if version is not None and not machine.cipher_error:
        return Finding("cryptography", PASS, f"cryptography {version}")
    text = (
        f"cryptography {version} cannot be used ({machine.cipher_error})"
        if version
        else "cryptography is not installed"
    )
    if not machine.keys:
        return Finding("cryptography", PASS, f"{text}; only clusters with keys need it")
    again = "--force-reinstall " if version else ""
    return Finding(
        "cryptography",
        WARN,
        f"{text}: large arrays travel by the slower connections of calls between nodes of a cluster with keys",
        f"{machine.interpreter} -m pip install {again}cryptography; also for other interpreters of workers",
    )


def run_directories(machine: MachineFacts) -> list[Finding]:
    """Directory in which sockets are made: fails if it cannot be used, warns if others may rename what is in it."""
    parent = machine.run_parent
    length = len(parent.path.encode())
    if length > MAX_RUN_DIR:
        text = f"{parent.path} is {length} bytes long; sockets of private clusters are made in /tmp instead"
        return [Finding("run_dir", WARN, text, "set RLINF_ACTORS_RUN_DIR to a shorter directory")]
    if parent.mode is None:
        return [Finding("run_dir", FAIL, f"{parent.path} does not exist", f"mkdir -m 700 {parent.path}")]
    if parent.error:
        fix = f"chown {machine.user} {parent.path}, or set RLINF_ACTORS_RUN_DIR to a directory of yours"
        return [Finding("run_dir", FAIL, f"nothing can be made in {parent.path}: {parent.error}", fix)]
    others = parent.mode & 0o022 and not parent.mode & stat.S_ISVTX
    if others:
        text = f"others can rename what is in {parent.path}"
        return [Finding("run_dir", WARN, text, f"chmod +t {parent.path}, or choose a directory of your own")]
    return [Finding("run_dir", PASS, f"sockets are made in {parent.path}")]


def shared_memory(machine: MachineFacts) -> list[Finding]:
    """Whether processes can share memory: warns if not, because data then goes through sockets."""
    found = []
    if machine.memfd:
        fix = "raise the memory limit of this container; data goes through sockets until then"
        found.append(Finding("shared_memory", WARN, f"shared memory cannot be made: {machine.memfd}", fix))
    elif machine.peers:
        fix = "give the container ptrace rights (--cap-add SYS_PTRACE); data goes through sockets until then"
        text = f"processes cannot open one another's memory: {machine.peers}"
        found.append(Finding("shared_memory", WARN, text, fix))
    else:
        found.append(Finding("shared_memory", PASS, "processes can share memory (no part of /dev/shm)"))
    return found


def disks(machine: MachineFacts) -> list[Finding]:
    """Disks of log files and of run directories, of each agentd: warns below 2 GiB, or a quarter of a small disk."""
    found = []
    for disk in machine.disks:
        more = f" and {len(disk.places) - SHOWN_PLACES} more" if len(disk.places) > SHOWN_PLACES else ""
        places = ", ".join(disk.places[:SHOWN_PLACES]) + more
        text = f"the disk of {places} has {mib(disk.free)} of {mib(disk.total)} free"
        if disk.error:
            fix = "run this command as the user of that agentd"
            found.append(Finding("disk", WARN, f"the disk of {places} is not known: {disk.error}", fix))
        elif disk.free < min(GOOD_DISK, disk.total // 4):
            fix = "remove files, or lower log_total_max_gb or log_keep_days in [workers] of agentd.toml, and reload it"
            found.append(Finding("disk", WARN, f"{text}: output of workers is lost if its disk fills", fix))
        else:
            found.append(Finding("disk", PASS, text))
    return found


def cgroups(machine: MachineFacts) -> list[Finding]:
    """Which cgroups and limits workers get, of each running agentd or of one that is started here: warns, with what is
    missing, and fails if the configured directory cannot be used.
    """
    return [finding for agentd in machine.agentds for finding in _cgroups_of(agentd, len(machine.agentds) > 1)]


def _cgroups_of(agentd: AgentdFacts, among_several: bool) -> list[Finding]:
    roots = agentd.cgroups
    whose = f"of agentd {agentd.name}" if agentd.name else "of an agentd that is started from here (none runs)"
    of_it = f" for workers {whose}" if among_several else ""
    if agentd.cgroup_error:
        text = f"[workers] cgroup {agentd.cgroup_error}"
        return [Finding("cgroup", FAIL, f"{text} ({whose})", "correct it in agentd.toml, or set it to auto")]
    found = []
    if roots.unified:
        found.append(
            Finding("cgroup", PASS, f"each worker {whose} gets a cgroup in {roots.unified}: no process outlives it")
        )
    else:
        text = f"workers {whose} get no cgroup (v2): processes that they leave are found only by an inherited mark"
        found.append(Finding("cgroup", WARN, text, roots.why.get("cgroup", "")))
    for name, option in (("memory", "memory_limit"), ("pids", "pids_limit")):
        if name in roots.why:
            found.append(Finding(f"{name}_limit", WARN, f"{option} cannot hold{of_it}", roots.why[name]))
        else:
            where = f"cgroup v1, {roots.v1[name]}" if name in roots.v1 else "cgroup v2"
            found.append(Finding(f"{name}_limit", PASS, f"{option} holds{of_it} ({where})"))
    return found


def head(machine: MachineFacts) -> list[Finding]:
    """Whether the configured head answers: fails if not, warns if its version is another one."""
    here = f"these heads run here: {', '.join(machine.heads)}" if machine.heads else ""
    if not machine.head:
        text = "no head is configured: scripts start a private cluster"
        return [Finding("head", PASS, f"{text}; {here}" if here else text)]
    if machine.head_error:
        fix = f"start it (agentd --head --listen {machine.head}), look at the firewall, or unset RLINF_HEAD"
        fix = machine.head_fix or (f"correct the address ({here}), or {fix}" if here else fix)
        return [Finding("head", FAIL, f"the head at {machine.head}: {machine.head_error}", fix)]
    if machine.head_version != machine.version:
        text = f"the head at {machine.head} is version {machine.head_version}, this is {machine.version}"
        return [Finding("head", WARN, text, f"install rlinf-actors {machine.head_version} here")]
    return [Finding("head", PASS, f"the head at {machine.head} answers (version {machine.head_version})")]


def admission(machine: MachineFacts) -> list[Finding]:
    """Whether nodes admit workers of this user: warns if none does."""
    if machine.closed and len(machine.closed) == machine.num_nodes:
        fix = "have this driver added to [admit] drivers in agentd.toml of a node, or its key's nodes extended"
        return [Finding("admission", WARN, f"no node admits this user's workers: {machine.closed[0]}", fix)]
    return [Finding("admission", PASS, text) for text in machine.closed]


def keys(machine: MachineFacts) -> list[Finding]:
    """Key files of this user: fails if others can read them, warns if the key ends in two weeks."""
    found = []
    for key in machine.keys:
        if not key.private:
            mode = 600 if key.whose or key.error else 700
            fix = f"chown {machine.user} {key.path} && chmod {mode} {key.path}; if others may have read it: "
            found.append(Finding("keys", FAIL, f"others can read {key.path}", fix + "rlinf-actors keys rotate"))
        elif key.error:
            fix = "copy it again, or move it away and use a new join token"
            found.append(Finding("keys", FAIL, f"{key.path} {key.error}", fix))
    for path in machine.joining:
        fix = "run it again with the same token, or with a new one (`rlinf-actors keys enroll` on the head's machine)"
        found.append(Finding("keys", WARN, f"`rlinf-actors keys join` was interrupted, and left {path}", fix))
    if machine.key_left_s is not None and machine.key_left_s < WARNINGS_S[0]:
        text = f"the key by which this user reaches the head ends in {duration(machine.key_left_s)}"
        fix = "on the head's machine: `rlinf-actors keys enroll NAME --replace`; here: `rlinf-actors keys join TOKEN`"
        found.append(Finding("keys", WARN, text, fix))
    names = [key.whose for key in machine.keys if key.whose]
    text = f"keys of {', '.join(names)}" if names else "no keys: clusters on this machine only"
    return found or [Finding("keys", PASS, text)]


def accelerators(machine: MachineFacts) -> list[Finding]:
    """Accelerators of this machine: warns of those that cannot be read."""
    faults = [
        Finding("accelerators", WARN, text, "rlinf-actors hw scan shows more; look at the vendor's driver")
        for text in machine.faults
    ]
    text = ", ".join(f"{count} {kind}" for kind, count in machine.accelerators.items()) or "none"
    return faults or [Finding("accelerators", PASS, text)]


def running(machine: MachineFacts) -> list[Finding]:
    """Templates and workers of this user on this machine, and what they use, by the run directory of their agentd."""
    by_agentd: dict[str, list[OwnProcess]] = {}
    for process in machine.processes:
        by_agentd.setdefault(process.run_dir, []).append(process)
    none = [Finding("processes", PASS, "no worker of this user runs here")]
    return [_use(run_dir, processes) for run_dir, processes in sorted(by_agentd.items())] or none


def _use(run_dir: str, processes: Sequence[OwnProcess]) -> Finding:
    kinds = Counter(process.kind for process in processes)
    known = [process.figures for process in processes if process.figures is not None]
    text = " and ".join(counted(count, kind) for kind, count in sorted(kinds.items()))
    used = (
        f"{mib(sum(each.rss_bytes for each in known))} resident (what they share counts for each), "
        f"{counted(sum(each.threads for each in known), 'thread')}, "
        f"{counted(sum(each.descriptors or 0 for each in known), 'descriptor')}, "
        f"{sum(each.cpu_s for each in known):.0f} s of CPU time"
    )
    whose = f" of the agentd in {run_dir}" if run_dir else ""
    return Finding("processes", PASS, f"{text}{whose}: {used}")


def users(machine: MachineFacts) -> list[Finding]:
    """Users as whom the workers of drivers run: fails if one is missing, or agentd may not change users."""
    found = [
        Finding(
            "users",
            FAIL,
            f"users in [workers] of agentd.toml names {name!r}, who does not exist here",
            f"useradd {name}",
        )
        for name in machine.unknown_users
    ]
    for agentd in machine.agentds:
        who = f"agentd {agentd.name}" if agentd.name else "an agentd started from this shell"
        if machine.users and agentd.missing:
            text = f"{who} cannot start workers as the users in agentd.toml: it lacks {', '.join(agentd.missing)}"
            fix = "use rlinf-agentd.service (rlinf-actors units install), or start agentd as root"
            found.append(Finding("users", FAIL, text, fix))
        if agentd.user == 0 and not machine.users:
            text = f"{who} runs as root, and so do all workers of all drivers"
            fix = "map drivers to users by users in [workers] of agentd.toml, or use rlinf-agentd@USER.service"
            found.append(Finding("users", WARN, text, fix))
    text = "each driver's workers run as a user of their own" if machine.users else "all workers run as agentd's user"
    return found or [Finding("users", PASS, text)]


def leftovers(machine: MachineFacts) -> list[Finding]:
    """Run directories, processes and cgroups that earlier runs have left: warns."""
    found = [
        Finding("leftover_run_dir", WARN, f"no agentd uses {path} any more", f"rm -r {path}") for path in machine.stale
    ]
    for process in machine.processes:
        if process.orphan:
            text = f"{process.kind} process {process.pid} ({process.command}) has lost its "
            text += (
                "agentd: it ends soon, unless another agentd takes it over"
                if process.kind == "template"
                else "template"
            )
            found.append(Finding("leftover_process", WARN, text, f"kill -9 {process.pid}"))
    for path in machine.stale_cgroups:
        fix = f"echo 1 > {path}/cgroup.kill; rmdir {path} (the next agentd does it)"
        found.append(Finding("leftover_cgroup", WARN, f"{path} is of a worker whose template is gone", fix))
    return found or [Finding("leftovers", PASS, "nothing is left of earlier runs")]


CHECKS: tuple[Check[MachineFacts], ...] = (
    Check(("python", *REQUIRED, "uvloop", "cryptography", "torch"), python),
    Check(("run_dir",), run_directories),
    Check(("shared_memory",), shared_memory),
    Check(("disk",), disks),
    Check(("cgroup", "memory_limit", "pids_limit"), cgroups),
    Check(("head",), head),
    Check(("admission",), admission),
    Check(("keys",), keys),
    Check(("accelerators",), accelerators),
    Check(("processes",), running),
    Check(("users",), users),
    Check(("leftover_run_dir", "leftover_process", "leftover_cgroup", "leftovers"), leftovers),
)
"""The checks on this machine that nodes do not have."""
