"""agentd's configuration: files, environment and command line in one frozen value. Nothing is started here.

The command line wins over the environment, the environment over the files, agentd.d/*.toml over agentd.toml, and all
of these over the directories that systemd made for the unit. On SIGHUP `reload` takes over what can change.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from rlinf_actors.cgroups import roots
from rlinf_actors.compat import tomllib
from rlinf_actors.conversion import convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.host import DEFAULT_LISTEN, endpoint_of, split_address
from rlinf_actors.net.socket_security import Security, key_at
from rlinf_actors.settings import FOR_THE_UNIT_ALONE, Settings, Unit

if TYPE_CHECKING:
    from rlinf_actors.security.keyfile import KeyFile

log = logging.getLogger(__name__)

DEFAULT_FILE = Path("/etc/rlinf-actors/agentd.toml")


class _Table(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table of agentd.toml; None stands for a key that is not given."""


class _HeadTable(_Table, frozen=True):
    listen: str | None = None
    connect: str | None = None


class _NodeTable(_Table, frozen=True):
    name: str | None = None
    id: str | None = None
    rank: int | None = None
    ip: str | None = None
    labels: dict[str, str] | None = None
    env: dict[str, str] | None = None


class _SecurityTable(_Table, frozen=True):
    key_file: str | None = None
    head_key: str | None = None


class _PathsTable(_Table, frozen=True):
    run_dir: str | None = None
    log_dir: str | None = None
    state_dir: str | None = None


class _WorkersTable(_Table, frozen=True):
    interpreters: tuple[str, ...] | None = None
    prestart: tuple[str, ...] | None = None
    stop_grace_s: float | None = None
    cgroup: str | None = None
    keep: bool | None = None
    log_max_mb: float | None = None


class _HardwareTable(_Table, frozen=True):
    probe_timeout_s: float | None = None
    described: str | None = None


class _TimersTable(_Table, frozen=True):
    beat_s: float | None = None
    lease_s: float | None = None
    robot_lease_s: float | None = None
    head_grace_s: float | None = None
    probe_s: float | None = None
    unresponsive_s: float | None = None
    long_call_s: float | None = None


def _table(name: str) -> Meta:
    return Meta(description=f"a table: [{name}]")


class _AgentdToml(_Table, frozen=True):
    """The file agentd.toml: one field for each table."""

    head: Annotated[_HeadTable, _table("head")] = _HeadTable()
    node: Annotated[_NodeTable, _table("node")] = _NodeTable()
    security: Annotated[_SecurityTable, _table("security")] = _SecurityTable()
    paths: Annotated[_PathsTable, _table("paths")] = _PathsTable()
    workers: Annotated[_WorkersTable, _table("workers")] = _WorkersTable()
    hardware: Annotated[_HardwareTable, _table("hardware")] = _HardwareTable()
    timers: Annotated[_TimersTable, _table("timers")] = _TimersTable()


KEYS: Mapping[str, tuple[str, ...]] = {
    table: section.__struct_fields__ for table, section in msgspec.structs.asdict(_AgentdToml()).items()
}
"""Every table and key of agentd.toml."""

MIN_ROBOT_LEASE_S = 0.5


@dataclass(frozen=True)
class Config:
    """agentd's configuration.

    Attributes:
        head: True if the head runs in this process.
        listen: the head's HOST:PORT; None for unix sockets only.
        connect: HOST:PORT or endpoint of the head elsewhere.
        embedded: True if a driver owns this process.
        owner_pid: that driver, None without.
        owner_start: when it started, in clock ticks since boot; 0 if unknown.
        ready_fd: inherited pipe to that driver, -1 without.
        prestart: modules of a template that is started ahead of the first launch; None for no such template.
        run_dir: directory of sockets, None for the user's default.
        log_dir: parent of the workers' log files, None for the default.
        state_dir: where the head persists its state, None for run_dir.
        node_id: stays the same across restarts; None to derive it.
        name: the node's name for people, None for the host's.
        rank: RLINF_NODE_RANK.
        ip: this node's address, None to ask the kernel.
        labels: of the node.
        env: variables for workers on this node.
        interpreters: prefixes of interpreters that workers may use; None for the default.
        described: JSON file that stands in for the hardware.
        probe_timeout_s: seconds that each vendor's library may take.
        key_file: this agentd's key file; None for the key directory's, if there is one.
        head_key: public key of the head, None for the key file's.
        insecure: allow TCP outside loopback without keys.
        beat_s: seconds between heartbeats of nodes and drivers (head only).
        lease_s: silence after which these are lost (head only).
        robot_lease_s: seconds that a robot worker goes on without the head; at most lease_s (head only).
        head_grace_s: seconds that workers live while no head runs.
        probe_s: seconds between two probes of workers.
        unresponsive_s: silence after which a worker is shown as unresponsive.
        long_call_s: running time after which a call is shown.
        stop_grace_s: between SIGTERM and SIGKILL when agentd stops.
        cgroup: where workers' cgroups are made: "auto", "off" or a directory of cgroup v2; see
            docs/how-to/survive-failures.md.
        keep: True if workers without robots outlive an agentd that ends unasked or by SIGUSR1, for the next one.
        log_max_mb: size in MiB at which a worker's log file is rotated (one older part is kept); 0 for none.
        files: that were read.
    """

    head: bool = False
    listen: str | None = None
    connect: str | None = None
    embedded: bool = False
    owner_pid: int | None = None
    owner_start: int = 0
    ready_fd: int = -1
    prestart: tuple[str, ...] | None = None
    run_dir: str | None = None
    log_dir: str | None = None
    state_dir: str | None = None
    node_id: str | None = None
    name: str | None = None
    rank: int | None = None
    ip: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    interpreters: tuple[str, ...] | None = None
    described: str | None = None
    probe_timeout_s: float = 8.0
    key_file: str | None = None
    head_key: str | None = None
    insecure: bool = False
    beat_s: float = 1.0
    lease_s: float = 10.0
    robot_lease_s: float = 2.0
    head_grace_s: float = 120.0
    probe_s: float = 2.0
    unresponsive_s: float = 5.0
    long_call_s: float = 10.0
    stop_grace_s: float = 3.0
    cgroup: str = "auto"
    keep: bool = True
    log_max_mb: float = 256.0
    files: tuple[str, ...] = ()


def load(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Load the configuration.

    Args:
        arguments: fields of Config from the command line, and `config`, the file; None means not given.
        environ: the environment.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, a value is invalid.
    """
    settings = Settings.load(environ)
    chosen = arguments.get("config") or settings.config_file
    files = _files(Path(chosen) if chosen else DEFAULT_FILE, must_exist=chosen is not None)
    values: dict[str, Any] = {}
    for path in files:
        _merge(values, read(path))
    from_environment = {
        "rank": settings.node_rank,
        "run_dir": settings.run_dir,
        "log_dir": settings.log_dir,
        "key_file": settings.key_file,
        "head_key": settings.head_key,
        "insecure": settings.insecure_test_network or None,
    }
    values.update({name: value for name, value in from_environment.items() if value is not None})
    given = {name: value for name, value in arguments.items() if value is not None and name != "config"}
    values.update(given)
    if not values.get("embedded"):  # the unit is the driver's
        unit = Unit.load(environ)
        of_unit = {"state_dir": settings.state_dir, "run_dir": unit.run_dir, "log_dir": unit.log_dir}
        values = {**{name: value for name, value in of_unit.items() if value is not None}, **values}
    _choose_role(values, given, settings)
    return _checked(Config(**values, files=tuple(map(str, files))))


def for_reaping(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Load the configuration for `agentd --reap`, which an invalid file must not stop if systemd names the directory.

    Raises:
        ConfigError: as `load`, if nothing else names the run directory.
    """
    try:
        return load(arguments, environ)
    except ConfigError as error:
        run_dir = arguments.get("run_dir") or Unit.load(environ).run_dir
        if run_dir is None:
            raise
        log.warning("%s is reaped without the configuration: %s", run_dir, error)
        return Config(run_dir=run_dir)


def _choose_role(values: dict[str, Any], given: Mapping[str, Any], settings: Settings) -> None:
    """Choose between a head here (command line, file) and a head elsewhere (command line, environment, file)."""
    if given.get("head") or given.get("listen"):
        values.update(head=True, connect=None)
    elif given.get("connect"):
        values.update(head=False, listen=None)
    elif settings.head:
        values.update(head=False, listen=None, connect=settings.head)
    elif values.get("listen"):
        values.update(head=True)
    if values.get("head") and not values.get("listen") and not values.get("embedded"):
        values["listen"] = DEFAULT_LISTEN


def read(path: Path) -> dict[str, Any]:
    """Read a file into fields of Config.

    Raises:
        ConfigError: it is not TOML, a key is unknown, a value has the wrong type; ``path`` says where.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not TOML: {error}", path=str(path)) from None
    file = convert(tables, _AgentdToml, f"{path}: ")
    values = {
        _FIELDS.get(f"{table}.{key}", key): value
        for table, keys in KEYS.items()
        for key in keys
        if (value := getattr(getattr(file, table), key)) is not None
    }
    if "listen" in values and "connect" in values:
        raise ConfigError("has listen and connect: the head is here or elsewhere, so give one", path=f"{path}: head")
    return values


_FIELDS = {"node.id": "node_id"}


def key_of(field_name: str) -> str:
    """Return the key of a field of Config in agentd.toml (``node.name``); the field's own name if it has none."""
    for table, keys in KEYS.items():
        for key in keys:
            if _FIELDS.get(f"{table}.{key}", key) == field_name:
                return f"{table}.{key}"
    return field_name


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for one, other in (("listen", "connect"), ("connect", "listen")):
        if one in more:  # a later file may turn the role around
            values.pop(other, None)
    for name, value in more.items():
        if isinstance(value, dict):
            value = {**values.get(name, {}), **value}
        values[name] = value


def _files(path: Path, must_exist: bool) -> list[Path]:
    if must_exist and not path.exists():
        raise ConfigError("does not exist", path=str(path))
    return [*([path] if path.exists() else []), *sorted((path.parent / "agentd.d").glob("*.toml"))]


def _checked(config: Config) -> Config:
    if config.listen is not None:
        split_address(config.listen, "--listen")
    if config.connect is not None and not config.connect.startswith("ipc://"):
        split_address(config.connect, "--connect")
    if config.rank is not None and config.rank < 0:
        raise ConfigError(f"is {config.rank}; it must be 0 or more", path="node.rank")
    for name in ("beat_s", "lease_s", "robot_lease_s", "probe_timeout_s", "probe_s", "long_call_s"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"is {getattr(config, name)}; it must be more than 0", path=key_of(name))
    if config.lease_s < 4 * config.beat_s:
        raise ConfigError(
            f"is {config.lease_s:g}; it must be at least 4 beats of {config.beat_s:g} s", path="timers.lease_s"
        )
    if config.unresponsive_s < 2 * config.probe_s:
        raise ConfigError(
            f"is {config.unresponsive_s:g}; it must be at least 2 probes of {config.probe_s:g} s",
            path="timers.unresponsive_s",
        )
    if config.robot_lease_s < MIN_ROBOT_LEASE_S:
        raise ConfigError(
            f"is {config.robot_lease_s:g}; it must be at least {MIN_ROBOT_LEASE_S:g}: networks and machines pause for "
            "shorter than that",
            path="timers.robot_lease_s",
        )
    for name in ("head_grace_s", "stop_grace_s", "log_max_mb"):
        if not getattr(config, name) >= 0:
            raise ConfigError(f"is {getattr(config, name)}; it must be 0 or more", path=key_of(name))
    return config


def check_files(config: Config) -> None:
    """Check the files that the configuration names, for `agentd --check-config`. Nothing is started.

    Raises:
        ConfigError: a file or directory cannot be used.
    """
    if config.described is not None and not os.access(config.described, os.R_OK):
        raise ConfigError(f"is {config.described!r}, which cannot be read", path="hardware.described")
    try:
        roots.find(config.cgroup)
    except ValueError as error:
        raise ConfigError(str(error), path="workers.cgroup") from None


def default_interpreters() -> tuple[str, ...]:
    """Return the prefixes of interpreters for workers in a cluster of several machines."""
    home = os.path.expanduser("~")
    return tuple(dict.fromkeys((sys.prefix, sys.base_prefix, "/opt", "/usr", home)))


def default_log_dir(config: Config, run_dir: str, environ: Mapping[str, str]) -> str:
    """Return the default directory of workers' output; with an embedded cluster it ends with the cluster."""
    if config.embedded:
        return os.path.join(run_dir, "logs")
    if os.getuid() == 0:
        return "/var/log/rlinf-actors"
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "rlinf-actors", "logs")


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of agentd's environment that workers get: not the unit's own variables, and UTF-8 only.

    Variables that are not UTF-8 cannot be in a message; the log names them, since a user's program may miss them.
    """
    kept = {name: value for name, value in environ.items() if name not in FOR_THE_UNIT_ALONE}
    for name in list(kept):
        try:
            (name + kept[name]).encode()
        except UnicodeEncodeError:  # os.environ holds other bytes as lone surrogates (os.fsdecode)
            log.warning("workers do not get the environment variable %s: it is not UTF-8", ascii(name))
            del kept[name]
    return kept


RELOADABLE = ("env", "labels", "stop_grace_s")
"""Fields that take effect at once: for new workers, the next hello, the next stop."""
_OF_NO_EFFECT = ("files",)


@dataclass(frozen=True)
class Changes:
    """The differences that a fresh configuration makes.

    Attributes:
        config: from now on.
        applied: keys of agentd.toml that differ and take effect now.
        restart: keys that differ and take effect after a restart.
    """

    config: Config
    applied: tuple[str, ...]
    restart: tuple[str, ...]


def reload(current: Config, fresh: Config) -> Changes:
    """Return *current* with the RELOADABLE fields of *fresh*, and the keys that differ."""
    changed = [
        field.name
        for field in fields(Config)
        if field.name not in _OF_NO_EFFECT and getattr(fresh, field.name) != getattr(current, field.name)
    ]
    return Changes(
        replace(current, **{name: getattr(fresh, name) for name in (*RELOADABLE, *_OF_NO_EFFECT)}),
        tuple(key_of(name) for name in changed if name in RELOADABLE),
        tuple(key_of(name) for name in changed if name not in RELOADABLE),
    )


def own_key(config: Config, settings: Settings) -> KeyFile | None:
    """Return this agentd's key file, None without one; on loopback without cluster keys it is the user's own.

    Raises:
        ConfigError: there is a key file that cannot be used.
    """
    if config.embedded:  # unix sockets only
        return None
    role = "head" if config.head else "agent"
    return key_at(
        _endpoint(config), settings, role, insecure=config.insecure, given=config.key_file, head=config.head_key
    )


def named(config: Config, key: KeyFile | None) -> Config:
    """Return the configuration with the node name of the agent's key, unless it names the node itself."""
    if key is None or key.role != "agent" or config.name is not None:
        return config
    return replace(config, name=key.name)


def check_addresses(config: Config, security: Security) -> None:
    """Check that a key protects the head's TCP address, unless it is on loopback or `insecure` is set.

    Raises:
        ConfigError: the address would be open to anyone.
    """
    endpoint = _endpoint(config)
    if endpoint:
        security.mechanism(endpoint, "listen on" if config.head else "connect to")


def _endpoint(config: Config) -> str:
    """Return the head's TCP endpoint, here or elsewhere; "" without one."""
    if config.head:
        return endpoint_of(config.listen, "--listen") if config.listen is not None else ""
    if config.connect is None or config.connect.startswith("ipc://"):
        return ""
    return endpoint_of(config.connect, "--connect")
