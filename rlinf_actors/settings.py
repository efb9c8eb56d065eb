"""Every environment variable that configures the project; nothing else reads os.environ for that.

A function per process kind builds one frozen value; the rest of the code takes it as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rlinf_actors.errors import ConfigError

HEAD = "RLINF_HEAD"
NODE_RANK = "RLINF_NODE_RANK"
PATH_ENV_MERGE_MODE = "RLINF_PATH_ENV_MERGE_MODE"
EXT_MODULE = "RLINF_EXT_MODULE"
COMM_NET_DEVICES = "RLINF_COMM_NET_DEVICES"
TIMEOUT_MINUTES = "RLINF_TIMEOUT"
LOG_LEVEL = "RLINF_LOG_LEVEL"
RUN_DIR = "RLINF_ACTORS_RUN_DIR"
HEADS_DIR = "RLINF_ACTORS_HEADS"
LOG_DIR = "RLINF_ACTORS_LOG_DIR"
CONFIG_FILE = "RLINF_ACTORS_CONFIG"
CLIENT_CONFIG = "RLINF_ACTORS_CLIENT_CONFIG"
INSECURE_TEST_NETWORK = "RLINF_ACTORS_INSECURE_TEST_NETWORK"
CHANNEL_BYTES = "RLINF_ACTORS_CHANNEL_BYTES"
KEPT_LOGS = "RLINF_ACTORS_KEPT_LOGS"
LOST_ERRORS = "RLINF_ACTORS_LOST_ERRORS"
ROBOT_OWNER_MUST_ANSWER = "RLINF_ACTORS_ROBOT_OWNER_MUST_ANSWER"
SEND_WINDOW = "RLINF_ACTORS_SEND_WINDOW"
PATHS = "RLINF_ACTORS_PATHS"
SHARED_MEMORY = "RLINF_ACTORS_SHARED_MEMORY"
FAULTS = "RLINF_ACTORS_FAULTS"
LISTEN = "RLINF_ACTORS_LISTEN"
KEEPER = "RLINF_ACTORS_KEEPER"
KEY_DIR = "RLINF_ACTORS_KEYS"
KEY_FILE = "RLINF_ACTORS_KEY_FILE"
HEAD_KEY = "RLINF_ACTORS_HEAD_KEY"
STATE_DIR = "STATE_DIRECTORY"
"""Set by systemd for a unit with StateDirectory=."""
FOR_THE_UNIT_ALONE = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
     "JOURNAL_STREAM", "MAINPID", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "FDSTORE",
     "CREDENTIALS_DIRECTORY", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "CACHE_DIRECTORY", "CONFIGURATION_DIRECTORY",
     STATE_DIR, LISTEN, KEEPER, KEY_FILE}
)  # fmt: skip
"""What systemd tells the process of a unit, and not what that starts: a worker would take them for its own."""
NAMESPACE = "CLUSTER_NAMESPACE"
WORKER_MARK = "RLINF_ACTORS_WORKER"
"""Set in every worker (its id), so that a sweep of /proc finds what a worker left behind."""
CHILDREN = "RLINF_ACTORS_CHILDREN"
"""Set in every worker, and so in what it starts: the socket where its children become members. It is no secret."""
CLUSTER_MARK = "RLINF_ACTORS_CLUSTER"
"""Set in the agentd of a private cluster, and so in all that comes from it: its run directory."""
PROBE_ROOT = "RLINF_ACTORS_PROBE_ROOT"
PROBE_LIMIT = "RLINF_ACTORS_PROBE_LIMIT"
"""Set by the hardware probe in its processes: seconds until each is killed."""
TEST_MARK = "RLINF_ACTORS_TEST"
"""Set by the pytest plugin while a test runs: whatever the test starts inherits it, and can be found afterwards."""

DEFAULT_SEND_WINDOW = 64 << 20
MIN_SEND_WINDOW = 1 << 20

DEFAULT_SHARED_MEMORY = 1 << 30
DEFAULT_CHANNEL_BYTES = 8 << 30

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MERGE_MODES = ("append", "override")

PATH_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("lane",), "accelerator": ("lane", "staged")})
"""What RLINF_ACTORS_PATHS may ask for: kind of buffer to paths; see tensors.paths."""


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        head: the coordinator's address, ``HOST:PORT`` or a ZeroMQ endpoint; None without one.
        head_from: what names it: RLINF_HEAD, or a key of a client file.
        node_rank: this node's rank in the cluster, None to let the head choose.
        path_env_merge_mode: "append" (configuration first, then the node's) or "override".
        ext_module: module whose ``register()`` runs in the probe and in every worker.
        comm_net_devices: network interfaces for collectives, None for the one that holds the node's address.
        timeout_minutes: how long collectives wait, None for torch's default.
        run_dir: parent directory of sockets, None for the per-user default.
        heads_dir: directory in which heads leave their records, None for the usual places (net.headrecords).
        log_dir: directory of worker logs, None for the default.
        state_dir: directory for what a head remembers across its restarts, None for the default.
        listen: HOST:PORT where `rlinf-actors head` listens, None for loopback.
        insecure_test_network: whether sockets may leave loopback without keys (``=1``; closed test networks only).
        fail_on_lost_errors: whether a script whose calls failed unnoticed exits with 1 instead of 0
            (``RLINF_ACTORS_LOST_ERRORS=log`` switches it off).
        robot_owner_must_answer: whether groups with robots end when their owner stands still; None for those alone
            whose robots are on another host.
        channel_bytes: bytes that may be in a channel before puts wait; 0 for no limit.
        config_file: agentd's configuration file, None for the default places.
        client_config: the client file, None for the usual places (net.discovery).
        shared_memory_bytes: how much shared memory a process may lend to others on its machine, 0 for none.
        send_window_bytes: how many bytes a worker may have sent to another one that were not received yet.
        paths: kind of buffer to the path that it takes where that is possible (``cpu=lane,accelerator=staged``).
        faults: rules of fault points in JSON, None for none; net.faultpoints reads them.
        credentials_dir: where systemd put the credentials of our unit, None without one.
        key_file: this process's key file, None for the one in the key directory.
        head_key: public key of the head, None for what the key file says.
        key_dir: directory of this user's key files, None for the default; see security.keyfile.
        config_home: parent directory of this user's configuration.
        kept_logs: directory for the logs of private clusters in which something failed, None to keep none
            (``RLINF_ACTORS_KEPT_LOGS=none``).
    """

    head: str | None = None
    head_from: str = HEAD
    node_rank: int | None = None
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
    robot_owner_must_answer: bool | None = None
    config_file: str | None = None
    client_config: str | None = None
    send_window_bytes: int = DEFAULT_SEND_WINDOW
    paths: Mapping[str, str] = field(default_factory=dict)
    shared_memory_bytes: int = DEFAULT_SHARED_MEMORY
    channel_bytes: int = DEFAULT_CHANNEL_BYTES
    faults: str | None = None
    credentials_dir: str | None = None
    key_file: str | None = None
    head_key: str | None = None
    key_dir: str | None = None
    config_home: str = "~/.config"
    kept_logs: str | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment (``os.environ`` by default).

        Raises:
            ConfigError: a variable has a value that it cannot have; ``path`` is its name.
        """
        env = os.environ if environ is None else environ
        mode = env.get(PATH_ENV_MERGE_MODE) or "append"
        if mode not in MERGE_MODES:
            raise ConfigError(f"is {mode!r}; it must be one of {', '.join(MERGE_MODES)}", path=PATH_ENV_MERGE_MODE)
        return cls(
            head=env.get(HEAD) or None,
            node_rank=_rank(env.get(NODE_RANK)),
            path_env_merge_mode=mode,
            ext_module=env.get(EXT_MODULE) or None,
            comm_net_devices=env.get(COMM_NET_DEVICES) or None,
            timeout_minutes=_minutes(env.get(TIMEOUT_MINUTES)),
            run_dir=env.get(RUN_DIR) or None,
            heads_dir=env.get(HEADS_DIR) or None,
            log_dir=env.get(LOG_DIR) or None,
            state_dir=_first(env.get(STATE_DIR)),
            listen=env.get(LISTEN) or None,
            insecure_test_network=env.get(INSECURE_TEST_NETWORK) == "1",
            fail_on_lost_errors=env.get(LOST_ERRORS) != "log",
            robot_owner_must_answer=_yes_or_no(env.get(ROBOT_OWNER_MUST_ANSWER), ROBOT_OWNER_MUST_ANSWER),
            config_file=env.get(CONFIG_FILE) or None,
            client_config=env.get(CLIENT_CONFIG) or None,
            send_window_bytes=_bytes(env.get(SEND_WINDOW), SEND_WINDOW, DEFAULT_SEND_WINDOW, MIN_SEND_WINDOW),
            shared_memory_bytes=_bytes(env.get(SHARED_MEMORY), SHARED_MEMORY, DEFAULT_SHARED_MEMORY, 0),
            channel_bytes=_bytes(env.get(CHANNEL_BYTES), CHANNEL_BYTES, DEFAULT_CHANNEL_BYTES, 0),
            paths=_paths(env.get(PATHS)),
            faults=env.get(FAULTS) or None,
            credentials_dir=env.get("CREDENTIALS_DIRECTORY") or None,
            key_file=env.get(KEY_FILE) or None,
            head_key=env.get(HEAD_KEY) or None,
            key_dir=env.get(KEY_DIR) or None,
            kept_logs=_kept_logs(env),
            config_home=env.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"),
        )


def for_workers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of the driver that hold for its workers too, unless the launch or the cluster has others."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in (LOG_LEVEL,) if env.get(name)}


def log_level(environ: Mapping[str, str]) -> str:
    """Return the level of workers' loggers that *environ* asks for, INFO by default.

    Raises:
        ConfigError: there is no such level. Not a setting: a worker whose node has a wrong one says so and goes on.
    """
    level = (environ.get(LOG_LEVEL) or "INFO").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"is {environ[LOG_LEVEL]!r}; it must be one of {', '.join(LOG_LEVELS)}", path=LOG_LEVEL)
    return level


@dataclass(frozen=True)
class Unit:
    """What systemd tells the main process of a unit; nothing of it anywhere else.

    Attributes:
        notify_socket: where to say how the service is, "" where nobody listens.
        watchdog_s: how long it may be silent there before it is killed, None without a watchdog.
        journal_stream: ``DEVICE:INODE`` of the journal's socket, "" without one.
        run_dir: of RuntimeDirectory=.
        log_dir: of LogsDirectory=.
        result: how the service ended, for its ExecStopPost=; "" anywhere else.
        keeper: the socket of the keeper in rlinf-workers@.service, "" without that unit.
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
        """Read the environment (``os.environ`` by default) of the process *pid* (this one by default).

        Raises:
            ConfigError: WATCHDOG_USEC is no number above 0.
        """
        env = os.environ if environ is None else environ
        return cls(
            notify_socket=env.get("NOTIFY_SOCKET", ""),
            watchdog_s=_watchdog(env, os.getpid() if pid is None else pid),
            journal_stream=journal_stream(env),
            run_dir=_first(env.get("RUNTIME_DIRECTORY")),
            log_dir=_first(env.get("LOGS_DIRECTORY")),
            result=env.get("SERVICE_RESULT", ""),
            keeper=env.get(KEEPER, ""),
        )


def journal_stream(environ: Mapping[str, str] | None = None) -> str:
    """``DEVICE:INODE`` of the journal's socket, "" without one."""
    return (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")


def _kept_logs(env: Mapping[str, str]) -> str | None:
    given = env.get(KEPT_LOGS)
    if given:
        return None if given == "none" else os.path.abspath(given)
    state_home = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state_home, "rlinf-actors", "kept-logs")  # "logs" there is agentd's


def _first(directories: str | None) -> str | None:
    """Of a list that systemd gives with colons."""
    return (directories or "").partition(":")[0] or None


def _watchdog(env: Mapping[str, str], pid: int) -> float | None:
    """None too if the variables were meant for another process, whose environment we inherited."""
    text, meant = env.get("WATCHDOG_USEC"), env.get("WATCHDOG_PID")
    if not text or (meant and meant != str(pid)):
        return None
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"is {text!r}; it must be a number of microseconds above 0", path="WATCHDOG_USEC")
    return int(text) / 1e6


def _yes_or_no(text: str | None, name: str) -> bool | None:
    if not text:
        return None
    if text not in ("0", "1"):
        raise ConfigError(f"is {text!r}; it must be 1 (yes) or 0 (no)", path=name)
    return text == "1"


def _rank(text: str | None) -> int | None:
    if not text:
        return None
    try:
        rank = int(text)
    except ValueError:
        rank = -1
    if rank < 0:
        raise ConfigError(f"is {text!r}; it must be a whole number from 0 up", path=NODE_RANK)
    return rank


def _minutes(text: str | None) -> float | None:
    if not text:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise ConfigError(f"is {text!r}; it must be a number of minutes above 0", path=TIMEOUT_MINUTES)
    return minutes


def _bytes(text: str | None, name: str, default: int, least: int) -> int:
    if not text:
        return default
    try:
        size = int(text)
    except ValueError:
        size = -1
    if size < least:
        raise ConfigError(f"is {text!r}; it must be a number of bytes from {least} up", path=name)
    return size


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
