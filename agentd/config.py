"""agentd's configuration: files, environment and command line become one frozen `Config`. Starts nothing.

The command line wins over the environment, the environment over the files, agentd.d/*.toml over agentd.toml, and all of
these over the directories that systemd made for the unit. On SIGHUP the daemon calls `reload`, which applies the
settings that can change without a restart. Main thread.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agentd.config_fields import KEYS, MIN_ROBOT_LEASE_S, MOST, MOST_DRIVERS, RELOADABLE, Config, field_of, key_of
from rlinf_actors import config_files
from rlinf_actors.cgroups import roots
from rlinf_actors.conversion import convert
from rlinf_actors.errors import ConfigError
from rlinf_actors.head.notify import Notify, checked
from rlinf_actors.model.names import wrong_name
from rlinf_actors.net.host import DEFAULT_LISTEN, endpoint_of, split_address
from rlinf_actors.net.socket_security import Security, key_at
from rlinf_actors.security.keyfile import inherited
from rlinf_actors.security.members import is_name
from rlinf_actors.settings import FOR_THE_UNIT_ALONE, Settings, Unit
from rlinf_actors.toml_text import parse_toml
from rlinf_actors.wire.launch_rules import ANYONE, LOCAL_DRIVERS, LaunchRules

if TYPE_CHECKING:
    from rlinf_actors.head.commands import Timing
    from rlinf_actors.security.keyfile import KeyFile

log = logging.getLogger(__name__)

DEFAULT_FILE = Path("/etc/rlinf-actors/agentd.toml")


def load(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Return agentd's configuration, checked.

    *arguments* are the options of the command line: fields of Config, and `config`, the path of agentd.toml. None
    stands for an option that was not given.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is invalid.
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
    """Return the configuration for `agentd --reap`.

    If a file is invalid, the result has only the run directory that the command line or systemd names. So processes
    that agentd left can be ended in spite of the invalid file.

    Raises:
        ConfigError: a file is invalid, and neither the command line nor systemd names a run directory.
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
    """Decide whether the head runs in this agentd or elsewhere, and set the fields of Config in *values* for that. The
    options of the command line (*given*) decide; without them RLINF_HEAD decides, and without RLINF_HEAD the files.
    """
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
    """Return the values in one TOML file. The keys are fields of Config. Raise ConfigError if the file cannot be read
    or a key or value is wrong.
    """
    file = convert(parse_toml(config_files.read_text(path), str(path)), _file_struct(), f"{path}: ")
    values = {
        field_of(table, key): value
        for table, keys in KEYS.items()
        for key in keys
        if (value := getattr(getattr(file, table), key)) is not None
    }
    if "listen" in values and "connect" in values:
        raise ConfigError("has listen and connect: the head is here or elsewhere, so give one", path=f"{path}: head")
    return values


def _file_struct() -> type[msgspec.Struct]:
    """Return the type to which agentd.toml is converted: a struct with one field for each table. A key that the file
    does not have is None.
    """
    types = get_type_hints(Config)
    tables: list[tuple[str, Any, Any]] = []
    for table, keys in KEYS.items():
        columns = [(key, Union[types[field_of(table, key)], None], None) for key in keys]
        struct = msgspec.defstruct(table, columns, forbid_unknown_fields=True, frozen=True)
        tables.append((table, Annotated[struct, Meta(description=f"a table: [{table}]")], struct()))
    return msgspec.defstruct("AgentdToml", tables, forbid_unknown_fields=True)


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
    def require(name: str, holds: bool, text: str) -> None:
        if not holds:
            raise ConfigError(f"is {getattr(config, name):g}; it must be {text}", path=key_of(name))

    if config.listen is not None:
        split_address(config.listen, "--listen")
    if config.connect is not None and not config.connect.startswith("ipc://"):
        split_address(config.connect, "--connect")
    if config.name is not None and (wrong := wrong_name(config.name, "a node")):
        raise ConfigError(wrong, path="node.name")
    require("rank", config.rank is None or config.rank >= 0, "0 or more")
    for name, most in MOST.items():
        require(name, getattr(config, name) <= most, f"at most {most:g}")  # NaN is refused too
    for name in ("beat_s", "lease_s", "robot_lease_s", "probe_timeout_s", "probe_s", "long_call_s", "unresponsive_s"):
        require(name, getattr(config, name) > 0, "more than 0")
    kept = ("log_max_mb", "log_keep_days", "log_total_max_gb")
    for name in ("head_grace_s", "stop_grace_s", "profile_grace_s", *kept):
        require(name, getattr(config, name) >= 0, "0 or more")
    config_files.check_variables(config.env, "node.env")
    require("lease_s", config.lease_s >= 4 * config.beat_s, f"at least 4 heartbeats of {config.beat_s:g} s")
    long_enough = config.unresponsive_s >= 2 * config.probe_s
    require("unresponsive_s", long_enough, f"at least 2 probes of {config.probe_s:g} s")
    least = f"at least {MIN_ROBOT_LEASE_S:g}: networks and machines pause for shorter than that"
    require("umask", 0 <= config.umask <= 0o777, "0 to 0o777")
    for name in ("drivers", "robots", "users"):
        if len(getattr(config, name) or ()) > MOST_DRIVERS:
            raise ConfigError(f"names more than {MOST_DRIVERS:,} drivers: use groups, or {ANYONE!r}", path=key_of(name))
    for name in ("drivers", "robots"):
        for entry in getattr(config, name) or ():
            if entry not in (ANYONE, LOCAL_DRIVERS) and not is_name(entry.removeprefix("@")):
                raise ConfigError(
                    f"has {entry!r}, which is no driver's name, @GROUP, {LOCAL_DRIVERS} or {ANYONE}",
                    path=f"admit.{name}",
                )
    unknown = [name for name in config.limits if f"RLIMIT_{name.upper()}" not in dir(resource)]
    if unknown:
        raise ConfigError(
            f"has {unknown[0]!r}, which is no resource limit (nofile, nproc, core, ...)", path="workers.limits"
        )
    require("robot_lease_s", config.robot_lease_s >= MIN_ROBOT_LEASE_S, least)
    return config


def launch_rules(config: Config) -> LaunchRules:
    """Return who may launch workers on this node. The driver that owns an agentd may always launch there."""
    if config.embedded:
        return LaunchRules()
    drivers = () if config.strict and config.drivers is None else config.drivers
    users = tuple(config.users) if config.users and ANYONE not in config.users else None
    return LaunchRules(drivers, config.robots, config.nested, users)


def notify_of(config: Config) -> Notify:
    """Return which program or web page the head in this agentd tells of events. The head of a driver tells none.

    Raises:
        ConfigError: a program or file of the table [notify] cannot be used.
    """
    if not config.head or config.embedded:
        return Notify()
    return checked(Notify(**{key: getattr(config, f"notify_{key}") for key in KEYS["notify"]}))


def head_timing(config: Config) -> Timing:
    """Return the timers of the head in this agentd."""
    from rlinf_actors.head.commands import Timing
    from rlinf_actors.wire.template_protocol import ROBOT_GONE_S

    robot_lease_s = min(config.robot_lease_s, config.lease_s)
    return Timing(
        beat_s=config.beat_s,
        lease_s=config.lease_s,
        robot_lease_s=robot_lease_s,
        # a private head is never a restarted one: only its driver knows it
        robot_settle_s=0.0 if config.embedded else robot_lease_s + ROBOT_GONE_S,
        head_grace_s=config.head_grace_s,
        rank_hold_s=max(config.lease_s, config.head_grace_s),
    )


def check_files(config: Config) -> None:
    """Raise ConfigError if the file that describes the hardware cannot be read, or if the configured cgroup directory,
    or a program or file of the table [notify], cannot be used.
    """
    notify_of(config)
    if config.described is not None and not os.access(config.described, os.R_OK):
        raise ConfigError(f"is {config.described!r}, which cannot be read", path="hardware.described")
    try:
        roots.find(config.cgroup)
    except ValueError as error:
        raise ConfigError(str(error), path="workers.cgroup") from None


def default_log_dir(config: Config, run_dir: str, environ: Mapping[str, str]) -> str:
    """Return the directory in which workers' log files are kept if none is configured. An agentd that belongs to a
    driver keeps them in its run directory.
    """
    if config.embedded:
        return os.path.join(run_dir, "logs")
    if os.getuid() == 0:
        return "/var/log/rlinf-actors"
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "rlinf-actors", "logs")


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that workers inherit from agentd. Variables that are not UTF-8 and variables of
    agentd's systemd unit are left out.
    """
    kept = {name: value for name, value in environ.items() if name not in FOR_THE_UNIT_ALONE}
    for name in list(kept):
        try:
            (name + kept[name]).encode()
        except UnicodeEncodeError:  # os.environ holds other bytes as lone surrogates (os.fsdecode)
            log.warning("workers do not get the environment variable %s: it is not UTF-8", ascii(name))
            del kept[name]
    return kept


_OF_NO_EFFECT = ("files",)


class Changes(msgspec.Struct, frozen=True):
    """The result of `reload`: the new configuration, and the keys of agentd.toml that changed."""

    config: Config  # from now on
    applied: tuple[str, ...]  # keys of agentd.toml that differ and take effect now
    restart: tuple[str, ...]  # keys of agentd.toml that differ and take effect after a restart


def reload(current: Config, fresh: Config) -> Changes:
    """Return the running configuration *current* with the new values of the fields in RELOADABLE, and the keys that
    changed. *fresh* is the configuration that was read again after SIGHUP.
    """
    changed = [
        name
        for name in Config.__struct_fields__
        if name not in _OF_NO_EFFECT and getattr(fresh, name) != getattr(current, name)
    ]
    return Changes(
        replace(current, **{name: getattr(fresh, name) for name in (*RELOADABLE, *_OF_NO_EFFECT)}),
        tuple(key_of(name) for name in changed if name in RELOADABLE),
        tuple(key_of(name) for name in changed if name not in RELOADABLE),
    )


def own_key(config: Config, settings: Settings) -> KeyFile | None:
    """Return the key file of this agentd, or None if a driver owns this agentd or if there is no key.

    On loopback, the default is the user's own key file. Raise ConfigError if the key file cannot be used.
    """
    if config.embedded:  # unix sockets only
        return None
    role = "head" if config.head else "agent"
    if config.key_fd >= 0:
        return inherited(config.key_fd, role, config.head_key)
    return key_at(
        _endpoint(config), settings, role, insecure=config.insecure, given=config.key_file, head=config.head_key
    )


def named(config: Config, key: KeyFile | None) -> Config:
    """Return *config* with the node name in the key file, if the configuration has no node name and *key* is the key of
    an agentd; otherwise return *config* unchanged.
    """
    if key is None or key.role != "agent" or config.name is not None:
        return config
    return replace(config, name=key.name)


def check_addresses(config: Config, security: Security) -> None:
    """Raise ConfigError if agentd would use the head's TCP address without protection: the address is not on loopback,
    agentd has no key, and `insecure` is not set.
    """
    endpoint = _endpoint(config)
    if endpoint:
        security.mechanism(endpoint, "listen on" if config.head else "connect to")


def _endpoint(config: Config) -> str:
    """Return the TCP endpoint on which the head in this process listens, or to which agentd connects if the head runs
    elsewhere. Return "" if only unix sockets are used.
    """
    if config.head:
        return endpoint_of(config.listen, "--listen") if config.listen is not None else ""
    if config.connect is None or config.connect.startswith("ipc://"):
        return ""
    return endpoint_of(config.connect, "--connect")
