"""What this node is: its directories, its address, its report."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import msgspec

from agentd.config import Config
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces
from rlinf_actors.hardware.report import ProbeReport
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, ALWAYS_NIC_VARIABLE, device_variables
from rlinf_actors.net.host import host_key, route_ip
from rlinf_actors.net.security import is_loopback
from rlinf_actors.settings import COMM_NET_DEVICES
from rlinf_actors.wire.values import NodeReport, ResourceReport

log = logging.getLogger(__name__)

MAX_RUN_DIR = 80
"""Bytes; a unix socket's path holds 107, and the names below add up to 25."""
_STOPPING = "stopping"
"""File in a run directory whose agentd was told to end; `agentd --reap` looks for it."""
_OUTSIDE = "192.0.2.1"
"""A documentation address (RFC 5737): the route to it is the default route."""


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What --hardware's file may say; what it leaves out is this machine's."""

    resources: list[ResourceReport] = []
    env_vars: dict[str, str] = {}
    labels: dict[str, str] = {}
    ip: Union[str, None] = None
    num_cpus: Union[int, None] = None
    memory_bytes: Union[int, None] = None
    interfaces: Union[dict[str, str], None] = None
    profilers: list[str] = []


def read_described(path: str) -> Described:
    """The described hardware in *path*.

    Raises:
        ConfigError: it cannot be read, or is not of that form.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Described)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"does not describe hardware: {error}", path=path) from None


@dataclass
class RunDir:
    """A directory of mode 0700 that is ours alone, held by a lock until `close`."""

    path: str
    lock: int

    @classmethod
    def open(cls, wanted: str | None, environ: Mapping[str, str]) -> RunDir:
        """Make it, or take the one that is there.

        Raises:
            ConfigError: its path is too long for unix sockets, others can read it, or another agentd uses it.
            OSError: it cannot be made.
        """
        path = os.path.abspath(wanted or default_run_dir(environ))
        if len(os.fsencode(path)) > MAX_RUN_DIR:
            raise ConfigError(
                f"is {len(os.fsencode(path))} bytes long; unix sockets allow {MAX_RUN_DIR}: choose a shorter one",
                path=f"run_dir {path}",
            )
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
        if found.st_uid != os.getuid():
            raise ConfigError(f"belongs to user {found.st_uid}, not to us ({os.getuid()})", path=f"run_dir {path}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"can be used by others: chmod 700 {path}", path=f"run_dir {path}")
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                "is used by another agentd: give this one another --run-dir", path=f"run_dir {path}"
            ) from None
        return cls(path, lock)

    @property
    def was_stopping(self) -> bool:
        """Whether the last agentd here was asked to end, and its workers with it, whether it came to that or not."""
        return os.path.exists(os.path.join(self.path, _STOPPING))

    def begin(self) -> None:
        """An agentd begins here: what the last one was asked is over."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, _STOPPING))

    def stop_asked(self) -> None:
        """Write down that this agentd will end and no other takes its workers over; twice is fine."""
        try:
            os.close(os.open(os.path.join(self.path, _STOPPING), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:  # a full disk must not keep it from ending
            log.warning("cannot write down that this agentd was stopped: %s", error)

    def close(self) -> None:
        """Let it go. Twice is fine."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def default_run_dir(environ: Mapping[str, str]) -> str:
    """The user's."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return os.path.join(runtime, "rlinf-actors")
    return f"/tmp/rlinf-actors-{os.getuid()}"


def default_log_dir(config: Config, run_dir: str, environ: Mapping[str, str]) -> str:
    """Where workers' output goes: with an embedded cluster it ends with the cluster."""
    if config.embedded:
        return os.path.join(run_dir, "logs")
    if os.getuid() == 0:
        return "/var/log/rlinf-actors"
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "rlinf-actors", "logs")


def node_id(config: Config, run_dir: str) -> str:
    """The configured one, or one that stays the same for this machine, network, user and run directory."""
    if config.node_id:
        return config.node_id
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    network = os.stat("/proc/self/ns/net").st_ino
    text = f"{machine} {os.uname().nodename} {network} {os.getuid()} {os.path.realpath(run_dir)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def address(config: Config, listen: str, head: str) -> str:
    """What others reach this node by: configured, else the head's own address, else the kernel's route to the head.

    Args:
        config: with `ip`.
        listen: host that the head in this process listens on, "" without one.
        head: host of the head elsewhere, "" for unix sockets only.

    Raises:
        ConfigError: there is no route to the head.
    """
    if config.ip:
        return config.ip
    host = listen or head
    if not host or is_loopback(host):
        return "127.0.0.1"
    if listen and listen not in ("0.0.0.0", "::", "*"):
        return listen
    try:
        return route_ip(_OUTSIDE if listen else head)
    except OSError as error:
        if listen:
            return "127.0.0.1"  # every interface of a machine without a default route
        raise ConfigError(f"no route to {head}: {error.strerror or error}", path="--connect") from None


def report(
    config: Config, probe: ProbeReport, described: Described | None, ip: str, id: str, environ: Mapping[str, str]
) -> NodeReport:
    """What the head is told of this node.

    Args:
        config: agentd's.
        probe: what was found.
        described: what is to be said instead, None on a real node.
        ip: the node's address, see `address`.
        id: its id, see `node_id`.
        environ: what agentd was started with; the variables that decide which devices and interfaces workers use are
            told, since a launch must not contradict them.
    """
    given = described or Described()
    told = {name: environ[name] for name in sorted(_told_variables()) if name in environ}
    return NodeReport(
        node_id=id,
        hostname=config.name or probe.hostname,
        ip=given.ip or ip,
        host=host_key(),
        num_cpus=probe.num_cpus if given.num_cpus is None else given.num_cpus,
        memory_bytes=probe.memory_bytes if given.memory_bytes is None else given.memory_bytes,
        python=probe.python,
        interpreter=probe.interpreter,
        rank=config.rank,
        resources=probe.resources if described is None else given.resources,
        env_vars={**told, **given.env_vars, **config.env},
        labels={**given.labels, **config.labels},
        interfaces=probe.interfaces if given.interfaces is None else given.interfaces,
        faults=probe.faults,
        profilers=given.profilers,
        interface=interface_of(given.ip or ip),
    )


def summary(report: NodeReport) -> str:
    """What a node has, for people, in a few words."""
    counts = [f"{len(one.infos)} {one.type}" for one in report.resources if one.infos]
    return ", ".join(counts) or "no accelerators or robots"


def _told_variables() -> set[str]:
    interfaces = {facts.nic_variable for facts in ACCELERATOR_TABLE.values() if facts.nic_variable}
    return {COMM_NET_DEVICES, ALWAYS_NIC_VARIABLE, *interfaces, *device_variables()}


def without_devices() -> ProbeReport:
    """What can be told of this machine without asking for hardware."""
    return ProbeReport(
        hostname=os.uname().nodename,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=platform.python_version(),
        interpreter=sys.executable,
        interfaces=ipv4_interfaces(),
    )
