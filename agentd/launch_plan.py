"""How a worker is started: which interpreter, which template, which environment and files.

Decisions only: it looks for interpreters on the disk, and changes nothing.

Where the workers of this node run: decided by the daemon, once, and the same for all that start and end workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentd.config import Config, default_interpreters
from agentd.keeper_client import pid_of
from agentd.run_dir import default_log_dir
from agentd.sweep import clear_cgroups
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import prepare
from rlinf_actors.errors import ConfigError, WorkerStartError
from rlinf_actors.model.placement import merge_paths
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.settings import WORKER_MARK
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import NodeReport, ResourceReport, WorkerSpec

log = logging.getLogger(__name__)

SLOT = 128
"""Bytes that a template keeps in its environment block for the id of the worker that it becomes by forking."""

_LOAD_TIME = re.compile(
    r"(LD_|OMP_|KMP_|MKL_|GOMP_|OPENBLAS_|GLIBC_TUNABLES$|MALLOC_|PYTHON|TORCH|PYTORCH_|LANG$|LC_|CUDA_MODULE_LOADING$)"
)
"""Variables that an interpreter or its libraries read when they are loaded: changing them after a fork is too late."""

_TEMPLATE_ENV = {
    "OPENBLAS_NUM_THREADS": "1",  # a pool of threads would forbid the fork; workers get theirs afterwards
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch: large CPU tensors in huge pages
}
_HUGE_PAGES = "glibc.malloc.hugetlb=1"

BOOTSTRAP = (
    "import sys; p = sys.argv[1] + '/rlinf_actors/template/bootstrap.py'; s = {}; "
    "exec(compile(open(p).read(), p, 'exec'), s); s['bootstrap'](*sys.argv[1:])"
)
"""Run by the template's interpreter with -c; see rlinf_actors/template/bootstrap.py."""


@dataclass(frozen=True)
class Key:
    """Workers with equal keys can come from one template."""

    interpreter: str
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What starting one worker needs."""

    key: Key
    env: dict[str, str]
    out_path: str
    err_path: str


@dataclass(frozen=True)
class Rules:
    """What this node's agent allows and where it puts things.

    Attributes:
        node: its name, for messages.
        log_dir: parent of the workers' log files.
        own: agentd's interpreter.
        allowed: prefixes of other interpreters that may be started; None: any.
        cgroups: where workers' cgroups are made.
        log_bytes: size at which a log file begins anew, 0 for none.
    """

    node: str
    log_dir: str
    own: str = sys.executable
    allowed: tuple[str, ...] | None = None
    cgroups: Roots = field(default_factory=Roots)
    log_bytes: int = 0


def plan(spec: WorkerSpec, node_env: Mapping[str, str], rules: Rules) -> Plan:
    """Decide how *spec* is started on this node.

    Raises:
        WorkerStartError: the interpreter is missing or not allowed, the environment cannot be passed on, or its
            limits cannot hold here.
    """
    unlimited = rules.cgroups.missing(spec.memory_limit, spec.pids_limit)
    if unlimited and not spec.limits_best_effort:
        advice = "or launch without the limit, or with limits='best_effort'"
        raise _refusal(spec, rules, f"a limit that was asked for cannot hold there: {unlimited}; {advice}")
    env = worker_environment(spec, node_env, rules)
    try:
        interpreter = find_interpreter(spec.interpreter, env, rules)
    except ValueError as error:
        raise _refusal(spec, rules, str(error)) from None
    out_path, err_path = log_paths(spec, rules.log_dir)
    if "\0" in out_path:
        raise _refusal(spec, rules, f"its log directory {spec.log_dir!r} cannot be one")
    return Plan(template_key(interpreter, env, spec.preload), env, out_path, err_path)


def worker_environment(spec: WorkerSpec, node_env: Mapping[str, str], rules: Rules) -> dict[str, str]:
    """The whole environment of a worker: its node's, with the specification's on top, and its mark."""
    try:
        env = process_environment(node_env, spec.env, spec.path_env_merge_mode)
    except ValueError as error:
        raise _refusal(spec, rules, str(error)) from None
    env[WORKER_MARK] = spec.id
    return env


def process_environment(node_env: Mapping[str, str], asked: Mapping[str, str], merge_mode: str) -> dict[str, str]:
    """The node's environment, and on top what is asked for.

    Raises:
        ValueError: it cannot be passed to a process.
    """
    env = merge_paths(node_env, asked, merge_mode)
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r}={value!r} cannot be an environment variable")
    return env


def template_key(interpreter: str, env: Mapping[str, str], preload: Sequence[str]) -> Key:
    """What a template that serves such workers is known by."""
    variables = tuple(sorted((name, value) for name, value in env.items() if _LOAD_TIME.match(name)))
    return Key(interpreter, variables, tuple(dict.fromkeys(preload)))


def template_environment(key: Key, node_env: Mapping[str, str]) -> dict[str, str]:
    """The environment that a template itself runs in; its workers get their own after the fork."""
    env = {name: value for name, value in node_env.items() if not _LOAD_TIME.match(name)}
    env.update(key.variables)
    tunables = env.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}".lstrip(":")
    return {**env, **_TEMPLATE_ENV, "GLIBC_TUNABLES": tunables, WORKER_MARK: "-" * SLOT}


def template_command(key: Key, pkg: str, fd: int, node: str, config: str) -> list[str]:
    """The argv of a template; *config* is a worker.template.Config as JSON."""
    return [key.interpreter, "-c", BOOTSTRAP, pkg, str(fd), node, config]


def log_paths(spec: WorkerSpec, log_dir: str) -> tuple[str, str]:
    """Files for a worker's stdout and stderr."""
    base = f"{spec.log_dir or log_dir}/{file_name(spec.namespace)}/{file_name(spec.group)}-{spec.rank}"
    return base + ".out", base + ".err"


def file_name(name: str) -> str:
    """*name* as a file name: itself if it is one, else cleaned, with a hash that keeps it distinct."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:120].lstrip(".") or "_"
    return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def find_interpreter(wanted: str | None, env: Mapping[str, str], rules: Rules) -> str:
    """The path of an interpreter that may be started here.

    Args:
        wanted: a path or a name to search in PATH; None for agentd's own.
        env: of the process that it is for.
        rules: of this node.

    Raises:
        ValueError: it is missing or not allowed; the text says what to do.
    """
    if wanted is None or wanted == rules.own:
        return rules.own
    expanded = os.path.expanduser(wanted)
    found = shutil.which(expanded, path=env.get("PATH"))
    path = os.path.normpath(found if found is not None else expanded)
    if rules.allowed is not None and path != rules.own and not _below(path, rules.allowed):
        raise ValueError(
            f"interpreter {path} is not below a directory that agentd allows there ({', '.join(rules.allowed)}): "
            "add one to its configuration, or use an interpreter below one of these"
        )
    if found is None:
        exists = os.path.exists(expanded)
        raise ValueError(
            f"interpreter {wanted} {'cannot be executed' if exists else 'does not exist'} there: "
            "look at python_interpreter_path in the node group's env_configs"
        )
    return path


def _below(path: str, prefixes: Sequence[str]) -> bool:
    return os.path.isabs(path) and any(
        path == prefix or path.startswith(prefix.rstrip("/") + "/") for prefix in prefixes
    )


def _refusal(spec: WorkerSpec, rules: Rules, text: str) -> WorkerStartError:
    worker = f"{spec.group}:{spec.rank}"
    return WorkerStartError(f"{worker} cannot be started on node {rules.node}: {text}", worker=worker, node=rules.node)


@dataclass(frozen=True)
class Site:
    """What a worker finds here, and what holds for all of them.

    Attributes:
        rules: which interpreters may be started, where output and cgroups go.
        run_dir: directory for sockets; exists, is ours alone.
        head: the coordinator's endpoint, as workers are told it.
        node_ip: the node's address.
        host: equal for processes that can talk over ipc.
        environment: the node's, asked for at every launch.
        listen_ip: where workers bind TCP, "" for ipc only.
        head_key: the head's public key, "" in a cluster without keys.
        resources: what the node has, for the accelerators' locks.
        owner_pid: process whose end is the end of every worker; None without one.
        keep_s: workers without robots go on that many seconds when agentd is gone, for the next one to adopt; None:
            they end with it.
        keeper: the socket of rlinf-workers@.service, whose keeper starts templates; "": agentd starts a keeper itself.
        entry: ``module:function`` that runs a worker; see worker.template.
    """

    rules: Rules
    run_dir: Path
    head: str
    node_ip: str
    host: str
    environment: Callable[[], Mapping[str, str]]
    listen_ip: str = ""
    head_key: str = ""
    resources: Sequence[ResourceReport] = ()
    owner_pid: int | None = None
    keep_s: float | None = None
    keeper: str = ""
    entry: str = "rlinf_actors.worker.main:run_worker"

    @property
    def node(self) -> str:
        """The node's name."""
        return self.rules.node

    def place(self, out_path: str, err_path: str, lease_until: float, lease_s: float) -> WorkerPlace:
        """What a worker is told of where it is; see WorkerPlace."""
        return WorkerPlace(
            run_dir=str(self.run_dir),
            host=self.host,
            head=self.head,
            node=self.node,
            node_ip=self.node_ip,
            listen_ip=self.listen_ip,
            out_path=out_path,
            err_path=err_path,
            lease_until=lease_until,
            lease_s=lease_s,
            head_key=self.head_key,
        )


def site(
    config: Config,
    run_dir: str,
    report: NodeReport,
    environment: Callable[[], Mapping[str, str]],
    *,
    head: str,
    head_key: str,
    keeps: bool,
    keeper: str = "",
) -> Site:
    """Where the workers of this node run; makes their cgroups' root ready. Loop thread.

    Args:
        config: agentd's.
        run_dir: its directory of sockets.
        report: the node.
        environment: what the node gives its workers.
        head: the coordinator's endpoint.
        head_key: its public key, "" without keys.
        keeps: whether workers may go on without this process.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: the configured cgroup cannot be used.
    """
    found = roots(config, keeper)
    clear_cgroups(asyncio.get_running_loop(), found)  # what workers of an earlier agentd left in theirs
    rules = Rules(
        report.hostname,
        config.log_dir or default_log_dir(config, run_dir, os.environ),
        allowed=allowed_interpreters(config, report),
        cgroups=found,
        log_bytes=int(config.log_max_mb * 2**20),
    )
    return Site(
        rules,
        Path(run_dir),
        head=head,
        node_ip=report.ip,
        host=report.host,
        environment=environment,
        listen_ip="" if is_loopback(report.ip) else report.ip,
        head_key=head_key,
        resources=report.resources,
        owner_pid=config.owner_pid,
        keep_s=config.head_grace_s if keeps else None,
        keeper=keeper if pid_of(keeper) is not None else "",
    )


def allowed_interpreters(config: Config, report: NodeReport) -> tuple[str, ...] | None:
    """Prefixes of those that may be started: configured, else any on loopback, else the usual ones."""
    found = config.interpreters
    if found is None and not is_loopback(report.ip):
        found = default_interpreters()
    return None if found is None else tuple(found)


def roots(config: Config, keeper: str) -> Roots:
    """Where workers' cgroups are made; makes the parents of these ready, and says once what is missing.

    Args:
        config: agentd's.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: the configured cgroup cannot be used.
    """
    pid = pid_of(keeper) if keeper else None
    if keeper and pid is None:
        log.warning("no keeper listens on %s: systemctl start rlinf-workers@USER, then restart this agentd", keeper)
    try:
        found = prepare(find(config.cgroup, pid=pid))
    except ValueError as error:
        raise ConfigError(str(error), path="workers.cgroup") from None
    if "cgroup" in found.why:
        log.warning(
            "workers get no cgroups, so memory_limit and pids_limit are unavailable, and what workers leave is found "
            "by its brand alone. To have them: %s", found.why["cgroup"],
        )  # fmt: skip
    else:
        for why, names in _by_reason(found.why).items():
            log.info("%s unavailable: %s", " and ".join(f"{name}_limit" for name in names), why)
    return found


def _by_reason(why: Mapping[str, str]) -> dict[str, list[str]]:
    return {text: [name for name in why if why[name] == text] for text in dict.fromkeys(why.values())}
