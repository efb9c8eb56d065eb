"""Decide how each worker of this node is started, and hold the settings that all workers share.

`plan` decides interpreter, template, environment and files of one worker; it looks for interpreters on the disk and
changes nothing. `make_site` decides once, when agentd starts, where workers run, and prepares their cgroups.
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

from agentd.config import Config, default_interpreters, default_log_dir
from agentd.keeper_client import pid_of
from agentd.sweep import clear_cgroups
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import prepare
from rlinf_actors.errors import ConfigError, WorkerStartError
from rlinf_actors.model.placement import merge_paths
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import NodeReport, ResourceReport, WorkerSpec

log = logging.getLogger(__name__)

SLOT = 128
"""Bytes that a template keeps in its environment block for the id of the worker that it becomes by forking."""

_LOAD_TIME = re.compile(
    r"(LD_|OMP_|KMP_|MKL_|GOMP_|OPENBLAS_|GLIBC_TUNABLES$|MALLOC_|PYTHON|TORCH|PYTORCH_|LANG$|LC_|CUDA_MODULE_LOADING$)"
)
"""Variables that an interpreter or its libraries read when they are loaded: after a fork it is too late to change them.
"""

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
class TemplateKey:
    """Workers with equal keys can come from one template."""

    interpreter: str
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """How to start one worker: its template's key, its environment, and the files for its stdout and stderr."""

    key: TemplateKey
    env: dict[str, str]
    out_path: str
    err_path: str


@dataclass(frozen=True)
class Rules:
    """What this node allows, and where it puts things.

    Attributes:
        node: its name, for messages.
        log_dir: parent of the workers' log files.
        own: agentd's interpreter.
        allowed: prefixes of other interpreters that may be started; None for any.
        cgroups: where workers' cgroups are made.
        log_bytes: size at which a log file is rotated, 0 for none.
    """

    node: str
    log_dir: str
    own: str = sys.executable
    allowed: tuple[str, ...] | None = None
    cgroups: Roots = field(default_factory=Roots)
    log_bytes: int = 0


@dataclass(frozen=True)
class Site:
    """What holds for all workers of this node.

    Attributes:
        rules: which interpreters may be started, where output and cgroups go.
        run_dir: directory for sockets; exists and is private.
        head: the head's endpoint, for workers.
        node_ip: the node's address.
        host: equal for processes that can talk over ipc.
        environment: returns the node's environment; called at every launch.
        listen_ip: where workers bind TCP, "" for ipc only.
        head_key: the head's public key, "" in a cluster without keys.
        resources: the node's accelerators, for their locks.
        owner_pid: process whose end ends every worker; None without one.
        keep_s: seconds for which workers without robots go on when agentd has ended, until the next one adopts them;
            None if they end with agentd.
        keeper: socket of rlinf-workers@.service, whose keeper starts templates; "" if agentd starts a keeper itself.
        entry: ``module:function`` that runs a worker.
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
        return self.rules.node

    def place(self, out_path: str, err_path: str, lease_until: float, lease_s: float) -> WorkerPlace:
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


# --- one worker ---


def plan(spec: WorkerSpec, node_env: Mapping[str, str], rules: Rules) -> LaunchPlan:
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
    return LaunchPlan(template_key(interpreter, env, spec.preload), env, out_path, err_path)


def worker_environment(spec: WorkerSpec, node_env: Mapping[str, str], rules: Rules) -> dict[str, str]:
    """Return the whole environment of a worker: the node's, overridden by the specification's, and its mark."""
    try:
        env = process_environment(node_env, spec.env, spec.path_env_merge_mode)
    except ValueError as error:
        raise _refusal(spec, rules, str(error)) from None
    env[WORKER_MARK] = spec.id
    return env


def process_environment(node_env: Mapping[str, str], asked: Mapping[str, str], merge_mode: str) -> dict[str, str]:
    """Return the node's environment overridden by *asked*.

    Raises:
        ValueError: it cannot be passed to a process.
    """
    env = merge_paths(node_env, asked, merge_mode)
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r}={value!r} cannot be an environment variable")
    return env


def template_key(interpreter: str, env: Mapping[str, str], preload: Sequence[str]) -> TemplateKey:
    variables = tuple(sorted((name, value) for name, value in env.items() if _LOAD_TIME.match(name)))
    return TemplateKey(interpreter, variables, tuple(dict.fromkeys(preload)))


def template_environment(key: TemplateKey, node_env: Mapping[str, str]) -> dict[str, str]:
    """Return a template's own environment; its workers get theirs after the fork."""
    env = {name: value for name, value in node_env.items() if not _LOAD_TIME.match(name)}
    env.update(key.variables)
    tunables = env.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}".lstrip(":")
    return {**env, **_TEMPLATE_ENV, "GLIBC_TUNABLES": tunables, WORKER_MARK: "-" * SLOT}


def template_command(key: TemplateKey, pkg: str, fd: int, node: str, config: str) -> list[str]:
    """Return the argv of a template; *config* is a template.Config as JSON."""
    return [key.interpreter, "-c", BOOTSTRAP, pkg, str(fd), node, config]


def log_paths(spec: WorkerSpec, log_dir: str) -> tuple[str, str]:
    """Return the files for a worker's stdout and stderr."""
    base = f"{spec.log_dir or log_dir}/{file_name(spec.namespace)}/{file_name(spec.group)}-{spec.rank}"
    return base + ".out", base + ".err"


def file_name(name: str) -> str:
    """Return *name* if it can be a file name, else a cleaned one with a hash that keeps it distinct."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:120].lstrip(".") or "_"
    return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def find_interpreter(wanted: str | None, env: Mapping[str, str], rules: Rules) -> str:
    """Return the path of an interpreter that may be started here.

    Args:
        wanted: a path, or a name to search in PATH of *env*; None for agentd's own.
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


# --- the node ---


def make_site(
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
    """Decide where the workers of this node run, and prepare their cgroups. Loop thread.

    Args:
        config: agentd's.
        run_dir: its run directory.
        report: the node.
        environment: see Site.
        head: the head's endpoint.
        head_key: its public key, "" without keys.
        keeps: True if workers may go on without this process.
        keeper: socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: the configured cgroup cannot be used.
    """
    cgroups = find_roots(config, keeper)
    clear_cgroups(asyncio.get_running_loop(), cgroups)  # of an earlier agentd's workers
    rules = Rules(
        report.hostname,
        config.log_dir or default_log_dir(config, run_dir, os.environ),
        allowed=allowed_interpreters(config, report),
        cgroups=cgroups,
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
    """Return the prefixes of allowed interpreters: configured ones, else any on loopback, else the usual ones."""
    if config.interpreters is None and not is_loopback(report.ip):
        return default_interpreters()
    return config.interpreters


def find_roots(config: Config, keeper: str) -> Roots:
    """Find where workers' cgroups are made, make the parents of these ready, and log what is missing.

    Args:
        config: agentd's.
        keeper: socket of the keeper in the workers' unit, "" without one.

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
            "workers get no cgroups, so memory_limit and pids_limit are unavailable, and processes that workers leave "
            "behind are found by their brand alone. To have cgroups: %s", found.why["cgroup"],
        )  # fmt: skip
        return found
    for why in dict.fromkeys(found.why.values()):
        names = [name for name in found.why if found.why[name] == why]
        log.info("%s unavailable: %s", " and ".join(f"{name}_limit" for name in names), why)
    return found
