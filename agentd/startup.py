"""What is decided and made ready before workers can run here: interpreters, files, cgroups.

What workers get of the environment that agentd was started with. Pure, but for the log.

The run directory: of one agentd at a time, private, and where it is written down that this one was told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentd.config import Config, default_interpreters
from agentd.keeper_client import pid_of
from agentd.launch_plan import Rules, Site
from agentd.node_report import default_log_dir
from agentd.sweep import clear_cgroups
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import prepare
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.settings import FOR_THE_UNIT_ALONE
from rlinf_actors.wire.values import NodeReport

log = logging.getLogger(__name__)


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


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """All of it, but what is for agentd's unit alone, and what is no UTF-8: no message carries that.

    The latter are said in the log, since a user's program may look for them.
    """
    kept = {name: value for name, value in environ.items() if name not in FOR_THE_UNIT_ALONE}
    for name in [name for name, value in kept.items() if not _is_utf8(name + value)]:
        log.warning("workers do not get the environment variable %s: it is not UTF-8", ascii(name))
        del kept[name]
    return kept


def _is_utf8(text: str) -> bool:
    """Bytes that are not are lone surrogates in a text of os.environ (os.fsdecode)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MAX_RUN_DIR = 80
"""Bytes; a unix socket's path holds 107, and the names below add up to 25."""
_STOPPING = "stopping"
"""File in a run directory whose agentd was told to end; `agentd --reap` looks for it."""


@dataclass
class RunDir:
    """A directory of mode 0700 that is ours alone, held by a lock until `close`."""

    path: str
    lock: int

    @classmethod
    def open(cls, wanted: str | None, environ: Mapping[str, str]) -> RunDir:
        """Make it, or take the one that is there.

        Raises:
            ConfigError: its path is too long for unix sockets, others can read it, or another agentd uses it.
            OSError: it cannot be made.
        """
        path = os.path.abspath(wanted or default_run_dir(environ))
        if len(os.fsencode(path)) > MAX_RUN_DIR:
            raise ConfigError(
                f"is {len(os.fsencode(path))} bytes long; unix sockets allow {MAX_RUN_DIR}: choose a shorter one",
                path=f"run_dir {path}",
            )
        os.makedirs(path, mode=0o700, exist_ok=True)
        if (owner := os.lstat(path).st_uid) not in (os.getuid(), 0):
            raise ConfigError(f"belongs to user {owner}, whose link it is, not to us", path=f"run_dir {path}")
        found = os.stat(path)
        if found.st_uid != os.getuid():
            raise ConfigError(f"belongs to user {found.st_uid}, not to us ({os.getuid()})", path=f"run_dir {path}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"can be used by others: chmod 700 {path}", path=f"run_dir {path}")
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                "is used by another agentd: give this one another --run-dir", path=f"run_dir {path}"
            ) from None
        return cls(path, lock)

    def begin(self) -> None:
        """An agentd begins here: what the last one was asked is over."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, _STOPPING))

    def stop_asked(self) -> None:
        """Write down that this agentd will end and no other takes its workers over; twice is fine."""
        try:
            os.close(os.open(os.path.join(self.path, _STOPPING), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:  # a full disk must not keep it from ending
            log.warning("cannot write down that this agentd was stopped: %s", error)

    def close(self) -> None:
        """Let it go. Twice is fine."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def default_run_dir(environ: Mapping[str, str]) -> str:
    """The user's."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return os.path.join(runtime, "rlinf-actors")
    return f"/tmp/rlinf-actors-{os.getuid()}"


def was_stopping(path: str) -> bool:
    """Whether the last agentd there was asked to end, and its workers with it, whether it came to that or not."""
    return os.path.exists(os.path.join(path, _STOPPING))
