"""Removes log files of ended workers: those that are older than `log_keep_days`, and the oldest while all log files of
this node take more than `log_total_max_gb`.

Theory of operation. A thread looks for log files, and `removable` decides. A living worker's files stay: agentd knows
its own workers, and the template of any worker holds a lock (flock) of the files that it writes, so that agentds which
share a directory spare one another's workers. The loop's thread removes the name of a file, because no worker can be
started meanwhile; a thread closes the file, which frees its blocks.

Loop thread only, but for functions that say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from agentd.logs import LogForwarder, opened
from agentd.users import User, as_user
from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire.log_values import MARKS

if TYPE_CHECKING:
    from agentd.config_fields import Config
    from agentd.launch_plan import Site
    from agentd.worker_process import WorkerProcess

log = logging.getLogger(__name__)

FIRST_S = 60.0
"""Seconds from agentd's start to the first look at the log files."""
EVERY_S = 900.0
"""Seconds between two looks."""
RECENT_S = 600.0
"""Seconds for which the files of an ended worker stay, however much room all take: someone may look why it ended."""
_AT_ONCE = 64
"""Workers whose files are removed in one turn of the loop."""
_MOST_FILES = 500_000
"""Most files of one job or user that are looked at: a user may make any number of them."""
_PART = re.compile(rf"(?P<worker>[A-Za-z0-9._-]{{1,200}})\.(out|err)(\.1|\.new)?({re.escape(MARKS)})?")
"""The names of the files of a worker's output: the files themselves, older parts, and their files of marks."""
GIB = 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """Limits on the output of ended workers that agentd keeps: its age, and its total size. 0 stands for no limit."""

    keep_s: float = 0.0
    total_bytes: int = 0

    @classmethod
    def of(cls, config: Config) -> Limits:
        return cls(config.log_keep_days * 86400, int(config.log_total_max_gb * GIB))


class WorkerFiles(msgspec.Struct):
    """The log files of one worker: those that have its GROUP-RANK in the directory of its job."""

    directory: str
    names: list[str]
    size: int  # bytes on the disk
    modified: float  # time of the last change of any, in seconds since the epoch
    user: User | None = None
    running: bool = False

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.directory, name) for name in self.names]


def removable(
    found: Sequence[WorkerFiles], now: float, limits: Limits
) -> tuple[list[WorkerFiles], list[WorkerFiles], int]:
    """Return the workers whose files are too old, those whose files are too many, and how many bytes are left. Pure."""
    ended = sorted((files for files in found if not files.running), key=lambda files: files.modified)
    old = [files for files in ended if limits.keep_s and now - files.modified > limits.keep_s]
    left = sum(files.size for files in found) - sum(files.size for files in old)
    many = []
    for files in ended[len(old) :]:
        if not limits.total_bytes or left <= limits.total_bytes or now - files.modified < RECENT_S:
            break
        many.append(files)
        left -= files.size
    return old, many, left


class LogRetention:
    """Looks at the log files of this node from time to time, and removes some.

    Args:
        site: settings of this node.
        workers: the running workers, by id.
        logs: reads output for drivers, also that of workers that have ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        workers: Mapping[str, WorkerProcess],
        logs: LogForwarder,
    ) -> None:
        self._loop = loop
        self._site = site
        self._workers = workers
        self._logs = logs
        self._limits = Limits()
        self._tasks = Tasks(loop)
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._too_much = False

    def begin(self, limits: Limits) -> None:
        """Keep to *limits* from now on."""
        self._limits = limits
        self._schedule(FIRST_S)

    def change(self, limits: Limits) -> None:
        """Keep to *limits* from now on, and look at the log files now."""
        self._limits = limits
        self._schedule(0.0)

    def close(self) -> None:
        """Look at nothing more. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()

    def _schedule(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        self._schedule(EVERY_S)
        if not self._looking and self._limits != Limits():
            self._looking = True
            self._tasks.start(self.keep_to_limits(), "removing old log files")

    async def keep_to_limits(self) -> None:
        """Look at the log files, and remove those that are beyond the limits."""
        try:
            limits, site = self._limits, self._site
            places = [(site.rules.log_dir, None), *((user.log_dir, user) for user in site.users.with_logs())]
            found = await self._loop.run_in_executor(None, _find, places)
            used = self._used()
            for files in found:
                files.running = not used.isdisjoint(files.paths)
            old, many, left = removable(found, time.time(), limits)
            self._tell(await self._remove(old), await self._remove(many), left, limits)
        finally:
            self._looking = False

    def _used(self) -> set[str]:
        """Return the paths of the log files that a worker of this agentd writes, or that are still to be read."""
        plans = (worker.plan for worker in self._workers.values())
        return self._logs.paths().union(*((plan.out_path, plan.err_path) for plan in plans))

    async def _remove(self, ended: Sequence[WorkerFiles]) -> list[WorkerFiles]:
        """Remove the log files of these workers, unless a template writes them. Return those that were removed."""
        removed: list[WorkerFiles] = []
        faults: list[OSError] = []
        for first in range(0, len(ended), _AT_ONCE):
            used = self._used()  # no worker is started in the rest of this turn
            directories = {os.path.dirname(path) for path in used}
            for files in ended[first : first + _AT_ONCE]:
                locked: list[int] = []
                try:
                    with as_user(files.user):
                        if used.isdisjoint(files.paths) and _unlink(files.paths, locked):
                            removed.append(files)
                        if files.directory not in directories:
                            with contextlib.suppress(OSError):  # others have files in it
                                os.rmdir(files.directory)
                except OSError as error:  # a file system without locks, or whose files cannot be removed
                    faults.append(error)
                finally:  # not as the user: the executor may start a thread, which would keep that user's rights
                    self._loop.run_in_executor(None, _close, locked)  # the last descriptor frees a file, slowly
            await asyncio.sleep(0)
        if faults:
            log.warning("the log files of %d ended workers are not removed: %s", len(faults), faults[0])
        return removed

    def _tell(self, old: Sequence[WorkerFiles], many: Sequence[WorkerFiles], left: int, limits: Limits) -> None:
        for removed, why in (
            (old, f"older than {limits.keep_s / 86400:g} days (workers.log_keep_days)"),
            (many, f"the oldest beyond {limits.total_bytes / GIB:g} GiB (workers.log_total_max_gb)"),
        ):
            if removed:
                size = sum(files.size for files in removed) / (1 << 20)
                log.info("removed the log files of %d ended workers, %.1f MiB: %s", len(removed), size, why)
        too_much = bool(limits.total_bytes) and left > limits.total_bytes
        if too_much and not self._too_much:
            text = "log files in %s take %.1f GiB, more than workers.log_total_max_gb (%g): living workers' stay"
            log.warning(text, self._site.rules.log_dir, left / GIB, limits.total_bytes / GIB)
        self._too_much = too_much


def _unlink(paths: Sequence[str], locked: list[int]) -> bool:
    """Remove the log files of a worker. Return False if a template has locked one, because it writes it.

    The caller closes the descriptors in *locked*.
    """
    try:
        for path in paths:
            locked.append(opened(path, os.O_RDONLY | os.O_CLOEXEC))
            fcntl.flock(locked[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in paths:
            os.unlink(path)
    except BlockingIOError:
        return False
    return True


# --- on a thread ---


def _find(places: Sequence[tuple[str, User | None]]) -> list[WorkerFiles]:
    """Return the log files of all workers in the parent directories *places*, each with its user."""
    found: dict[tuple[str, str], WorkerFiles] = {}
    for parent, user in places:
        with as_user(user):
            for job in _entries(parent):
                if job.is_dir(follow_symlinks=False):
                    for entry in _entries(job.path):
                        _add(found, job.path, entry, user)
    return list(found.values())


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from itertools.islice(entries, _MOST_FILES)
    except OSError:  # not made yet, removed, or another user's
        return


def _add(found: dict[tuple[str, str], WorkerFiles], directory: str, entry: os.DirEntry[str], user: User | None) -> None:
    named = _PART.fullmatch(entry.name)
    if named is None or not entry.is_file(follow_symlinks=False):
        return
    try:
        stat = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    files = found.setdefault((directory, named["worker"]), WorkerFiles(directory, [], 0, 0.0, user))
    files.names.append(entry.name)
    files.size += stat.st_blocks * 512
    files.modified = max(files.modified, stat.st_mtime)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
