"""The run directory of one agentd: private, locked, and read by the next agentd that runs there.

It holds sockets of workers (``w``), templates' sockets, records and stderr (``t``), orders of the head (``l``), and a
link to our package for templates (``pkg``). Any thread, except OrderLedger: loop thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

import msgspec
from msgspec.structs import replace

import rlinf_actors
from rlinf_actors.errors import ConfigError
from rlinf_actors.net import holders
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.values import RunningWorker

log = logging.getLogger(__name__)

MAX_RUN_DIR = 80
"""Largest length in bytes: the path of a unix socket may have 107, and the names below the directory take 25."""
_SECRET = "secret"
SECRET_BYTES = 16
_STOPPING = "stopping"
"""Name of a file that says that agentd was told to end with its workers; `agentd --reap` reads it."""


class RunDir(msgspec.Struct):
    """The run directory of this agentd, of mode 0700. A lock keeps other agentds from using the directory until
    `close`.
    """

    path: str
    lock: int
    made: bool = False  # by this agentd

    @classmethod
    def open(cls, wanted: str | None, environ: Mapping[str, str]) -> RunDir:
        """Create or open the run directory *wanted* and lock it. If *wanted* is None, use this user's default
        directory.

        Raises:
            ConfigError: the path is too long for unix sockets, others can use the directory, or another agentd uses it.
            OSError: the directory cannot be made.
        """
        path = os.path.abspath(wanted or default_run_dir(environ))

        def wrong(text: str) -> ConfigError:
            return ConfigError(text, path=f"run_dir {path}")

        if (size := len(os.fsencode(path))) > MAX_RUN_DIR:
            raise wrong(f"is {size} bytes long; unix sockets allow {MAX_RUN_DIR}: choose a shorter one")
        made = not os.path.exists(path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        if stat.S_ISLNK((link := os.lstat(path)).st_mode) and link.st_uid not in (os.getuid(), 0):
            raise wrong(f"belongs to user {link.st_uid}, whose link it is, not to us")
        found = os.stat(path)
        if found.st_uid != os.getuid():
            raise wrong(f"belongs to user {found.st_uid}, not to us ({os.getuid()})")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise wrong(f"can be used by others: chmod 700 {path}")
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            who = holders.of_lock(os.path.join(path, "lock"))
            raise wrong(
                f"is used by another agentd{who and f', {who}'}: end that one, or give this one another --run-dir"
            ) from None
        if not os.fstat(lock).st_nlink:  # the agentd before has removed the file since this one opened it
            os.close(lock)
            return cls.open(wanted, environ)
        return cls(path, lock, made)

    def begin(self) -> None:
        """Remove the record on disk that the last agentd in this directory was told to end (see `mark_stopping`)."""
        Path(self.path, _STOPPING).unlink(missing_ok=True)

    def mark_stopping(self) -> None:
        """Record on disk that this agentd was told to end with its workers. If workers are left after its end, `agentd
        --reap` ends them because of this record.
        """
        try:
            Path(self.path, _STOPPING).touch(0o600)
        except OSError as error:  # a full disk must not keep agentd from ending
            log.warning("cannot write down that this agentd was stopped: %s", error)

    def secret(self) -> str:
        """Return the secret of this run directory, which is made once. An agentd proves by it to the head that it comes
        after the one before it in this directory, and may take its place.
        """
        path = Path(self.path, _SECRET)
        try:
            found = path.read_text()
        except FileNotFoundError:
            found = ""
        if len(found) != 2 * SECRET_BYTES:  # cut off, by a full disk
            found = secrets.token_hex(SECRET_BYTES)
            write_file(path, found.encode())
        return found

    def remove_if_unused(self) -> None:
        """Remove the run directory if this agentd has made it, and no worker, template or order is left in it."""
        inside = {"lock", "pkg", "w", "t", "l", _SECRET, _STOPPING}
        if not self.made or not inside.issuperset(os.listdir(self.path)):
            return
        if not any(os.listdir(path) for path in map(Path(self.path).joinpath, "wtl") if path.is_dir()):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock of the run directory. May be called again."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def default_run_dir(environ: Mapping[str, str]) -> str:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return os.path.join(runtime, "rlinf-actors")
    return f"/tmp/rlinf-actors-{os.getuid()}"


def was_stopping(path: str) -> bool:
    """Return True if the last agentd in the run directory *path* was told to end with its workers, and may have left
    some.
    """
    return os.path.exists(os.path.join(path, _STOPPING))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_file(path: Path, data: bytes) -> None:
    """Write *data* atomically to a file that only this user can read. If that fails, raise OSError and leave the old
    file, if there was one.
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
    """Make the subdirectories of the run directory, and a link to the package rlinf_actors in one of them. Return that
    subdirectory, which is the import path of templates.
    """
    for name in ("w", "t", "l"):
        (run_dir / name).mkdir(mode=0o700, exist_ok=True)
    return link_package(run_dir)


def link_package(parent: Path) -> str:
    """Make the directory ``pkg`` below *parent*, with a link to the package rlinf_actors and nothing else. Return the
    directory's path.
    """
    package = parent / "pkg" / "rlinf_actors"
    package.parent.mkdir(mode=0o755, exist_ok=True)
    ours = Path(rlinf_actors.__file__).resolve().parent
    if not package.is_symlink() or os.readlink(package) != str(ours):  # templates of an earlier agentd may import now
        package.unlink(missing_ok=True)  # of an agentd that is installed elsewhere
        package.symlink_to(ours)
    return str(package.parent)


def remove_template_files(stem: str) -> None:
    for suffix in (".sock", ".json", ".err"):
        Path(stem + suffix).unlink(missing_ok=True)


class OrderLedger:
    """The head's orders to start workers, kept on disk so that the next agentd knows which workers were started, even
    if their templates have ended.

    The tokens of jobs are left out: templates have them, and give them to the next agentd (SurvivingWorker).

    There is one file for each StartWorkers. The file is removed when the head has acknowledged the ends of all workers
    in it. If *directory* is None, nothing is written.

    Attributes:
        drivers: after `read`, the driver (StartWorkers.driver) of each worker in the orders.
        owners: which process owns each worker, for people (StartWorkers.owned_by), by the worker's id.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._pending: dict[Path, set[str]] = {}  # ids of the workers whose ends are not acknowledged
        self._file_of: dict[str, Path] = {}
        self._numbers = count(1)
        self.drivers: dict[str, str] = {}
        self.owners: dict[str, str] = {}

    def read(self) -> dict[str, RunningWorker]:
        """Return the workers, by id, in the orders that earlier agentds wrote. An order is no longer on disk once the
        head has acknowledged the ends of all its workers.
        """
        found: dict[str, RunningWorker] = {}
        if self._directory is None:
            return found
        for path in self._directory.glob("*.tmp"):  # of an agentd that was killed while it wrote
            path.unlink()
        for path in sorted(self._directory.glob("*.start")):
            try:
                order = msgspec.msgpack.decode(path.read_bytes(), type=StartWorkers)
            except (msgspec.DecodeError, OSError) as error:
                log.error("%s cannot be read (%s): its workers, if there are any, are not taken over", path, error)
                path.unlink(missing_ok=True)
                continue
            self._enter(path, order)
            self.drivers.update((spec.id, order.driver) for spec in order.workers)
            self.owners.update((spec.id, order.owned_by) for spec in order.workers)
            for spec in order.workers:
                if spec.id in found and found[spec.id].spec.resizes > spec.resizes:
                    continue  # the names of the files do not tell which one is younger
                found[spec.id] = RunningWorker(spec, order.owner, order.cls, order.detail, detached=order.detached)
        return found

    def write(self, order: StartWorkers) -> None:
        """Write the order to disk, without the job's token, which workers of this user could read there. Called before
        its workers start, or when they get a new owner. Raise OSError if that fails.
        """
        self.owners.update((spec.id, order.owned_by) for spec in order.workers)
        if self._directory is None or not order.workers:
            return
        order = replace(order, workers=[replace(spec, token="") for spec in order.workers])
        path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        while path.exists():  # of an earlier agentd with our pid
            path = self._directory / f"{os.getpid()}-{next(self._numbers)}.start"
        write_file(path, msgspec.msgpack.encode(order))
        self._enter(path, order)

    def acknowledged(self, ids: Iterable[str]) -> None:
        """Record that the head has the exit reports of the workers *ids*. Remove the file of each order in which no
        other worker is left.
        """
        for id in ids:
            self.owners.pop(id, None)
            path = self._file_of.pop(id, None)
            if path is not None:
                self._pending[path].discard(id)
                if not self._pending[path]:
                    del self._pending[path]
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files of all orders, because all workers have ended."""
        self.acknowledged(list(self._file_of))

    def _enter(self, path: Path, order: StartWorkers) -> None:
        ids = [spec.id for spec in order.workers]
        for id in ids:
            if id in self._file_of:  # a younger order for the same worker counts
                self.acknowledged([id])
            self._file_of[id] = path
        self._pending[path] = set(ids)
