"""What environment variables configure. No other module reads os.environ for configuration.

`Settings.load` and `Unit.load` build one frozen value each, at the start of a process; the rest of the code takes the
value as an argument. Any thread. `variables` has their names, which are names here too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rlinf_actors.conversion import convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.variables import *

DEFAULT_SEND_WINDOW = 64 << 20
MIN_SEND_WINDOW = 1 << 20

DEFAULT_SHARED_MEMORY = 1 << 30
DEFAULT_RELAY_FROM = 64
DEFAULT_CHANNEL_BYTES = 8 << 30
DEFAULT_LOG_RATE = 100.0
DEFAULT_WAIT_LINES_S = 60.0

_Minutes: Any = Annotated[float, Meta(gt=0, description="a number of minutes above 0")]
_Seconds: Any = Annotated[float, Meta(ge=0, le=86400, description="a number of seconds from 0 to 86400")]
_Rate: Any = Annotated[float, Meta(ge=0, le=1e9, description="a number of lines a second from 0 up")]
_Microseconds: Any = Annotated[int, Meta(gt=0, description="a number of microseconds above 0")]
_YesOrNo: Any = Annotated[Literal["1", "0"], Meta(description="1 (yes) or 0 (no)")]
_LostErrors: Any = Annotated[Literal["end", "exit-code", "log"], Meta(description="end, exit-code or log")]


def _bytes(least: int) -> Any:
    return Annotated[int, Meta(ge=least, description=f"a number of bytes from {least} up")]


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

PATH_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("lane",), "accelerator": ("lane", "staged")})
"""Valid values of RLINF_ACTORS_PATHS: the paths that each kind of buffer can take (see messaging.routes)."""


class Settings(msgspec.Struct, frozen=True):
    """Configuration of this process from environment variables.

    Attributes:
        head: the head's address, ``HOST:PORT`` or a ZeroMQ endpoint; None if no head is named.
        head_from: source of `head`: RLINF_HEAD, or a client file and its key.
        node_rank: rank of this node in the cluster, None if the head chooses.
        num_nodes: number of nodes for which a driver waits if neither it nor its configuration says one.
        path_env_merge_mode: how path variables of the configuration and the node are merged: "append" (configuration
            first, then the node's) or "override".
        ext_module: module with a function ``register()`` that runs in the probe and in every worker.
        comm_net_devices: network interfaces for collectives, None for the interface of the node's address.
        timeout_minutes: timeout of collectives in minutes, None for torch's default.
        run_dir: parent directory of sockets, None for the per-user default.
        heads_dir: directory of the records of heads, None for the default places (net.head_records).
        log_dir: directory of worker logs, None for the default.
        state_dir: directory of the state that a head keeps across restarts, None for the default.
        listen: HOST:PORT where `rlinf-actors head` listens, None for loopback.
        insecure_test_network: True if sockets may listen and connect outside loopback without keys (``=1``; closed test
            networks only).
        fail_on_lost_errors: True if a script exits with 1 instead of 0 when calls failed and no code awaited their
            results (``RLINF_ACTORS_LOST_ERRORS=log`` switches this off).
        end_on_lost_errors: True to end the script as soon as a call has failed and no code waits for its result
            (``RLINF_ACTORS_LOST_ERRORS=end``, which is the default while rlinf_actors.dropin serves rlinf.scheduler).
        shares_robots: True if groups of this job may use a robot at the same time, which they may while
            rlinf_actors.dropin serves rlinf.scheduler.
        channel_wait_s: seconds that a worker which connects to a channel waits until the channel is made: 60 while
            rlinf_actors.dropin serves rlinf.scheduler, else 0.
        robot_owner_must_answer: whether a group with robots ends when its owner's process is suspended: True always,
            False never, None only if its robots are on another host than the owner.
        channel_bytes: most bytes in a channel, beyond which puts wait; 0 for no limit.
        config_file: agentd's configuration file, None for the default places.
        client_config: the client file, None for the default places (net.discovery).
        shared_memory_bytes: most bytes of shared memory that a process lends to other processes on its machine, 0 for
            none.
        local_link: what carries calls and messages between processes of one node: "unix" or "zmq".
        relay_from: ranks of a group on other nodes from which it is called by relays, 0 for never.
        send_window_bytes: most bytes that a worker may have on their way to one other worker.
        paths: for each kind of buffer, the preferred way to carry it (``cpu=lane,accelerator=staged``).
        faults: the faults to inject, in JSON (net.fault_injection); None for none.
        credentials_dir: systemd's directory with the credentials of this unit, None without one.
        key_file: key file of this process, None for the file in the key directory.
        head_key: public key of the head, None for the key in the key file.
        key_dir: directory of this user's key files, None for the default (security.keyfile).
        config_home: parent directory of this user's configuration.
        kept_logs: directory for the logs of private clusters in which a worker failed, None to keep none
            (``RLINF_ACTORS_KEPT_LOGS=none``).
        raw_output: True to print the output of workers in the driver as it is (``RLINF_ACTORS_RAW_OUTPUT=1``).
        log_join: False to print equal lines of several ranks each (``RLINF_ACTORS_LOG_JOIN=0``).
        log_rate: lines a second of a worker that the driver prints in the long run, 0 for all
            (``RLINF_ACTORS_LOG_RATE``).
        progress: False if stderr gets no lines about waits (``RLINF_ACTORS_PROGRESS=0``).
        wait_lines_s: seconds after which a driver logs what a wait is for, 0 for never (``RLINF_ACTORS_WAIT_LINES``).
        code_working_dir: directory whose code the driver sends to its workers, "auto", or "0" for none; None if the
            configuration decides.
        code_dir: in a worker, the directory of the code that its driver has sent; None without one.
    """

    head: str | None = None
    head_from: str = HEAD
    node_rank: int | None = None
    num_nodes: int = 1
    path_env_merge_mode: str = "append"
    ext_module: str | None = None
    comm_net_devices: str | None = None
    timeout_minutes: float | None = None
    run_dir: str | None = None
    heads_dir: str | None = None
    log_dir: str | None = None
    state_dir: str | None = None
    listen: str | None = None
    insecure_test_network: bool = False
    fail_on_lost_errors: bool = True
    end_on_lost_errors: bool = False
    shares_robots: bool = False
    channel_wait_s: float = 0.0
    robot_owner_must_answer: bool | None = None
    config_file: str | None = None
    client_config: str | None = None
    send_window_bytes: int = DEFAULT_SEND_WINDOW
    paths: Mapping[str, str] = msgspec.field(default_factory=dict)
    shared_memory_bytes: int = DEFAULT_SHARED_MEMORY
    local_link: str = "unix"
    relay_from: int = DEFAULT_RELAY_FROM
    channel_bytes: int = DEFAULT_CHANNEL_BYTES
    faults: str | None = None
    credentials_dir: str | None = None
    key_file: str | None = None
    head_key: str | None = None
    key_dir: str | None = None
    config_home: str = "~/.config"
    kept_logs: str | None = None
    raw_output: bool = False
    log_join: bool = True
    log_rate: float = DEFAULT_LOG_RATE
    progress: bool = True
    wait_lines_s: float = DEFAULT_WAIT_LINES_S
    code_working_dir: str | None = None
    code_dir: str | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings in the environment *environ* (None: ``os.environ``).

        Raises:
            ConfigError: the value of a variable is not valid; ``path`` is the variable.
        """
        env = os.environ if environ is None else environ

        def typed(name: str, kind: Any, default: Any = None) -> Any:
            return convert(env[name], kind, name, strict=False) if env.get(name) else default

        minutes = typed(TIMEOUT_MINUTES, _Minutes)
        if minutes is not None and not math.isfinite(minutes):
            raise ConfigError(
                f"is {env[TIMEOUT_MINUTES]!r}; it must be a number of minutes above 0", path=TIMEOUT_MINUTES
            )
        lost_errors = typed(LOST_ERRORS, _LostErrors, "end" if env.get(DROPIN) == "1" else "exit-code")
        return cls(
            head=env.get(HEAD) or None,
            node_rank=typed(NODE_RANK, Annotated[int, Meta(ge=0)]),
            num_nodes=typed(NUM_NODES, Annotated[int, Meta(ge=1)], 1),
            path_env_merge_mode=typed(PATH_ENV_MERGE_MODE, Literal["append", "override"], "append"),
            ext_module=env.get(EXT_MODULE) or None,
            comm_net_devices=env.get(COMM_NET_DEVICES) or None,
            timeout_minutes=minutes,
            run_dir=env.get(RUN_DIR) or None,
            heads_dir=env.get(HEADS_DIR) or None,
            log_dir=env.get(LOG_DIR) or None,
            state_dir=_first(env.get(STATE_DIR)),
            listen=env.get(LISTEN) or None,
            insecure_test_network=env.get(INSECURE_TEST_NETWORK) == "1",
            fail_on_lost_errors=lost_errors != "log",
            end_on_lost_errors=lost_errors == "end",
            shares_robots=env.get(DROPIN) == "1",
            channel_wait_s=60.0 if env.get(DROPIN) == "1" else 0.0,
            robot_owner_must_answer={"1": True, "0": False}.get(typed(ROBOT_OWNER_MUST_ANSWER, _YesOrNo)),
            config_file=env.get(CONFIG_FILE) or None,
            client_config=env.get(CLIENT_CONFIG) or None,
            send_window_bytes=typed(SEND_WINDOW, _bytes(MIN_SEND_WINDOW), DEFAULT_SEND_WINDOW),
            shared_memory_bytes=typed(SHARED_MEMORY, _bytes(0), DEFAULT_SHARED_MEMORY),
            local_link=typed(LOCAL_LINK, Literal["unix", "zmq"], "unix"),
            relay_from=typed(RELAY_FROM, Annotated[int, Meta(ge=0)], DEFAULT_RELAY_FROM),
            channel_bytes=typed(CHANNEL_BYTES, _bytes(0), DEFAULT_CHANNEL_BYTES),
            paths=_paths(env.get(PATHS)),
            faults=env.get(FAULTS) or None,
            credentials_dir=env.get("CREDENTIALS_DIRECTORY") or None,
            key_file=env.get(KEY_FILE) or None,
            head_key=env.get(HEAD_KEY) or None,
            key_dir=env.get(KEY_DIR) or None,
            kept_logs=_kept_logs(env),
            progress=typed(PROGRESS, _YesOrNo) != "0",
            wait_lines_s=typed(WAIT_LINES, _Seconds, DEFAULT_WAIT_LINES_S),
            raw_output=typed(RAW_OUTPUT, _YesOrNo) == "1",
            log_join=typed(LOG_JOIN, _YesOrNo, "1") == "1",
            log_rate=typed(LOG_RATE, _Rate, DEFAULT_LOG_RATE),
            code_working_dir=env.get(CODE_WORKING_DIR),
            code_dir=env.get(CODE_DIR) or None,
            config_home=env.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"),
        )


class CodeSettings(msgspec.Struct, frozen=True):
    """How much code and how many environments a node keeps for its user, from the node's environment.

    Attributes:
        cache_dir: directory for both, None for the default.
        max_bytes: size of the largest tree of code that the node accepts.
        max_files: most files and directories of such a tree.
        cache_bytes: bytes of code beyond which the node removes trees that no process uses.
        environments_kept: number of environments beyond which the node removes those that no process uses.
    """

    cache_dir: str | None = None
    max_bytes: int = 512 << 20
    max_files: int = 50_000
    cache_bytes: int = 4 << 30
    environments_kept: int = 8

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> CodeSettings:
        """Return the settings in the environment *environ* (None: ``os.environ``). Raises ConfigError."""
        env, default = os.environ if environ is None else environ, cls()

        def number(name: str, least: int, otherwise: int) -> int:
            kind = Annotated[int, Meta(ge=least, description=f"a whole number from {least} up")]
            return convert(env[name], kind, name, strict=False) if env.get(name) else otherwise

        return cls(
            env.get(CACHE_DIR) or None,
            number(CODE_BYTES, 1, default.max_bytes),
            number(CODE_FILES, 1, default.max_files),
            number(CODE_CACHE_BYTES, 0, default.cache_bytes),
            number(ENVIRONMENTS_KEPT, 1, default.environments_kept),
        )


class SlurmJob(msgspec.Struct, frozen=True):
    """What Slurm tells a process of a job.

    Attributes:
        nodes: the nodes of the job, in Slurm's short form such as gpu[01-04]; "" outside of a job.
        tasks: number of tasks of the step of which this process is one; 1 in a batch script and in salloc.
    """

    nodes: str = ""
    tasks: int = 1

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> SlurmJob:
        """Return the facts in the environment *environ* (None: ``os.environ``)."""
        env = os.environ if environ is None else environ
        step = env.get("SLURM_STEP_NUM_TASKS", "1")
        return cls(env.get("SLURM_JOB_NODELIST", ""), int(step) if step.isdecimal() else 1)


def for_workers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that workers inherit from their driver, unless the launch or the cluster sets
    them.

    *environ* is the driver's environment, None for ``os.environ``.
    """
    env = os.environ if environ is None else environ
    names = (LOG_LEVEL, LOG_FORMAT, CATCH_FAILURE, PTRACE, DROPIN, PYTHONBREAKPOINT)
    return {name: env[name] for name in names if env.get(name)}


def catching(asked: bool | None) -> dict[str, str]:
    """Return the environment variables of a group that was launched with ``catch_system_failure=asked``."""
    return {} if asked is None else {CATCH_FAILURE: str(int(asked))}


def log_level(environ: Mapping[str, str]) -> str:
    """Return the log level that RLINF_LOG_LEVEL in *environ* sets for workers; INFO if the variable is not set.

    Raises:
        ConfigError: the level is not known. A worker that gets this error logs it and continues.
    """
    level = (environ.get(LOG_LEVEL) or "INFO").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"is {environ[LOG_LEVEL]!r}; it must be one of {', '.join(LOG_LEVELS)}", path=LOG_LEVEL)
    return level


def log_format(environ: Mapping[str, str]) -> str:
    """Return the format of workers' own log lines that RLINF_ACTORS_LOG_FORMAT in *environ* sets: "text" or "json".

    Raises:
        ConfigError: the format is not known. A worker that gets this error logs it and continues.
    """
    found = environ.get(LOG_FORMAT) or "text"
    if found not in ("text", "json"):
        raise ConfigError(f"is {found!r}; it must be text or json", path=LOG_FORMAT)
    return found


class Unit(msgspec.Struct, frozen=True):
    """What systemd tells the main process of a unit by environment variables. Outside a unit, all values are the
    defaults.

    Attributes:
        notify_socket: socket for status notifications to systemd, "" without one.
        watchdog_s: seconds without a notification after which systemd kills the service, None without a watchdog.
        journal_stream: ``DEVICE:INODE`` of the journal's socket, "" without one.
        run_dir: directory of RuntimeDirectory=, None without one.
        log_dir: directory of LogsDirectory=, None without one.
        result: how the service ended (systemd's SERVICE_RESULT) if this process is its ExecStopPost=, else "".
        keeper: path of the socket of the keeper in rlinf-workers@.service, "" without that unit.
    """

    notify_socket: str = ""
    watchdog_s: float | None = None
    journal_stream: str = ""
    run_dir: str | None = None
    log_dir: str | None = None
    result: str = ""
    keeper: str = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, pid: int | None = None) -> Unit:
        """Return systemd's values for this process from the environment *environ* (None: ``os.environ``).

        The watchdog counts only if WATCHDOG_PID is unset or is *pid* (None: this process), because the variables may be
        inherited from another process.

        Raises:
            ConfigError: WATCHDOG_USEC is not a number above 0.
        """
        env = os.environ if environ is None else environ
        watchdog_s = None
        # Inherited variables may be meant for another process.
        if env.get("WATCHDOG_USEC") and env.get("WATCHDOG_PID", "") in ("", str(os.getpid() if pid is None else pid)):
            watchdog_s = convert(env["WATCHDOG_USEC"], _Microseconds, "WATCHDOG_USEC", strict=False) / 1e6
        return cls(
            notify_socket=env.get("NOTIFY_SOCKET", ""),
            watchdog_s=watchdog_s,
            journal_stream=journal_stream(env),
            run_dir=_first(env.get("RUNTIME_DIRECTORY")),
            log_dir=_first(env.get("LOGS_DIRECTORY")),
            result=env.get("SERVICE_RESULT", ""),
            keeper=env.get(KEEPER, ""),
        )


def journal_stream(environ: Mapping[str, str] | None = None) -> str:
    """Return ``DEVICE:INODE`` of the socket by which systemd's journal reads this process's output, "" without one.

    *environ* is the environment to read, None for ``os.environ``.
    """
    return (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")


def takes_sequences(stream: Any) -> bool:
    """Return True if *stream* is a terminal that may get escape sequences: not if TERM is "dumb", nor if a person has
    set NO_COLOR (no-color.org). *stream* may be a script's own, which lacks all but write, or None.
    """
    isatty = getattr(stream, "isatty", None)
    if isatty is None or not isatty():
        return False
    return os.environ.get(TERM) != "dumb" and not os.environ.get(NO_COLOR)


def _kept_logs(env: Mapping[str, str]) -> str | None:
    given = env.get(KEPT_LOGS)
    if given:
        return None if given == "none" else os.path.abspath(given)
    state_home = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state_home, "rlinf-actors", "kept-logs")  # "logs" there is agentd's


def _first(directories: str | None) -> str | None:
    """Return the first directory of a list that systemd separates by colons; None if there is none."""
    return (directories or "").partition(":")[0] or None


def _paths(text: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        kind, _, path = (word.strip() for word in entry.partition("="))
        if path not in PATH_WORDS.get(kind, ()):
            valid = ", ".join(f"{kind}={path}" for kind, paths in PATH_WORDS.items() for path in paths)
            raise ConfigError(f"has {entry!r}; it must be a list, separated by commas, of: {valid}", path=PATHS)
        if found.setdefault(kind, path) != path:
            raise ConfigError(f"asks for {kind}={found[kind]} and for {entry}: give one of them", path=PATHS)
    return found
