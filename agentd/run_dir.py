"""The run directory of one agentd: its lock, its files, and the orders that a next agentd finds there.

What workers get of the environment that agentd was started with.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

import rlinf_actors
from agentd.config import Config
from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import FOR_THE_UNIT_ALONE
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.values import RunningWorker

log = logging.getLogger(__name__)

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


def default_log_dir(config: Config, run_dir: str, environ: Mapping[str, str]) -> str:
    """Where workers' output goes: with an embedded cluster it ends with the cluster."""
    if config.embedded:
        return os.path.join(run_dir, "logs")
    if os.getuid() == 0:
        return "/var/log/rlinf-actors"
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "rlinf-actors", "logs")


def boot_id() -> str:
    """Differs each time this machine starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, for us alone.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_suffix(".tmp")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_directories(run_dir: Path) -> str:
    """Make what templates and workers need in *run_dir*; returns the import path of our package there."""
    for name in ("w", "t", "l", "pkg"):
        (run_dir / name).mkdir(mode=0o700, exist_ok=True)
    package = run_dir / "pkg" / "rlinf_actors"
    ours = Path(rlinf_actors.__file__).resolve().parent
    if not package.is_symlink() or os.readlink(package) != str(ours):  # templates of an earlier agentd may import now
        package.unlink(missing_ok=True)  # of one that was installed elsewhere
        package.symlink_to(ours)
    return str(package.parent)


def remove_files(stem: str) -> None:
    """What a template that is gone left in the run directory."""
    for suffix in (".sock", ".json", ".err"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stem + suffix)


class OrderLedger:
    """The files.

    Args:
        directory: exists, is ours alone; None to write nothing down.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._open: dict[Path, set[str]] = {}
        self._of: dict[str, Path] = {}
        self._numbers = count(1)

    def read(self) -> dict[str, RunningWorker]:
        """The workers that earlier agentds were asked for, by id, as far as they are not settled."""
        found: dict[str, RunningWorker] = {}
        for path in self._directory.glob("*.tmp") if self._directory is not None else ():
            path.unlink()  # of one that was killed while it wrote
        for path in sorted(self._directory.glob("*.start")) if self._directory is not None else ():
            try:
                order = msgspec.msgpack.decode(path.read_bytes(), type=StartWorkers)
            except (msgspec.DecodeError, OSError) as error:
                log.error("%s cannot be read (%s): its workers, if there are any, are not taken over", path, error)
                path.unlink(missing_ok=True)
                continue
            self._enter(path, order)
            for spec in order.workers:
                found[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return found

    def write(self, order: StartWorkers) -> None:
        """Workers are about to be started.

        Raises:
            OSError: that cannot be written down.
        """
        if self._directory is None or not order.workers:
            return
        path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        while path.exists():  # of an earlier agentd with our pid
            path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        write_file(path, msgspec.msgpack.encode(order))
        self._enter(path, order)

    def acknowledged(self, ids: Iterable[str]) -> None:
        """The head knows that these have ended."""
        for id in ids:
            path = self._of.pop(id, None)
            if path is not None:
                self._open[path].discard(id)
                if not self._open[path]:
                    del self._open[path]
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()

    def close(self) -> None:
        """Everything has ended: no file stays."""
        self.acknowledged(list(self._of))

    def _enter(self, path: Path, order: StartWorkers) -> None:
        ids = [spec.id for spec in order.workers]
        for id in ids:
            if id in self._of:  # asked for again: the younger order counts
                self.acknowledged([id])
            self._of[id] = path
        self._open[path] = set(ids)


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
