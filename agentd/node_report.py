"""This node's description for the head: id, address, hardware; and hardware queries of drivers (`HardwareQueries`).

A query runs in a process of its own, since a hardware type is a user's code. The daemon calls this module on the main
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Union

import msgspec
from msgspec.structs import replace

from agentd import keeper
from agentd.config import launch_rules
from agentd.config_fields import Config
from agentd.launch_plan import Rules, find_interpreter, process_environment
from agentd.users import User, Users
from rlinf_actors.config_files import read_text
from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.hardware.child_process import ChildEnd, fault_of, run_child
from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces
from rlinf_actors.hardware.probe_report import ProbeReport
from rlinf_actors.model.accelerator_table import (
    ACCELERATOR_TABLE,
    GLOO_NIC_VARIABLE,
    default_variables,
    device_variables,
)
from rlinf_actors.net.host import host_key, route_ip
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.settings import COMM_NET_DEVICES
from rlinf_actors.wire.launch_rules import Launcher, LaunchRules
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion, NodeReport, ResourceReport

log = logging.getLogger(__name__)

_PROFILERS = {"nsight": "nsys", "rocprof_sys": "rocprof-sys-python"}
"""The program of each back-end of `cluster.profiling` that needs one."""
_OUTSIDE = "192.0.2.1"
"""A documentation address (RFC 5737), to which no machine listens: its route is the default route."""


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file that the option --hardware names, for nodes without real hardware. Values that the file
    does not have are those of this machine.
    """

    resources: list[ResourceReport] = []
    env_vars: dict[str, str] = {}
    labels: dict[str, str] = {}
    ip: Union[str, None] = None
    num_cpus: Union[int, None] = None
    memory_bytes: Union[int, None] = None
    interfaces: Union[dict[str, str], None] = None
    profilers: list[str] = []


def read_described(path: str) -> Described:
    """Read the file that the option --hardware names. Raise ConfigError if the file cannot be read or does not have
    the form of Described.
    """
    try:
        return msgspec.json.decode(read_text(path), type=Described)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"does not describe hardware: {error}", path=path) from None


def node_id(config: Config, run_dir: str, of_key: str = "") -> str:
    """Return the configured id of this node, else the id in its key file, *of_key*. Without both, return a hash of
    machine, network namespace, user and run directory, which is the same after a restart of agentd.
    """
    if config.node_id or of_key:
        return config.node_id or of_key
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    network = os.stat("/proc/self/ns/net").st_ino
    text = f"{machine} {os.uname().nodename} {network} {os.getuid()} {os.path.realpath(run_dir)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def address(config: Config, listen: str, head: str) -> str:
    """Return the address of this node: the configured address; else the address on which the head in this process
    listens; else this machine's address on the route to the head.

    *listen* is the host on which the head in this process listens, *head* the host of a head elsewhere; each is "" if
    there is no such head. Raise RlinfActorsError if there is no route to the head.
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
        raise no_route(head, error) from None


def no_route(head: str, error: OSError) -> RlinfActorsError:
    """Return the error that there is no route to the head's machine. It is no error of the configuration: the network
    or its name service may come after agentd, which its unit then starts again.
    """
    why = error.strerror or error
    return RlinfActorsError(f"no route to the head's machine, {head}: {why}; `rlinf-actors doctor` looks for the cause")


def report(
    config: Config, probe: ProbeReport, described: Described | None, ip: str, id: str, environ: Mapping[str, str]
) -> NodeReport:
    """Return the description of this node that agentd sends to the head: address, hardware, labels and some environment
    variables.

    The variables are taken from agentd's environment *environ*. Only those that decide which devices and interfaces
    workers use are reported, so that a launch cannot contradict them; other variables may hold secrets. If *described*
    is given, this node only pretends to have hardware, and *described* replaces the hardware that *probe* found.
    """
    given = described or Described()
    own = {**environ, **given.env_vars, **config.env}
    interfaces = {facts.nic_variable for facts in ACCELERATOR_TABLE.values() if facts.nic_variable}
    devices = {*device_variables(), *default_variables()}
    reported = {*given.env_vars, COMM_NET_DEVICES, GLOO_NIC_VARIABLE, *interfaces, *devices}
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
        env_vars={name: own[name] for name in sorted(reported & own.keys())},
        labels={**given.labels, **config.labels},
        interfaces=probe.interfaces if given.interfaces is None else given.interfaces,
        faults=probe.faults,
        profilers=given.profilers or profiler_backends(config.profilers),
        interface=interface_of(given.ip or ip),
        admit=launch_rules(config),
    )


def profiler_backends(allowed: Sequence[str]) -> list[str]:
    """Return the back-ends of ``cluster.profiling`` whose programs are among those *allowed*, and are on this node."""
    there = {os.path.basename(program) for program in allowed if shutil.which(program) is not None}
    return [backend for backend, program in _PROFILERS.items() if program in there]


def summary(report: NodeReport) -> str:
    """Return the numbers of accelerators and robots in *report*, as text for people."""
    counts = [f"{len(one.infos)} {one.type}" for one in report.resources if one.infos]
    return ", ".join(counts) or "no accelerators or robots"


def without_devices() -> ProbeReport:
    """Return what the probe would report about this machine, but without accelerators. Used instead of the probe on
    nodes whose hardware is described by a file.
    """
    return ProbeReport(
        hostname=os.uname().nodename,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=platform.python_version(),
        interpreter=sys.executable,
        interfaces=ipv4_interfaces(),
    )


MOST_QUERIES = 4  # of one driver at a time: each takes milliseconds of the loop, and a process
MAX_LIMIT_S = 600.0  # seconds after which a hardware query is killed, even if its client allows more
_CHILD = "rlinf_actors.hardware.probe_child:enumerate_main"


class HardwareQueries:
    """Runs the hardware queries of drivers: each enumerates the hardware of a type that the user defined, in a process
    of its own.

    Main thread only, because a query's process ends with the thread that started it.

    Args:
        rules: which interpreters may be started on this node.
        root: directory that has only rlinf_actors in it; it is the import path of queries, whose interpreters may have
            other packages than agentd's.
        environment: returns the node's environment; called at every query.
        described: True if this node only pretends to have hardware.
        users: as whom the processes of a driver run.
        admit: returns who may launch on this node.
    """

    def __init__(
        self,
        rules: Rules,
        root: str,
        environment: Callable[[], Mapping[str, str]],
        *,
        described: bool,
        users: Users,
        admit: Callable[[], LaunchRules] = LaunchRules,
    ) -> None:
        self._rules = rules
        self._root = root
        self._environment = environment
        self._mode = "described" if described else "real"
        self._users = users
        self._admit = admit
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MOST_QUERIES))  # by driver

    async def query(self, question: HardwareQuestion, by: Launcher | None = None) -> HardwareAnswer:
        """Enumerate hardware in a process, as the user of the driver that asks. Return the hardware that was found, or
        the reason why the enumeration was refused or failed. Cancelling kills the process.
        """
        by = by or Launcher()
        refused = self._admit().why_not(self._rules.node, by)
        if refused:
            log.warning("refused a query for %s: %s", question.type, refused)
            return HardwareAnswer(kind="failed", text=refused)
        root, environment = self._root, self._environment()
        try:
            user = self._users.of_driver(by.driver)
            rules = self._rules
            if user is not None:
                root, environment = self._users.import_path, user.environment(environment)
                rules = replace(rules, user=user)
            env = process_environment(environment, question.env, question.path_env_merge_mode)
            python = find_interpreter(question.interpreter, env, rules)
        except ValueError as error:
            return HardwareAnswer(kind="failed", text=str(error))
        limit_s = min(question.limit_s, MAX_LIMIT_S)
        given = msgspec.json.encode(question)
        async with self._turns[by.driver]:
            with _executing_as(user, env) as (through, given_env, fds):
                end = await run_child(
                    _CHILD,
                    [self._mode],
                    python=python,
                    env=given_env,
                    timeout_s=limit_s,
                    root=root,
                    given=given,
                    through=through,
                    fds=fds,
                )
        return read_answer(end, f"enumerate() of {question.type}", limit_s)


@contextlib.contextmanager
def _executing_as(
    user: User | None, env: Mapping[str, str]
) -> Iterator[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]:
    """Yield what executes a program as *user* in the environment *env*: the beginning of the command line, the
    environment and the descriptors of the process.

    A driver's environment is not that of a process which is still agentd's user: LD_PRELOAD would run code in it.
    """
    if user is None:
        yield (), env, ()
        return
    order = os.memfd_create("as")
    try:
        os.write(order, msgspec.json.encode({"user": user.start_order(), "env": env}))
        os.lseek(order, 0, os.SEEK_SET)
        yield (sys.executable, "-I", "-S", keeper.__file__, "as", str(order)), {}, (order,)
    finally:
        os.close(order)


def read_answer(end: ChildEnd, whose: str, limit_s: float) -> HardwareAnswer:
    """Return the answer that the process of a hardware query wrote before its end. If there is none, return a failure
    with the cause; *whose* names the query in that text, and *limit_s* is its time limit.
    """
    fault = fault_of(end, whose, limit_s)
    if fault:
        return HardwareAnswer(kind="failed", text=f"{fault}; it was killed" if end.hung else fault)
    try:
        return msgspec.json.decode(end.output, type=HardwareAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return HardwareAnswer(kind="failed", text=f"{whose} left no readable answer ({error}): {end.output[:80]!r}")
