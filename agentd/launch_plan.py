"""Decide how each worker of this node is started, and hold the settings that all workers share.

`plan` decides interpreter, template, environment and log files of one worker; it looks for interpreters on the disk and
changes nothing. `make_site` runs once, when agentd starts: it decides where workers run and prepares their cgroups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentd.config import default_log_dir
from agentd.config_fields import Config
from agentd.keeper_client import pid_of
from agentd.sweep import clear_cgroups
from agentd.users import User, Users, as_user
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import prepare
from rlinf_actors.codesync.places import Places
from rlinf_actors.config_files import wrong_variable
from rlinf_actors.errors import ConfigError, WorkerStartError
from rlinf_actors.model.placement import merge_paths
from rlinf_actors.net.host import host_key
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.settings import CODE_DIR, CODE_HASH
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.bounds import MAX_KEY, MAX_VALUE, MAX_VARIABLES
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.log_values import file_name as file_name
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import NodeReport, ResourceReport, WorkerSpec

log = logging.getLogger(__name__)

MOST_VARIABLES = MAX_VARIABLES - 96
"""Most environment variables of a worker, before agentd adds a few."""
SLOT = 128
"""Bytes that a template's environment block reserves for the id of a worker, which a forked worker writes there."""

_LOAD_TIME = re.compile(
    r"(RLINF_ACTORS_CODE_|LD_|OMP_|KMP_|MKL_|GOMP_|OPENBLAS_|GLIBC_TUNABLES$|MALLOC_|PYTHON|TORCH|PYTORCH_|LANG$|LC_|CUDA_MODULE_LOADING$|"
    r"RLINF_ACTORS_DROPIN$)"
)
"""Variables that an interpreter or a library reads when it is loaded: after the fork it is too late to set them."""

_TEMPLATE_ENV = {
    "OPENBLAS_NUM_THREADS": "1",  # a pool of threads would forbid the fork; workers get theirs afterwards
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch: large CPU tensors in huge pages
}
_TUNABLES = {
    "glibc.malloc.hugetlb": "1",
    # Copies from 3 MiB on bypass the caches. By default only copies larger than most of the L3 cache do, and a copy of
    # 64 MiB first reads what it overwrites: measured 6.6 GB/s by default, 14.6 GB/s so.
    "glibc.cpu.x86_non_temporal_threshold": str(3 << 20),
}
"""Tunables of glibc for workers. Those that the user's GLIBC_TUNABLES sets keep the user's value."""

ENTRY = "rlinf_actors.worker.main:run_worker"
"""The function that runs a worker, as ``module:function``."""
BOOTSTRAP = (
    "import sys; p = sys.argv[1] + '/rlinf_actors/template/bootstrap.py'; s = {}; "
    "exec(compile(open(p).read(), p, 'exec'), s); s['bootstrap'](*sys.argv[1:])"
)
"""Program for the template's interpreter (-c); runs rlinf_actors/template/bootstrap.py."""


class TemplateKey(msgspec.Struct, frozen=True):
    """The properties by which a worker's template is chosen: interpreter, load-time variables, preloaded modules, and
    the user. Workers with equal keys can be forked from one template.
    """

    interpreter: str
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...] = ()
    user: str = ""  # as which it runs; "" for agentd's own


class LaunchPlan(msgspec.Struct, frozen=True):
    """The decisions about the start of one worker: the key of its template, its environment, and its log files."""

    key: TemplateKey
    env: dict[str, str]
    out_path: str
    err_path: str
    wrapper: tuple[str, ...] = ()  # command of the profiler under which the worker is started
    profile_dir: str = ""  # directory of the profile


class Rules(msgspec.Struct, frozen=True):
    """The rules of this node for its workers, and the places of their files."""

    node: str  # name of the node, for error messages
    log_dir: str  # parent directory of the workers' log files
    own: str = sys.executable  # path of agentd's interpreter, which is always allowed
    allowed: tuple[str, ...] | None = None  # directories below which other interpreters may be started; None for any
    cgroups: Roots = msgspec.field(default_factory=Roots)  # directories in which workers' cgroups are made
    log_bytes: int = 0  # size at which a log file is rotated; 0 for never
    user: User | None = None  # as whom the workers run; None for agentd's own user
    profilers: tuple[str, ...] = ()  # programs under which workers may be started
    profile_grace_s: float = 0.0  # seconds that a profiler has to write its report after its worker's end


class Site(msgspec.Struct, frozen=True):
    """Settings that are the same for all workers of this node."""

    rules: Rules
    run_dir: Path
    place: WorkerPlace  # the facts that each worker gets, without its own log files and lease
    environment: Callable[[], Mapping[str, str]]  # returns the node's environment for workers; SIGHUP can change it
    resources: Sequence[ResourceReport] = ()  # accelerators and robots of the node
    owner_pid: int | None = None  # driver whose end ends every worker; None without one
    keep_s: float | None = None  # seconds for which workers wait for the next agentd; None if they end with this one
    keeper: str = ""  # socket of the keeper in rlinf-workers@.service; "" if agentd starts one
    users: Users = msgspec.field(default_factory=Users.of_agentd)  # as whom the workers of each driver run
    entry: str = ENTRY  # module:function that runs a worker; tests use their own

    @property
    def user_name(self) -> str:
        """The user as whom the workers run; "" for agentd's own user."""
        return self.rules.user.name if self.rules.user is not None else ""


# --- one worker ---


def plan(spec: WorkerSpec, node_env: Mapping[str, str], rules: Rules) -> LaunchPlan:
    """Return how the worker of *spec* is started on this node, whose environment for workers is *node_env*.

    Raises:
        WorkerStartError: the interpreter is missing or not allowed, the environment cannot be passed to a process, or a
            limit of the worker cannot be enforced here.
    """
    unlimited = rules.cgroups.missing(spec.memory_limit, spec.pids_limit)
    if unlimited and not spec.limits_best_effort:
        advice = "or launch without the limit, or with limits='best_effort'"
        raise _refusal(spec, rules, f"a limit that was asked for cannot hold there: {unlimited}; {advice}")
    try:
        env = process_environment(node_env, spec.env, spec.path_env_merge_mode)
        env[WORKER_MARK] = spec.id
        if spec.code_paths:
            env = process_environment(env, code_environment(spec.code, spec.code_paths, env), "override")
        interpreter = find_interpreter(spec.interpreter, env, rules)
    except ValueError as error:
        raise _refusal(spec, rules, str(error)) from None
    out_path, err_path = log_paths(spec, rules.log_dir)
    if "\0" in out_path or not os.path.isabs(spec.log_dir or "/"):
        raise _refusal(spec, rules, f"its log directory {spec.log_dir!r} cannot be one")
    if wrong := next((name for name in spec.preload if "\0" in name), ""):
        raise _refusal(spec, rules, f"{wrong!r} of its preloaded modules cannot be one")
    key = template_key(interpreter, env, spec.preload, rules.user.name if rules.user is not None else "")
    if spec.profiler is None:
        return LaunchPlan(key, env, out_path, err_path)
    output = profile_path(spec, os.path.dirname(out_path))
    try:
        program = find_profiler(spec, rules)
        env = {**process_environment(env, spec.profiler.env_for(output), "override"), WORKER_MARK: spec.id}
    except ValueError as error:
        raise _refusal(spec, rules, str(error)) from None
    wrapper = tuple(spec.profiler.command_for(program, output))
    if "\0" in "".join(wrapper) + output:
        raise _refusal(spec, rules, f"its profiler cannot be started with {[*wrapper, output]}: it has a zero byte")
    return LaunchPlan(key, env, out_path, err_path, wrapper, os.path.dirname(output))


def refused(order: StartWorkers, admit: LaunchRules, node: str) -> dict[str, str]:
    """Return the workers of an order, by id, that the rules of this node (*admit*) do not admit, and why. Log it."""
    why = {robots: admit.why_not(node, order.launcher, robots) for robots in (False, True)}
    found = {spec.id: why[bool(spec.claims)] for spec in order.workers if why[bool(spec.claims)]}
    for text in dict.fromkeys(found.values()):
        log.warning("refused to start workers of group %s: %s", order.workers[0].group, text)
    return found


def find_profiler(spec: WorkerSpec, rules: Rules) -> str:
    """Return the path of the program under which the worker of *spec* is to be started.

    Raise ValueError, with advice, if no program is named, if this node does not allow the program, or has none of that
    name, or if the worker has robots.
    """
    assert spec.profiler is not None
    if not spec.profiler.command:
        raise ValueError("its profiler has no program: look at cluster.profiling")
    wanted, key = spec.profiler.program(), "workers.profilers in agentd.toml"
    if spec.claims:
        raise ValueError(f"it holds robots, whose stop must not depend on {wanted}: leave it out of cluster.profiling")
    listed = next((one for one in rules.profilers if wanted in (one, os.path.basename(one))), None)
    if listed is None:
        allowed = ", ".join(rules.profilers) or "none"
        raise ValueError(f"the profiler {wanted!r} is not among those that {key} allows there ({allowed}): add it")
    found = shutil.which(listed)
    if found is None:
        raise ValueError(
            f"the profiler {listed!r} is not in the PATH of agentd there ({os.environ.get('PATH', '')}): install it, "
            f"or give its path in {key}"
        )
    return os.path.abspath(found)


def profile_path(spec: WorkerSpec, log_directory: str) -> str:
    """Return the path, without suffix, of the profile of a worker whose log files are in *log_directory*."""
    assert spec.profiler is not None
    restart = f"-restart{spec.incarnation}" if spec.incarnation else ""
    name = f"{file_name(spec.group)}-{spec.rank}{restart}"
    return os.path.join(spec.profiler.directory or log_directory, f"{name}.profile")


def process_environment(node_env: Mapping[str, str], asked: Mapping[str, str], merge_mode: str) -> dict[str, str]:
    """Return the environment of a process: *node_env*, overridden by the variables *asked*.

    *merge_mode*, "append" or "override", says what happens to variables with search paths
    (model.placement.merge_paths). Raise ValueError if a name or value cannot be in an environment.
    """
    env = merge_paths(node_env, asked, merge_mode)
    if len(env) > MOST_VARIABLES:  # its template would not read such an order
        raise ValueError(f"{len(env):,} environment variables, with those of the node: at most {MOST_VARIABLES:,}")
    for name, value in env.items():
        if wrong := wrong_variable(name, value):  # without the value, which may be a secret
            raise ValueError(wrong)
        if len(name) > MAX_KEY or len(value) > MAX_VALUE:
            raise ValueError(
                f"{name[:100]} has {len(name) + len(value):,} characters: too many for a program's environment"
            )
    return env


def code_environment(code: str, paths: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that runs its driver's code instead of the node's.

    Args:
        code: hash of the code.
        paths: directory of the code, then those that go first on the import path.
        env: the worker's environment without these variables.
    """
    directories = [*paths[1:], *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    return {CODE_HASH: code, CODE_DIR: paths[0], "PYTHONPATH": os.pathsep.join(dict.fromkeys(directories))}


def make_directories(plan: LaunchPlan, failed: str, user: User | None) -> None:
    """Make the directories of a worker's log files and profile, as *user*.

    Raise WorkerStartError, which begins with *failed*, if that is not possible.
    """
    directory = os.path.dirname(plan.out_path)
    try:
        with as_user(user):
            _make_private(directory)
            os.makedirs(directory := plan.profile_dir or directory, exist_ok=True)
    except OSError as error:
        text = f"its directory {directory} cannot be used ({error.strerror}): choose another"
        raise WorkerStartError(f"{failed}: {text}") from None


def _make_private(directory: str) -> None:
    """Make *directory*, and those of its parents that are missing, with mode 0700. Raises OSError."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with contextlib.suppress(FileExistsError):  # the error comes when a file is opened there
        os.mkdir(directory, 0o700)


def template_key(interpreter: str, env: Mapping[str, str], preload: Sequence[str], user: str = "") -> TemplateKey:
    variables = tuple(sorted((name, value) for name, value in env.items() if _LOAD_TIME.match(name)))
    return TemplateKey(interpreter, variables, tuple(dict.fromkeys(preload)), user)


def template_environment(key: TemplateKey, node_env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a template: *node_env*, but with the load-time variables of *key*, which take effect
    when a program is loaded.
    """
    env = {name: value for name, value in node_env.items() if not _LOAD_TIME.match(name)}
    env.update(key.variables)
    given = env.get("GLIBC_TUNABLES", "")
    ours = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in given]
    tunables = ":".join([*filter(None, [given]), *ours])
    return {**env, **_TEMPLATE_ENV, "GLIBC_TUNABLES": tunables, WORKER_MARK: "-" * SLOT}


def log_paths(spec: WorkerSpec, log_dir: str) -> tuple[str, str]:
    """Return the paths of a worker's stdout and stderr files. They are below *log_dir*, unless *spec* names another
    directory.
    """
    base = f"{spec.log_dir or log_dir}/{file_name(spec.namespace)}/{file_name(spec.group)}-{spec.rank}"
    return base + ".out", base + ".err"


def find_interpreter(wanted: str | None, env: Mapping[str, str], rules: Rules) -> str:
    """Return the path of the interpreter *wanted*, which may be a path or a name to search in PATH of *env*; None
    stands for agentd's own interpreter.

    Raise ValueError, with advice, if the interpreter does not exist or may not be started on this node.
    """
    if wanted is None or wanted == rules.own:
        return rules.own
    home = rules.user.home if rules.user is not None else os.path.expanduser("~")
    expanded = home + wanted[1:] if wanted == "~" or wanted.startswith("~/") else os.path.expanduser(wanted)
    found = shutil.which(expanded, path=env.get("PATH"))
    path = os.path.normpath(found if found is not None else expanded)
    if (
        rules.allowed is not None
        and path != rules.own
        and not (
            os.path.isabs(path) and any(f"{path}/".startswith(f"{prefix.rstrip('/')}/") for prefix in rules.allowed)
        )
    ):
        raise ValueError(
            f"interpreter {path} is not below a directory that agentd allows there ({', '.join(rules.allowed)}): "
            "add one to its configuration, or use an interpreter below one of these"
        )
    with as_user(rules.user):  # which() asks for agentd's own user, and no answer may show what is closed to the user
        exists = os.path.exists(path)
    if found is None or not exists:
        raise ValueError(
            f"interpreter {wanted} {'cannot be executed' if exists else 'does not exist'} there: "
            "look at python_interpreter_path in the node group's env_configs"
        )
    return path


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
    users: Users,
    keeper: str = "",
) -> Site:
    """Return the settings that all workers of this node share. Prepare the parent directories of their cgroups, and
    kill what is left in the cgroups of earlier workers. Loop thread.

    *users* decides as whom workers run. *keeps* is True if workers may outlive this agentd. *keeper* is the socket of
    the keeper in rlinf-workers@.service, or "" without that unit. Raise ConfigError if the configured cgroup directory
    cannot be used.
    """
    cgroups = find_roots(config, keeper)
    clear_cgroups(asyncio.get_running_loop(), cgroups)  # of an earlier agentd's workers
    rules = Rules(
        report.hostname,
        config.log_dir or default_log_dir(config, run_dir, os.environ),
        allowed=allowed_interpreters(config, report, environment()),
        cgroups=cgroups,
        log_bytes=int(config.log_max_mb * 2**20),
        profilers=config.profilers,
        profile_grace_s=config.profile_grace_s,
    )
    place = WorkerPlace(
        run_dir=run_dir,
        host=report.host,
        head=head,
        node=report.hostname,
        node_ip=report.ip,
        # processes of other users on this node are reached by TCP
        listen_ip="" if is_loopback(report.ip) and not users.is_used else report.ip,
        out_path="",
        err_path="",
        head_key=head_key,
    )
    return Site(
        rules,
        Path(run_dir),
        place,
        environment=environment,
        resources=report.resources,
        owner_pid=config.owner_pid,
        keep_s=config.head_grace_s if keeps else None,
        keeper=keeper if pid_of(keeper) is not None else "",
        users=users,
    )


def site_of(site: Site, user: User | None) -> Site:
    """Return the settings of *site* for the workers of *user*; None stands for agentd's own user."""
    if user is None:
        return site
    rules, place = site.rules, site.place
    allowed = rules.allowed
    if allowed is not None:
        own = os.path.expanduser("~")
        environments = Places.load(user.environment(site.environment())).environments
        allowed = (*(user.home if one == own else one for one in allowed), environments)
    rules = replace(rules, log_dir=user.log_dir, allowed=allowed, user=user)
    place = replace(place, run_dir=user.run_dir, host=host_key(user.uid))
    return replace(site, rules=rules, place=place, environment=lambda: user.environment(site.environment()))


def allowed_interpreters(config: Config, report: NodeReport, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the directories below which workers' interpreters must be, or None if any interpreter is allowed.
    *environment* is the node's environment for workers.

    Without a configured list, any is allowed on a node with a loopback address. On other nodes the interpreters must be
    below the directories of agentd's own Python, /opt, /usr or the home directory. The environments that workers of
    this user build here are always allowed: what is in them runs as this user anyway.
    """
    if config.interpreters is None and is_loopback(report.ip):
        return None
    allowed = config.interpreters
    if allowed is None:
        allowed = (sys.prefix, sys.base_prefix, "/opt", "/usr", os.path.expanduser("~"))
    return tuple(dict.fromkeys((*allowed, Places.load(environment).environments)))


def find_roots(config: Config, keeper: str) -> Roots:
    """Return the directories in which workers' cgroups are made, and prepare them. Log which limits are unavailable.

    *keeper* is the socket of the keeper in rlinf-workers@.service, or "" without that unit; with that unit, workers run
    in the keeper's cgroup. Raise ConfigError if the configured cgroup directory cannot be used.
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
            "behind are found only by an inherited mark. To have cgroups: %s", found.why["cgroup"],
        )  # fmt: skip
        return found
    for why in dict.fromkeys(found.why.values()):
        names = [name for name in found.why if found.why[name] == why]
        log.info("%s unavailable: %s", " and ".join(f"{name}_limit" for name in names), why)
    return found
