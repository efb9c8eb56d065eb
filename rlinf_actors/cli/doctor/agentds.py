"""The agentds that run on this machine: which of them `rlinf-actors doctor` checks, and where they keep log files.

They are found by the locks in their run directories. An agentd is left out if this user may not see its run directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rlinf_actors import procfs
from rlinf_actors.config_files import read_text
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.head_records import SOCKET, find_records
from rlinf_actors.net.socket_security import is_tcp
from rlinf_actors.settings import CLUSTER_MARK, Settings
from rlinf_actors.toml_text import parse_toml

OF_UNITS = "/run/rlinf-agentd"
"""Directory in which the shipped systemd unit makes a run directory for the agentd of each user."""
LOGS_OF_UNITS = "/var/log/rlinf-agentd"
"""Directory in which the shipped systemd unit makes a directory of log files for the agentd of each user."""
_CONFIG = "/etc/rlinf-actors/agentd.toml"


@dataclass(frozen=True)
class Agentd:
    """An agentd that runs here. It is of a private cluster if it is `private`."""

    pid: int
    run_dir: str
    private: bool = False

    def __str__(self) -> str:
        return f"{self.pid} in {self.run_dir}"


def agentds(parents: Iterable[str], of_units: str = OF_UNITS) -> list[Agentd]:
    """Return the agentds that run on this machine. The agentds of systemd units come first.

    Args:
        parents: directories that contain the run directories of agentds started by hand, or are one.
        of_units: directory that contains the run directories of systemd units.
    """
    locks = [*sorted(Path(of_units).glob("*/lock"))]
    for parent in parents:
        locks += [Path(parent, "lock"), *sorted(Path(parent).glob("rl*-*/lock"))]
    held = procfs.locks()
    found = {}
    for lock in locks:
        try:
            info = lock.stat()
        except OSError:  # another user's, or just removed
            continue
        pid = held.get((info.st_dev, info.st_ino))
        if pid is not None and is_agentd(pid):  # else it is of an `rlinf-actors run`, or another program's
            private = bool((environment(pid) or {}).get(CLUSTER_MARK)) or "--embedded" in words_of(pid)
            found[pid] = Agentd(pid, str(lock.parent), private)
    return list(found.values())


def recorded(settings: Settings) -> list[str]:
    """Return the run directories of the agentds that have left records, wherever they are."""
    found = []
    for record in find_records(settings, everybody=True).records:
        sockets = [os.path.dirname(way.removeprefix("ipc://")) for way in record.ways if not is_tcp(way)]
        given = _option(words_of(record.pid), "--run-dir")
        found += [path for path in (given, *sockets) if path and os.path.isabs(path)]
    return found


def is_agentd(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "agentd"
    return False


def asked(running: Sequence[Agentd], settings: Settings, endpoint: str, named: bool = False) -> list[Agentd]:
    """Return those of *running* that the user asks about: in RLINF_ACTORS_RUN_DIR, or of the head at *endpoint*, which
    comes first if the user has *named* it. If none is known to be, return all but those of private clusters.
    """
    records = [record for record in find_records(settings, everybody=True).records if endpoint in record.ways]
    pids, ways = {record.pid for record in records}, {endpoint, *(way for record in records for way in record.ways)}
    of_head = [one for one in running if one.pid in pids or f"ipc://{one.run_dir}/{SOCKET}" in ways]
    standing = [one for one in running if not one.private]
    place = os.path.realpath(settings.run_dir) if settings.run_dir else ""
    placed = [one for one in standing if place in map(os.path.realpath, (one.run_dir, os.path.dirname(one.run_dir)))]
    return (of_head or placed if named else placed or of_head) or standing


def log_dir_of(agentd: Agentd) -> str:
    """Return the directory in which an agentd keeps log files of workers. "" if that cannot be seen from outside: its
    user is another one, or an `rlinf-actors run` has told it.
    """
    environ, words = environment(agentd.pid), words_of(agentd.pid)
    if environ is None:
        of_unit = os.path.dirname(agentd.run_dir) == OF_UNITS
        return os.path.join(LOGS_OF_UNITS, os.path.basename(agentd.run_dir)) if of_unit else ""
    if "--of-run" in words:
        return ""
    try:
        settings = Settings.load(environ)
        cwd, user = os.readlink(f"/proc/{agentd.pid}/cwd"), procfs.user_of(agentd.pid)
    except (ConfigError, OSError):
        return ""
    settings = replace(settings, config_file=_option(words, "--config") or settings.config_file)
    chosen = _option(words, "--log-dir") or settings.log_dir or table(settings, "paths").get("log_dir")
    of_unit_dir = environ.get("LOGS_DIRECTORY", "").partition(":")[0]
    private = os.path.join(agentd.run_dir, "logs") if agentd.private else ""
    return os.path.join(cwd, str(chosen or of_unit_dir or private or usual_log_dir(user, environ)))


def usual_log_dir(user: int, environ: Mapping[str, str]) -> str:
    """Return where an agentd of *user* with the environment *environ* keeps log files by default."""
    if user == 0:
        return "/var/log/rlinf-actors"
    state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local/state")
    return os.path.join(state, "rlinf-actors", "logs")


def table(settings: Settings, name: str) -> dict[str, Any]:
    """Return the table *name*, such as workers, of agentd's configuration files."""
    found: dict[str, Any] = {}
    file = Path(settings.config_file or _CONFIG)
    for path in (file, *sorted((file.parent / "agentd.d").glob("*.toml"))):
        # agentd --check-config reports the faults of these files
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            found.update(parse_toml(read_text(path), str(path))[name])
    return found


def words_of(pid: int) -> list[str]:
    """Return the command line of the process *pid*, [] if it has ended."""
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def _option(words: Sequence[str], name: str) -> str | None:
    """Return the value of the option *name* on a command line: "NAME VALUE" or "NAME=VALUE"."""
    found = [after for word, after in itertools.pairwise(words) if word == name]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return found[-1] if found else None


def environment(pid: int) -> dict[str, str] | None:
    """Return the environment of the process *pid*, None if this user may not read it."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}
