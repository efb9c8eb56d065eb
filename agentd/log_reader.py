"""Answers questions for log files of this node's workers, the living and the ended (`rlinf-actors logs`).

Theory of operation. A question names a file and a position, and gets the next bytes; agentd keeps nothing about its
reader. A question with `wait_s` waits for output: the template says when a file grows, and agentd when its worker has
ended. Files are read on threads with the rights of the user whose worker wrote them. agentd never interprets them.
Loop thread only, but for functions that say otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentd.log_marks import Marks, read_marks
from agentd.logs import OutputFile
from agentd.users import User, as_user
from rlinf_actors.diagnosis.machine import disk_figures
from rlinf_actors.exhaustion import explain
from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.check_values import LogUse
from rlinf_actors.wire.figure_values import DiskFigures
from rlinf_actors.wire.log_values import (
    DAEMON_LOG,
    MAX_LOG_FILES,
    MAX_LOG_WAIT_S,
    LogFile,
    LogMark,
    LogQuestion,
    LogSlice,
    file_name,
)

if TYPE_CHECKING:
    from agentd.launch_plan import Site
    from agentd.worker_process import WorkerProcess

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.(out|err)(\.1)?")
"""The names of log files, of which `.1` is the older part."""
GROWTH_S = 3600.0
"""Seconds for which the growth of log files is measured."""
_MOST_NAMES = 16 * MAX_LOG_FILES
"""Most names of a directory that are looked at: a user may put any number there."""

Send = Callable[[LogSlice], object]


class _Place(msgspec.Struct, frozen=True):
    """A log file of this node, or one that may be there."""

    namespace: str  # as a directory
    path: str
    user: User | None = None
    worker: str = ""  # id of the running worker that writes it

    @property
    def running(self) -> bool:
        return bool(self.worker)


class _Waiting(msgspec.Struct, eq=False):
    id: str  # of the order
    question: LogQuestion
    send: Send
    place: _Place
    changed: bool = False  # its file has grown, or its worker ended, while it was read
    timer: asyncio.TimerHandle | None = None  # set once it waits


class LogReader:
    """Answers questions for log files.

    Args:
        site: settings of this node.
        workers: the running workers, by id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, site: Site, workers: Mapping[str, WorkerProcess]) -> None:
        self._loop = loop
        self._site = site
        self._workers = workers
        self._tasks = Tasks(loop)
        self._waiting: dict[str, dict[str, _Waiting]] = {}  # by path, by id

    def ask(self, id: str, question: LogQuestion, send: Send) -> None:
        """Answer *question* by *send*: soon, or once there is output to send if the question waits for it. `cancel`
        knows it by *id*.
        """
        self._tasks.start(self._answer(id, question, send), "reading a log file")

    async def usage(self) -> LogUse:
        """Return what the log files of this node's workers use."""
        find = partial(
            _usage, self._site.rules.log_dir, list(self._running(None)), self._directories(), self._site.run_dir
        )
        return await self._loop.run_in_executor(None, find)

    def cancel(self, id: str) -> None:
        """Answer the question *id* no more if it waits."""
        for waiting in self._waiting.values():
            if id in waiting:
                self._forget(waiting[id])
                return

    def grew(self, ids: Iterable[str]) -> None:
        """Answer the questions that wait for output of the workers *ids*."""
        for id in ids:
            worker = self._workers.get(id)
            for path in (worker.plan.out_path, worker.plan.err_path) if worker is not None else ():
                self._resume(path)

    def worker_ended(self, id: str) -> None:
        """Answer the questions that wait for output of the worker *id*, which is no running worker any more."""
        for path in [path for path, ones in self._waiting.items() for one in ones.values() if one.place.worker == id]:
            self._resume(path)

    def close(self) -> None:
        """Drop all questions. May be called again."""
        for waiting in [one for ones in self._waiting.values() for one in ones.values()]:
            self._forget(waiting)
        self._tasks.cancel()

    async def _answer(self, id: str, question: LogQuestion, send: Send) -> None:
        try:
            if question.name:
                await self._read(_Waiting(id, question, send, self._find(question)))
            else:
                asked = question.namespace
                find = partial(_listing, asked, list(self._running(asked)), self._directories(), self._site.run_dir)
                send(await self._loop.run_in_executor(None, find))
        except (OSError, ValueError) as error:
            send(LogSlice(fault=explain(error) if isinstance(error, OSError) else str(error)))

    async def _read(self, waiting: _Waiting) -> None:
        """Answer a question for a part of a file, or have it wait. Raise OSError."""
        question, place = waiting.question, waiting.place
        self._waiting.setdefault(place.path, {})[waiting.id] = waiting  # before: changes while it is read are noticed
        try:
            while True:
                waiting.changed = False
                if question.wait_s:
                    self._have_told(place.worker)
                answer = await self._loop.run_in_executor(None, _read, place, question)
                runs = place.worker in self._workers
                if answer.data or answer.lost or not question.wait_s or not (runs or waiting.changed):
                    break
                if not waiting.changed:
                    limit_s = min(question.wait_s, MAX_LOG_WAIT_S)
                    waiting.timer = self._loop.call_later(limit_s, self._time_out, waiting, answer)
                    return
        except BaseException:
            self._forget(waiting)
            raise
        self._forget(waiting)
        waiting.send(msgspec.structs.replace(answer, ended=not runs and not answer.data))

    def _have_told(self, id: str) -> None:
        """Have the template say when files of the worker *id* grow. Nothing else does if no driver gets the output."""
        worker = self._workers.get(id)
        if worker is not None and not worker.spec.forward_logs:
            worker.template.send(template_protocol.Read(id, (0, 0), (0, 0)))

    def _time_out(self, waiting: _Waiting, answer: LogSlice) -> None:
        self._forget(waiting)
        waiting.send(answer)

    def _resume(self, path: str) -> None:
        for waiting in list(self._waiting.get(path, {}).values()):
            waiting.changed = True
            if waiting.timer is not None:
                self._forget(waiting)
                self.ask(waiting.id, waiting.question, waiting.send)

    def _forget(self, waiting: _Waiting) -> None:
        ones = self._waiting.get(waiting.place.path, {})
        ones.pop(waiting.id, None)
        if not ones:
            self._waiting.pop(waiting.place.path, None)
        if waiting.timer is not None:
            waiting.timer.cancel()

    def _running(self, namespace: str | None) -> Iterator[_Place]:
        for worker in self._workers.values():
            name = file_name(worker.spec.namespace)
            if namespace is None or file_name(namespace) == name:
                for path in (worker.plan.out_path, worker.plan.err_path):
                    yield _Place(name, path, worker.user, worker.spec.id)

    def _directories(self) -> list[tuple[str, User | None]]:
        """Return the parent directories of log files, each with the user to whom it belongs."""
        users = [(user.log_dir, user) for user in self._site.users.all()]
        return [(self._site.rules.log_dir, None), *users]

    def _find(self, question: LogQuestion) -> _Place:
        """Return where the file of a question is. Raise ValueError if this node has no such log file."""
        if question.namespace is None and question.name == DAEMON_LOG:
            return _Place("", str(self._site.run_dir / DAEMON_LOG))
        if question.namespace is None or not _NAME.fullmatch(question.name) or question.name.startswith("."):
            raise ValueError(f"there is no log file {question.name!r}")
        found = [place for place in self._running(question.namespace) if os.path.basename(place.path) == question.name]
        if found:
            return found[0]
        directory = file_name(question.namespace)
        for parent, user in self._directories():
            path = os.path.join(parent, directory, question.name)
            with as_user(user):
                if os.path.lexists(path):
                    return _Place(directory, path, user)
        raise ValueError(f"there is no log file {question.name!r} of job {question.namespace!r}")


def _listing(
    namespace: str | None, running: list[_Place], directories: list[tuple[str, User | None]], run_dir: Path
) -> LogSlice:
    """Return the log files of a job, or of all jobs. Any thread."""
    found = _files(namespace, running, directories, run_dir)
    newest = sorted(found, key=lambda one: (not one[1].running, -one[1].modified))
    none: list[LogMark] = []
    shown = [
        msgspec.structs.replace(file, jobs=read_marks(place.path, place.user, Marks.jobs, none))
        for place, file in sorted(newest[:MAX_LOG_FILES], key=lambda one: (one[1].namespace, one[1].name))
    ]
    return LogSlice(files=shown, more=max(0, len(newest) - MAX_LOG_FILES))


def _usage(log_dir: str, running: list[_Place], directories: list[tuple[str, User | None]], run_dir: Path) -> LogUse:
    """Return what the log files of all workers use. Any thread."""
    since = time.time() - GROWTH_S
    found = [(place, file) for place, file in _files(None, running, directories, run_dir) if file.namespace]
    grown = [one for one in found if one[1].modified >= since][:MAX_LOG_FILES]
    written = sum(max(0, file.size - _since(place, since, file.size)) for place, file in grown)
    disk = disk_figures("logs", log_dir) or DiskFigures("logs", log_dir)
    return LogUse(disk, sum(file.size for _, file in found), written, len(found))


def _files(
    namespace: str | None, running: list[_Place], directories: list[tuple[str, User | None]], run_dir: Path
) -> list[tuple[_Place, LogFile]]:
    alive = {place.path for place in running}
    places = list(running)
    for parent, user in directories:
        with as_user(user):
            jobs = [file_name(namespace)] if namespace is not None else _names(parent)
            for job in jobs:
                for name in _names(os.path.join(parent, job)):
                    path = os.path.join(parent, job, name)
                    if _NAME.fullmatch(name) and path not in alive:
                        places.append(_Place(job, path, user))
    places += [_Place(one.namespace, f"{one.path}.1", one.user) for one in running]  # in directories of the driver's
    if namespace is None:
        places.append(_Place("", str(run_dir / DAEMON_LOG)))
    files: dict[str, tuple[_Place, LogFile]] = {}
    for place in places:
        try:
            with as_user(place.user):
                found = os.lstat(place.path)
        except OSError:
            continue
        name = os.path.basename(place.path)
        file = LogFile(place.namespace, name, found.st_size, found.st_mtime, place.running, found.st_ino)
        files.setdefault(place.path, (place, file))
    return list(files.values())


def _names(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except OSError:
        return []
    return [name for name in names if name.isascii() and not name.startswith(".")]


def _read(place: _Place, question: LogQuestion) -> LogSlice:
    """Return the part of a file that a question asks for. Any thread. Raise OSError."""
    file = OutputFile(place.path, "", max(0, question.offset), question.inode, user=place.user)
    if question.offset < 0 or (question.since and not question.offset):
        with file.open(place.path) as opened_file:
            size = os.fstat(opened_file.fileno()).st_size
        file.offset = max(0, size + question.offset) if question.offset < 0 else _since(place, question.since, size)
    data, _ = file.read()
    marks, data = _marks(place, file, data)
    return LogSlice(data=data, offset=file.offset + len(data), inode=file.inode, lost=file.skipped > 0, marks=marks)


def _marks(place: _Place, file: OutputFile, data: bytes) -> tuple[list[LogMark], bytes]:
    """Return the marks of *data*, which was read from *file*; and less of it, if they are too many for one message."""
    part = place.path if _inode(place, place.path) == file.inode else f"{place.path}.1"
    none: tuple[list[LogMark], int] = [], file.offset + len(data)
    marks, end = read_marks(part, place.user, lambda marks: marks.within(file.offset, none[1]), none)
    if _inode(place, part) != file.inode:  # it was renamed meanwhile
        marks, end = none
    return marks, data[: end - file.offset]


def _inode(place: _Place, path: str) -> int:
    """Return the inode of *path*, 0 if there is no such file."""
    try:
        with as_user(place.user):
            return os.lstat(path).st_ino
    except OSError:
        return 0


def _since(place: _Place, since: float, size: int) -> int:
    """Return the position of the first byte of a log file that may have been written after the time *since*; for a
    file without marks its begin or its end, by the time of its last change. Any thread. Raise OSError.
    """
    with as_user(place.user):
        if os.lstat(place.path).st_mtime < since:
            return size
    return read_marks(place.path, place.user, lambda marks: marks.since(since, size), 0)
