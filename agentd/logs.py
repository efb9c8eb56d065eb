"""Workers' output: from their log files to those who watch, as fast as they take it.

The files are the buffer: without credit nothing is read, so a slow terminal costs no memory and
loses nothing. Credit is counted per owner, by the cost of the lines sent (wire.agents.line_cost).

What is never shown is counted, and the owner is told: when the owner ends (`flush`), when an ended worker's output has
waited too long for credit, and when this agentd ends (`end`).
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire.agent_messages import MAX_PATH, UPDATE, LogLines, line_cost

log = logging.getLogger(__name__)

MAX_LINE = 64 << 10
"""Bytes; a longer line comes in pieces, each but the last with CUT at its end."""
CUT = " [continues]"
WINDOW = 1 << 20
"""Cost of the lines that one owner may have outstanding."""
_TURN = 512 << 10
"""Bytes read before the loop gets a turn."""
_BATCH = 128 << 10
"""Characters in one LogLines, about."""
_PATIENCE_S = 60.0
"""How long what a worker left in its files waits for credit after its end."""

_COUNTED = 1 << 20
"""Bytes read at a time when lines are counted."""

_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


def split(data: bytes, final: bool = False) -> tuple[list[str], int]:
    """Return the complete lines in *data*, and how many bytes they are.

    What a lone carriage return ends is the state of a progress bar: a line with UPDATE at its end, which the next line
    takes the place of. With *final* the rest is a line as well; a piece of MAX_LINE bytes without an end is cut.
    """
    lines: list[str] = []
    end = 0
    for match in _END.finditer(data):
        update = match[0] == b"\r"
        if match.start() > end or not update:
            if lines and lines[-1].endswith(UPDATE):
                lines.pop()
            lines.append(data[end : match.start()].decode(errors="replace") + (UPDATE if update else ""))
        end = match.end()
    rest = data[end:]
    if not lines and end == 0 and len(rest) >= MAX_LINE:
        return [rest[:MAX_LINE].decode(errors="replace") + CUT], MAX_LINE
    if final and rest:
        text = rest.rstrip(b"\r").decode(errors="replace")
        if text and lines and lines[-1].endswith(UPDATE):
            lines.pop()
        return [*lines, *([text] if text else [])], len(data)
    return lines, end


Position = tuple[int, int]
"""Bytes of a file, and which file: its inode, 0 for one that did not exist."""


@dataclass
class _File:
    """A log file and how far it was read. At its limit the template renames it, and begins a new one."""

    path: str
    stream: str
    offset: int
    inode: int = 0
    skipped: int = 0
    fault: str = ""

    def read(self) -> tuple[bytes, bool]:
        """What is there after `offset`, at most MAX_LINE bytes; first of the file that was begun, if it was renamed.

        Returns it, and whether that file gets no more.

        Raises:
            OSError: it cannot be read.
        """
        with open(self.path, "rb", buffering=0, opener=_opened) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "is no regular file")
            if self.inode not in (0, found.st_ino):
                rest = self._rest()
                if rest:
                    return rest, len(rest) < MAX_LINE
                self.offset = 0
            self.inode = found.st_ino
            if found.st_size < self.offset:  # somebody truncated it
                self.offset, self.skipped = 0, self.skipped + 1
            return os.pread(file.fileno(), MAX_LINE, self.offset), False

    def left(self) -> int:
        """Return how many lines are there that were not read. Any thread."""
        lines = 0
        for path in (f"{self.path}.1", self.path):
            try:
                with open(path, "rb", buffering=0, opener=_opened) as file:
                    begun = os.fstat(file.fileno()).st_ino == self.inode
                    if path == self.path:
                        lines += _count(file, self.offset if begun or not self.inode else 0)
                    elif begun:  # else an older part, which was read
                        lines += _count(file, self.offset)
            except OSError:  # there is none, or nobody may read it
                continue
        return lines

    def more(self) -> bool:
        """Whether there is something that was not read."""
        try:
            found = os.stat(self.path)
        except OSError:  # `read` says so
            return False
        return found.st_size > self.offset or self.inode not in (0, found.st_ino)

    def _rest(self) -> bytes:
        """What is left of the file that has another name now."""
        try:
            with open(f"{self.path}.1", "rb", buffering=0, opener=_opened) as file:
                if os.fstat(file.fileno()).st_ino == self.inode:
                    return os.pread(file.fileno(), MAX_LINE, self.offset)
        except OSError:
            pass
        self.skipped += 1  # it is gone: renamed twice since, or removed
        return b""


def _count(file: io.FileIO, start: int) -> int:
    """Return how many lines, with an unfinished last one, follow *start* in *file*."""
    file.seek(start)
    lines, last = 0, b"\n"
    while data := file.read(_COUNTED):
        lines, last = lines + data.count(b"\n"), data[-1:]
    return lines + (last != b"\n")


@dataclass
class _Worker:
    id: str
    name: str
    owner: str
    files: list[_File]
    final: bool = False
    drop: asyncio.TimerHandle | None = None


@dataclass
class _Owner:
    credit: int = WINDOW
    entries: list[tuple[str, str, str]] = field(default_factory=list)
    chars: int = 0
    skipped: int = 0


class Logs:
    """Reads the files of one node's workers.

    Args:
        loop: everything here runs on it.
        node: the node's name, as LogLines say it.
        report: takes LogLines.
        on_read: called with a worker's id, how far its two files were read, and whether that is their end;
            then `grew` says when there is more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: str,
        report: Callable[[LogLines], None],
        on_read: Callable[[str, Position, Position, bool], None],
    ) -> None:
        self._loop = loop
        self._node = node
        self._report = report
        self._on_read = on_read
        self._workers: dict[str, _Worker] = {}
        self._pending: dict[str, None] = {}
        self._owners: dict[str, _Owner] = {}
        self._scheduled = False
        self._held = False
        self._flushing: dict[str, asyncio.TimerHandle] = {}
        self._tasks = Tasks(loop)

    def hold(self) -> None:
        """Read nothing before `go_on`: nobody could be given it."""
        self._held = True

    def go_on(self) -> None:
        """Read what there is."""
        if self._held:
            self._held = False
            self._pump()

    def add(
        self,
        id: str,
        name: str,
        owner: str,
        out_path: str,
        err_path: str,
        at: tuple[Position, Position] | None = None,
    ) -> None:
        """Follow a worker's files from *at*, a new one's from where they are now; they need not exist yet."""
        out, err = at or (_end_of(out_path), _end_of(err_path))
        files = [_File(out_path, "out", *out), _File(err_path, "err", *err)]
        self._workers[id] = _Worker(id, name, owner, files)
        self._owners.setdefault(owner, _Owner())

    def grew(self, ids: list[str]) -> None:
        """There is more in these workers' files."""
        self._pending.update(dict.fromkeys(id for id in ids if id in self._workers))
        self._pump()

    def lost(self, id: str, text: str) -> None:
        """Its output cannot be written, and why; "": it can be again. The owner is told: the files cannot say it."""
        said = f"output is lost: {text}" if text else "output is written again"
        log.warning("worker %s: %s", id, said)
        worker = self._workers.get(id)
        if worker is not None:
            self._report(LogLines(worker.owner, self._node, [(worker.name, "err", f"[rlinf-actors] {said}")]))

    def finish(self, id: str) -> None:
        """The worker has ended: read what is left, as far as there is credit, and the rest when there is."""
        worker = self._workers.get(id)
        if worker is None or worker.final:
            return
        worker.final = True
        self._pending[id] = None
        self._pump(whole=True)
        if id in self._workers:
            worker.drop = self._loop.call_later(_PATIENCE_S, self._give_up, [worker])

    def flush(self, owner: str, wait_s: float) -> None:
        """*owner* ends: show what its workers wrote so far, then say how many lines were left out after *wait_s* s.

        The answer is a LogLines that is `final`.
        """
        if owner in self._flushing:
            return
        self._flushing[owner] = self._loop.call_later(wait_s, self._flush_over, owner)
        self._pending.update(dict.fromkeys(worker.id for worker in self._of(owner)))
        self._pump()

    def _flush_over(self, owner: str) -> None:
        """The time is up: what the owner's workers that have ended left in their files is not shown any more."""
        del self._flushing[owner]
        self._give_up(self._of(owner), owner)

    def _flushed(self) -> None:
        """Answer those of whom nothing is left."""
        waiting = {self._workers[id].owner for id in self._pending}
        for owner in [owner for owner in self._flushing if owner not in waiting]:
            self._flushing.pop(owner).cancel()
            self._report(LogLines(owner, self._node, [], final=True))

    def _give_up(self, workers: list[_Worker], flushed: str | None = None) -> None:
        """Tell the owner of *workers* how many lines it will not see, and forget those that have ended.

        Args:
            workers: of one owner.
            flushed: the owner whose `flush` this answers, None where it goes on.
        """

        async def count(files: list[_File], owner: str) -> None:
            counts = await asyncio.to_thread(lambda: [file.left() for file in files])
            paths = [file.path for file, left in zip(files, counts, strict=True) if left]
            if paths or flushed is not None:
                self._report(LogLines(owner, self._node, [], 0, flushed is not None, sum(counts), _where(paths)))

        if workers or flushed is not None:
            files = [file for worker in workers for file in worker.files]
            self._tasks.start(count(files, flushed or workers[0].owner), "counting lines that are left out")
        for worker in [worker for worker in workers if worker.final]:
            out, err = worker.files
            self._forget(worker.id)
            self._on_read(worker.id, (out.offset, out.inode), (err.offset, err.inode), True)

    def end(self) -> None:
        """This agentd ends, and its workers have: tell their owners what they will not see."""
        for owner in list(self._owners):
            files = [file for worker in self._of(owner) for file in worker.files]
            paths = [file.path for file in files if file.more()]
            if paths:
                left = sum(file.left() for file in files)
                self._report(LogLines(owner, self._node, [], left=left, where=_where(paths)))

    def _of(self, owner: str) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.owner == owner]

    def credit(self, chars: int, owner: str) -> None:
        """Lines of that cost may be sent to *owner*."""
        state = self._owners.get(owner)
        if state is not None:
            state.credit = min(state.credit + chars, WINDOW)
            self._soon()  # not now: a report that cannot be sent gives its credit back while it is made

    def close(self) -> None:
        """Forget every worker."""
        for timer in self._flushing.values():
            timer.cancel()
        self._flushing.clear()
        self._tasks.cancel()
        for id in list(self._workers):
            self._forget(id)

    def _forget(self, id: str) -> None:
        worker = self._workers.pop(id)
        self._pending.pop(id, None)
        if worker.drop is not None:
            worker.drop.cancel()
        if not any(other.owner == worker.owner for other in self._workers.values()):
            del self._owners[worker.owner]

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._later)

    def _later(self) -> None:
        self._scheduled = False
        self._pump()

    def _pump(self, whole: bool = False) -> None:
        """Read in turns from all that have more and whose owner has credit; *whole*: without giving the loop a turn."""
        if self._held:
            return
        budget, ended, touched = _TURN, [], {}
        ready = [id for id in self._pending if self._owners[self._workers[id].owner].credit > 0]
        while ready and (budget > 0 or whole):
            for id in ready:
                worker = self._workers[id]
                got = sum(self._read(worker, file) for file in worker.files)
                budget -= got
                touched[id] = worker
                if not got:
                    del self._pending[id]
                    ended.append(id)
            ready = [id for id in ready if id in self._pending and self._owners[self._workers[id].owner].credit > 0]
        for owner in list(self._owners):
            self._flush(owner)
        for id, worker in touched.items():
            out, err = worker.files
            self._on_read(id, (out.offset, out.inode), (err.offset, err.inode), id in ended)
            if id in ended and worker.final:
                self._forget(id)
        if ready:
            self._soon()
        if self._flushing:
            self._flushed()

    def _read(self, worker: _Worker, file: _File) -> int:
        """Take one chunk of lines; returns how many bytes it was, 0 at the end."""
        owner = self._owners[worker.owner]
        if owner.credit <= 0:
            return 1 if file.more() else 0
        try:
            data, ended = file.read()
        except FileNotFoundError:  # never opened, or removed by somebody: there is nothing to show
            return 0
        except OSError as error:
            self._unreadable(worker, file, f"{file.path}: {error.strerror}")
            return 0
        lines, size = split(data, ended or (worker.final and len(data) < MAX_LINE))
        file.offset += size
        owner.skipped += file.skipped
        file.skipped = 0
        for line in lines:
            owner.entries.append((worker.name, file.stream, line))
            owner.credit -= line_cost(line)
            owner.chars += len(line) + 1
        if owner.chars >= _BATCH:
            self._flush(worker.owner)
        return size

    def _unreadable(self, worker: _Worker, file: _File, fault: str) -> None:
        """Its owner is told once; what the worker writes next is another try."""
        if file.fault != fault:
            file.fault = fault
            log.warning("worker %s: its output cannot be shown: %s", worker.id, fault)
            line = f"[rlinf-actors] output cannot be shown: {fault}"
            self._report(LogLines(worker.owner, self._node, [(worker.name, "err", line)]))

    def _flush(self, name: str) -> None:
        owner = self._owners[name]
        if owner.entries or owner.skipped:
            lines = LogLines(name, self._node, owner.entries, owner.skipped)
            owner.entries, owner.chars, owner.skipped = [], 0, 0
            self._report(lines)


def _where(paths: list[str]) -> str:
    """Return the file that *paths* are, or their directory, as text that can be sent."""
    if not paths:
        return ""
    where = paths[0] if len(paths) == 1 else os.path.commonpath([os.path.dirname(path) for path in paths])
    return os.fsencode(where).decode(errors="replace")[:MAX_PATH]


def _opened(path: str, flags: int) -> int:
    """As the template opens it to write (worker.drain): it may be a link or a FIFO by now."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _end_of(path: str) -> tuple[int, int]:
    """Size and inode of a file, 0 for one that does not exist yet, or that nobody may look at."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_ino
