"""agentd's configuration as one frozen value, and the keys of agentd.toml. Starts nothing.

docs/reference/settings.md has the docstrings of the fields that keys set: `python -m tests.reference_pages` writes them
there, with the defaults. A line "Default: ..." says what stands for a default that is computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rlinf_actors.head.notify import DEFAULT_KINDS
from rlinf_actors.wire.event_values import EventKind
from rlinf_actors.wire.protocol import MAX_LEASE_S, MAX_ROBOT_LEASE_S

PROFILERS = ("nsys", "rocprof-sys-python", "rocprof-sys-run", "rocprof-sys-sample")
"""The profilers that a node allows unless its agentd.toml says otherwise."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "head": ("listen", "connect"),
    "node": ("name", "id", "rank", "ip", "labels", "env"),
    "security": ("key_file", "head_key"),
    "paths": ("run_dir", "log_dir", "state_dir"),
    "workers": (
        "interpreters",
        "prestart",
        "stop_grace_s",
        "cgroup",
        "keep",
        "log_max_mb",
        "log_keep_days",
        "log_total_max_gb",
        "profilers",
        "profile_grace_s",
        "users",
        "umask",
        "limits",
    ),
    "admit": ("drivers", "robots", "nested", "strict"),
    "hardware": ("probe_timeout_s", "described"),
    "notify": ("command", "webhook", "webhook_file", "token_file", "kinds", "timeout_s"),
    "timers": ("beat_s", "lease_s", "robot_lease_s", "head_grace_s", "probe_s", "unresponsive_s", "long_call_s"),
}
"""For each table of agentd.toml, its keys. Each key sets the field of Config with its name and type; see _FIELDS."""
_FIELDS = {"node.id": "node_id", **{f"notify.{key}": f"notify_{key}" for key in KEYS["notify"]}}

MIN_ROBOT_LEASE_S = 0.5
MOST_DRIVERS = 1024  # in one list of drivers, which the head gets (bounds.SomeOf)
MOST: Mapping[str, float] = {
    "beat_s": 900, "lease_s": MAX_LEASE_S, "robot_lease_s": MAX_ROBOT_LEASE_S, "head_grace_s": 7 * 86400,
    "probe_timeout_s": 3600, "probe_s": 3600, "unresponsive_s": 86400, "long_call_s": 7 * 86400, "stop_grace_s": 3600,
    "profile_grace_s": 86400, "log_max_mb": 1e9, "log_keep_days": 36500, "log_total_max_gb": 1e9,
}  # fmt: skip
"""The highest value of each number. A lease that never expires would leave a robot moving without its owner."""


class Config(msgspec.Struct, frozen=True):
    """agentd's configuration, from the files, the environment and the command line. Frozen."""

    head: bool = False  # True if the head runs in this process
    listen: str | None = None
    """HOST:PORT: the head runs in this agentd and listens on this address."""
    connect: str | None = None
    """HOST:PORT of the head that this node joins."""
    embedded: bool = False  # True if a driver owns this process
    owner_pid: int | None = None  # pid of that driver, None without one
    owner_start: int = 0  # start of the driver in clock ticks since boot; 0 if unknown
    ready_fd: int = -1  # inherited pipe to that driver, -1 without
    of_run: bool = False  # True if `rlinf-actors run` owns this process: it ends when stdin closes
    prestart: tuple[str, ...] | None = None
    """Modules that a template imports before the first launch."""
    run_dir: str | None = None
    """Directory of sockets, used by one agentd only, mode 0700; at most 80 bytes long.

    Default: per user
    """
    log_dir: str | None = None
    """Output of workers.

    Default: /var/log/rlinf-actors or ~/.local/state/rlinf-actors/logs
    """
    state_dir: str | None = None
    """State that the head needs after a restart.

    Default: `$XDG_STATE_HOME/rlinf-actors`, else `/var/lib/rlinf-actors` for root, else `~/.local/state/rlinf-actors`:
    a directory for each run directory
    """
    node_id: str | None = None
    """Identity of the node; it must be the same after a restart.

    Default: from machine, user and run directory
    """
    name: str | None = None
    """Name of the node in output; with keys it must be the key's name.

    Default: the key's name, else the host's
    """
    rank: int | None = None
    """As `RLINF_NODE_RANK`.

    Default: chosen by the head
    """
    ip: str | None = None
    """Address by which other machines reach this node.

    Default: the kernel's route to the head
    """
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Table of texts; programs read its keys in `NodeInfo.node_labels`."""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Table of texts: variables of this node's workers; only those that choose devices or interfaces are sent to other
    nodes."""
    interpreters: tuple[str, ...] | None = None
    """Prefixes of the interpreters that workers may use. Environments that the node has built from `requirements` are
    always allowed.

    Default: agentd's own, /opt, /usr and its user's home; on loopback every path
    """
    described: str | None = None
    """JSON file that replaces the node's probed hardware."""
    probe_timeout_s: float = 8.0
    """Seconds that each vendor's library may take."""
    key_file: str | None = None
    """This agentd's key file.

    Default: agent.key (head.key with the head) in the key directory
    """
    key_fd: int = -1  # inherited descriptor of the key file, -1 without
    head_key: str | None = None
    """Public key of the head.

    Default: in the key file
    """
    insecure: bool = False  # True to allow TCP outside loopback without keys
    beat_s: float = 1.0
    """Interval of the heartbeats of nodes and drivers (set where the head runs)."""
    lease_s: float = 10.0
    """Silence after which they are lost; at least 4 heartbeats (set where the head runs)."""
    robot_lease_s: float = 2.0
    """Time that a robot worker continues without an answer of the head; at least 0.5 (set where the head runs)."""
    head_grace_s: float = 120.0
    """Time that workers live while no head runs."""
    probe_s: float = 2.0
    """Interval of agentd's probes of its workers."""
    unresponsive_s: float = 5.0
    """Silence after which a worker is shown as unresponsive; at least 2 probes."""
    long_call_s: float = 10.0
    """Duration after which a running call is shown."""
    stop_grace_s: float = 3.0
    """Seconds between SIGTERM and SIGKILL when agentd stops."""
    cgroup: str = "auto"
    """Parent of the workers' cgroups; see [Limits](../how-to/survive-failures.md#limits)."""
    keep: bool = True
    """True: workers without robots continue when agentd crashes or hands over."""
    log_max_mb: float = 256.0
    """MiB at which a worker's log file is rotated; 0 for never."""
    log_keep_days: float = 30.0
    """Days after the last output after which the log files of ended workers are removed; 0 for never."""
    log_total_max_gb: float = 50.0
    """GiB of all log files of the node beyond which those of ended workers are removed, the oldest first; 0 for no
    limit."""
    profilers: tuple[str, ...] = PROFILERS
    """Programs under which `cluster.profiling` may start workers: names in the PATH of agentd, or paths. Others are
    refused."""
    profile_grace_s: float = 60.0
    """Seconds that a profiler has to write its report after its worker's end, before it is killed."""
    users: Mapping[str, str] = msgspec.field(default_factory=dict)
    """User as whom the workers of each driver's key run, such as `{ "driver-a" = "lab-a", "*" = "lab-guest" }`; `*`
    stands for every other driver. Empty: all as agentd's own user ([Drivers that do not trust one
    another](../how-to/operate.md#drivers-that-do-not-trust-one-another))."""
    umask: int = 0o077
    """Umask of workers that run as another user than agentd."""
    limits: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Resource limits of these workers, such as `{ core = 0, nproc = 4096 }`; -1 for none. Others are agentd's."""
    drivers: tuple[str, ...] | None = None
    """Drivers that may launch on this node: names of their keys, `@GROUP`, `@local` (drivers without a key) or `*`.
    Without it, all may ([Who may launch where](../how-to/set-up-keys.md#who-may-launch-where))."""
    robots: tuple[str, ...] | None = None
    """Those of them whose workers may hold robots on this node. Without it, all of them."""
    nested: bool = True
    """False: only drivers launch on this node, and no workers."""
    strict: bool = False
    """True: without `admit.drivers` no driver may launch on this node (also `agentd --strict`)."""
    notify_command: tuple[str, ...] = ()
    """Program, with its arguments, that the head runs for each event: the absolute path first, no shell ([Get
    notified](../how-to/get-notified.md)). The table `[notify]` counts where the head runs; `rlinf-actors head` reads it
    from head.toml."""
    notify_webhook: str = ""
    """URL to which the head posts each event as JSON."""
    notify_webhook_file: str = ""
    """File with that URL, for a URL that is a secret; not readable by others."""
    notify_token_file: str = ""
    """File with the bearer token for that URL; not readable by others."""
    notify_kinds: tuple[EventKind, ...] = DEFAULT_KINDS
    """The kinds of events ([all kinds](cli.md#rlinf-actors-events))."""
    notify_timeout_s: float = 10.0
    """Seconds that the program, or the request, may take for one event; then it is killed."""
    files: tuple[str, ...] = ()  # configuration files that were read


RELOADABLE = (
    "env", "labels", "stop_grace_s", "drivers", "robots", "nested", "strict", "log_keep_days", "log_total_max_gb",
)  # fmt: skip
"""Fields of Config that change without a restart: for new workers, at the next stop, and for log files. The next hello,
which is sent at once, has them."""


def field_of(table: str, key: str) -> str:
    return _FIELDS.get(f"{table}.{key}", key)


def key_of(field_name: str) -> str:
    """Return the key of agentd.toml that sets a field of Config, such as ``node.name``. Return the field's name if no
    key sets the field.
    """
    keys = (f"{table}.{key}" for table, keys in KEYS.items() for key in keys if field_of(table, key) == field_name)
    return next(keys, field_name)
