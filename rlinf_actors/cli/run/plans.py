"""Where the nodes of `rlinf-actors run` are, and by which commands their agentds start: here, by ssh, or by srun."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf_actors.cluster.local_daemon import AGENTD, boot
from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.model.names import wrong_name
from rlinf_actors.net.host import route_ip
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.runtime.progress import Facts, showing_blocked
from rlinf_actors.settings import SlurmJob

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
"""No terminal, no questions; a connection ends 15 s after the last sign of life of its other end."""

HOSTS = "--hosts"
BY_SSH = "ssh to "
"""Beginning of the titles of what starts nodes by ssh."""

SRUN_OPTIONS = (
    "--ntasks-per-node=1", "--overlap", "--cpu-bind=none", "--mpi=none", "--label", "--input=all",
    "--kill-on-bad-exit=0", "--no-kill",
)  # fmt: skip
"""One task a node beside other steps of the job, with all CPUs of the job there; their output has their numbers, stdin
goes to all. The run goes on without a task or node that ends, as with an agentd that ends.
"""


@dataclass(frozen=True)
class Start:
    """A command that starts the agentds of some nodes, and lives as long as they.

    Attributes:
        title: what starts them, for people: "agentd", "ssh to gpu-1", "srun".
        command: its words.
        names: names of the nodes.
    """

    title: str
    command: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """Where the processes of a run are.

    Attributes:
        names: names of the nodes, by rank.
        listen: host at which the head listens.
        reach: host at which nodes and drivers reach the head.
        starts: what starts the agentds.
        here: True if all nodes are on this machine: their directories are then removed even if an agentd is killed.
        log_dir: directory for the output of workers, on each node; None for one that ends with the run.
    """

    names: Sequence[str]
    listen: str
    reach: str
    starts: Sequence[Start]
    here: bool = False
    log_dir: str | None = None


def here(nodes: int, log_dir: str | None) -> Plan:
    """Return the plan for a number of nodes on this machine."""
    names = [f"node{rank}" for rank in range(nodes)]
    command = [sys.executable, *_agentd()]
    return Plan(
        names, "127.0.0.1", "127.0.0.1", [Start(f"agentd of {name}", command, [name]) for name in names], True, log_dir
    )


def by_ssh(hosts: Sequence[str], ssh: str, python: str, address: str | None, log_dir: str | None) -> Plan:
    """Return the plan for one node on each of *hosts*, which are words that the command *ssh* takes. Blocks.

    *python* is the interpreter there. *address* is this machine's address as the hosts see it, None to find it out.

    Raises:
        ConfigError: a host is named twice or has no route, or its name cannot be a node's; or *address* is needed.
    """
    names = [host.rpartition("@")[2] for host in hosts]
    for name in names:
        if wrong := wrong_name(name, "a node"):
            raise ConfigError(f"{wrong}; give the host a name in ~/.ssh/config", path=HOSTS)
        if names.count(name) > 1:
            raise ConfigError(f"names {name} twice; a host is one node of a run", path=HOSTS)
    words = shlex.split(ssh)
    reach = address or common_address({host: _host_of(words, host) for host in hosts}, HOSTS)
    remote = f"exec {shlex.join([python, *_agentd()])}"
    starts = [
        Start(f"{BY_SSH}{host}", [*words, *SSH_OPTIONS, host, remote], [name])
        for host, name in zip(hosts, names, strict=True)
    ]
    return Plan(names, _to_listen(reach), reach, starts, False, log_dir)


def in_slurm(address: str | None, log_dir: str | None) -> Plan:
    """Return the plan for one node on each node of the Slurm job in which this process runs. Blocks.

    Ranks are those in Slurm's list of the job's nodes, so they do not depend on where srun starts which task.

    Raises:
        UsageError: this process is in no Slurm job, or is one of several tasks.
    """
    job = SlurmJob.load()
    if not job.nodes:
        raise UsageError("--slurm needs a job: salloc --nodes=2 rlinf-actors run --slurm -- python train.py, or sbatch")
    if job.tasks > 1:
        raise UsageError(
            f"--slurm is for one process of a job, and srun has started {job.tasks}: use srun --nodes=1 --ntasks=1"
        )
    shown = _output(["scontrol", "--oneliner", "show", "node", job.nodes], "--slurm")
    addresses = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", shown, re.MULTILINE))
    names, number = list(addresses), len(addresses)
    command = ["srun", f"--nodes={number}", f"--ntasks={number}", *SRUN_OPTIONS, sys.executable, *_agentd()]
    reach = address or common_address(addresses if number > 1 else {}, "--slurm")
    return Plan(names, _to_listen(reach), reach, [Start("srun", command, names)], False, log_dir)


def advice(title: str, code: int, last: str) -> str:
    """Return what to do about a process that has ended before its nodes were up, "" if that is not known.

    *title* is that of its Start, *code* its exit code, and *last* the last line of its log.
    """
    if last.startswith("ModuleNotFoundError: "):
        return "install rlinf-actors for that Python, or name another by --python"
    if title.startswith(BY_SSH) and code in (126, 127):
        return "name the Python of that host by --python"
    if title.startswith(BY_SSH) and code == 255:
        return "ssh to it has to work without a question: by a key, and to a known host"
    return ""


def common_address(machines: Mapping[str, str], option: str) -> str:
    """Return this machine's address on the routes to all *machines*: host names or addresses, by names for people.
    *option* has said which machines these are.

    Raises:
        ConfigError: a machine has no address or no route, or two have different ones; then the user has to choose.
    """
    found: dict[str, str] = {}
    for name, host in machines.items():
        try:
            ip = route_ip(host)
        except socket.gaierror as error:
            known = name.rpartition("@")[2] == host
            what = name if known else f"{host}, which is {name} in ssh's configuration,"
            more = ", and is no alias in ssh's configuration" * (known and option == HOSTS)
            raise ConfigError(f"{what} cannot be resolved ({error.strerror}){more}", path=option) from None
        except OSError as error:
            raise ConfigError(f"there is no route to {name}: {error.strerror or error}", path=option) from None
        if not is_loopback(ip):  # a process of this machine reaches the other addresses too
            found.setdefault(ip, name)
    if len(found) > 1:
        ways = ", ".join(f"{ip} toward {name}" for ip, name in found.items())
        raise ConfigError(f"is needed, for this machine has several addresses: {ways}", path="--address")
    return next(iter(found), "127.0.0.1")


def _agentd() -> list[str]:
    return [*boot(AGENTD), "--of-run"]


def _host_of(ssh: Sequence[str], host: str) -> str:
    """Return the host name or address for the ssh destination *host*, which may be an alias of ~/.ssh/config."""
    lines = _output([*ssh, "-G", host], HOSTS).splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line).get("hostname", host)


def _output(command: Sequence[str], option: str) -> str:
    """Return the output of a command, which *option* needs. If the command fails, raise ConfigError."""
    try:
        with showing_blocked(lambda: Facts(f"waiting for the answer of {shlex.join(command)}")):
            return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    except FileNotFoundError:
        raise ConfigError(f"needs {command[0]}, which is not found", path=option) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{shlex.join(command)} says: {error.stderr.strip()}", path=option) from None


def _to_listen(reach: str) -> str:
    """Return the address on which the head listens to be reached at *reach*: all, if *reach* is no address of ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(reach, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return "0.0.0.0"
    return str(address[0])
