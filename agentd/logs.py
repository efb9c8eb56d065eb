"""Read workers' output from their log files, and send it to the jobs that own the workers, with flow control.

The files are the buffer: without credit nothing is read, so a slow terminal costs no memory and loses no line. An owner
is a job's namespace (LogLines.owner). Its credit is the cost of the lines that agentd may still send to it
(agent_messages.line_cost).

Lines that are never sent are counted, and the count is sent to the owner: when the owner ends (`flush`), when an ended
worker's output has waited too long for credit, and when agentd ends (`end`). agentd.workers calls `LogForwarder` on the
loop's thread; lines are counted on another thread.
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

import msgspec

from agentd.users import User, as_user
from rlinf_actors.net.loop import Tasks
from rlinf_actors.wire.agent_messages import CUT, MAX_PATH, UPDATE, LogLines, OutputLost, line_cost

log = logging.getLogger(__name__)

MAX_LINE = 64 << 10  # bytes in a line. A longer line is sent in pieces, each but the last with CUT at its end
WINDOW = 1 << 20  # largest cost of the lines that are on their way to one owner
_TURN = 512 << 10  # bytes read in one callback before the event loop runs other callbacks
_BATCH = 128 << 10  # characters at which a LogLines message is sent
_PATIENCE_S = 60.0  # seconds for which an ended worker's output waits for credit
_MOST_NOTES = 100  # lines of agentd about the output of one worker, whose template may ask for any number

_COUNTED = 1 << 20  # bytes read at a time when lines are counted
_MOST_COUNTED = 256 << 20  # bytes of a file in which lines are counted: a worker can make a file of any size, by a hole

_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


def split(data: bytes, final: bool = False) -> tuple[list[str], int]:
    """Return the complete lines in *data*, and their size in bytes. If *final* is true, an unfinished last line counts
    as complete.

    A lone carriage return ends a line of a progress bar. Such a line gets UPDATE at its end, and the next line replaces
    it. A line is cut after MAX_LINE bytes, at the end of a character.
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
        cut = _character_end(rest[:MAX_LINE])
        return [rest[:cut].decode(errors="replace") + CUT], cut
    if final and rest:
        text = rest.rstrip(b"\r").decode(errors="replace")
        if text and lines and lines[-1].endswith(UPDATE):
            lines.pop()
        return [*lines, *([text] if text else [])], len(data)
    return lines, end


def _character_end(data: bytes) -> int:
    """Return the length of *data* without the bytes of an incomplete UTF-8 character at its end."""
    for back in range(1, 4):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # not a continuation: an ASCII byte, or the first of a character
            length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
            return len(data) - back if length > back else len(data)
    return len(data)


Position = tuple[int, int]  # number of bytes of a log file that were read, and the file's inode (0 if it did not exist)


class OutputFile(msgspec.Struct):
    """A worker's log file, and how far agentd has read it. If the file grows too large, the template renames it to
    PATH.1 and begins a new file.
    """

    path: str
    stream: str  # "out" or "err"
    offset: int  # number of bytes that were read
    inode: int = 0  # of the file that `offset` belongs to; 0 if unknown
    skipped: int = 0  # how often unread output was lost by a rename, removal or truncation of the file
    fault: str = ""  # the last reading error that was reported
    user: User | None = None  # as whom the worker runs; None for agentd's own user

    def read(self) -> tuple[bytes, bool]:
        """Return the next unread bytes, at most MAX_LINE, and whether they are the last of a renamed file. A renamed
        file is read to its end before the new file.

        Raises:
            OSError: the file cannot be read.
        """
        with self.open(self.path) as file:
            found = os.fstat(file.fileno())
            if self.inode not in (0, found.st_ino):
                rest = self._rest()
                if rest:
                    return rest, len(rest) < MAX_LINE
                self.offset = 0
            self.inode = found.st_ino
            if found.st_size < self.offset:  # it was truncated
                self.offset, self.skipped = 0, self.skipped + 1
            return os.pread(file.fileno(), MAX_LINE, self.offset), False

    def left(self) -> int:
        """Return the number of lines of the log file that agentd has not read. Any thread."""
        lines = 0
        for path in (f"{self.path}.1", self.path):
            try:
                with self.open(path) as file:
                    begun = os.fstat(file.fileno()).st_ino == self.inode
                    if path == self.path:
                        lines += _count(file, self.offset if begun or not self.inode else 0)
                    elif begun:  # else an older part, which was read
                        lines += _count(file, self.offset)
            except OSError:  # it does not exist, or cannot be read
                continue
        return lines

    def more(self) -> bool:
        """Return True if the log file has output that agentd has not read."""
        try:
            with as_user(self.user):
                found = os.stat(self.path)
        except OSError:  # `read` says so
            return False
        return found.st_size > self.offset or self.inode not in (0, found.st_ino)

    def open(self, path: str) -> io.FileIO:
        """Open the log file, as the worker's user."""
        with as_user(self.user):
            file = open(path, "rb", buffering=0, opener=opened)  # noqa: SIM115 - the caller closes it
        if self.user is not None and os.fstat(file.fileno()).st_uid != self.user.uid:
            file.close()
            raise PermissionError(errno.EPERM, f"does not belong to user {self.user.name}")
        return file

    def _rest(self) -> bytes:
        """Return the next unread bytes of the renamed file, at most MAX_LINE; b"" if there are none or the file is
        lost.
        """
        try:
            with self.open(f"{self.path}.1") as file:
                if os.fstat(file.fileno()).st_ino == self.inode:
                    return os.pread(file.fileno(), MAX_LINE, self.offset)
        except OSError:
            pass
        self.skipped += 1  # renamed twice since, or removed
        return b""


def _count(file: io.FileIO, start: int) -> int:
    """Return the number of lines in the _MOST_COUNTED bytes after byte *start* of a file. An unfinished last line
    counts as a line.
    """
    file.seek(start)
    lines, last = 0, b"\n"
    while file.tell() < start + _MOST_COUNTED and (data := file.read(_COUNTED)):
        lines, last = lines + data.count(b"\n"), data[-1:]
    return lines + (last != b"\n")


class _WorkerLogs(msgspec.Struct):
    id: str
    name: str
    owner: str
    files: list[OutputFile]
    keep: bool = False
    notes: int = 0  # lines of agentd about its output
    final: bool = False
    drop: asyncio.TimerHandle | None = None


class _Owner(msgspec.Struct):
    credit: int = WINDOW
    credited_at: float = 0.0  # time of the loop
    entries: list[tuple[str, str, str]] = msgspec.field(default_factory=list)
    chars: int = 0
    skipped: int = 0


class LogForwarder:
    """Reads the log files of this node's workers, and sends their lines to the jobs that own the workers. Loop thread
    only.

    Args:
        node: name of this node, for LogLines.
        report: called with each LogLines message for the head.
        on_read: called when a worker's files have been read, with the worker's id, the positions in its stdout and
            stderr files, and True if both were read to their ends. In that case nothing more is read until `grew` is
            called.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: str,
        report: Callable[[LogLines | OutputLost], None],
        on_read: Callable[[str, Position, Position, bool], None],
    ) -> None:
        self._loop = loop
        self._node = node
        self._report = report
        self._on_read = on_read
        self._workers: dict[str, _WorkerLogs] = {}
        self._pending: dict[str, None] = {}
        self._owners: dict[str, _Owner] = {}
        self._scheduled = False
        self._paused = False
        self._flushing: dict[str, asyncio.TimerHandle] = {}
        self._tasks = Tasks(loop)

    def pause(self) -> None:
        """Read no workers' output until `resume` is called. Used while no head is connected, because the output cannot
        reach its jobs then.
        """
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._pump()

    def add(
        self,
        id: str,
        name: str,
        owner: str,
        out_path: str,
        err_path: str,
        at: tuple[Position, Position] | None = None,
        keep: bool = False,
        user: User | None = None,
    ) -> None:
        """Begin to send the output of the worker *id*. *name* is its GROUP:RANK, and *owner* the namespace of its job.

        *at* has the positions in the two files at which reading begins; if it is None, reading begins at their present
        ends. The files need not exist yet. If *keep* is true, the output waits for credit without limit after the
        worker's end, because no output may be left out (WorkerSpec.keep_logs). It is dropped if the job's driver ends:
        the head then gives credit for lines that it cannot pass on. The files are read with the rights of *user*, as
        whom the worker runs.
        """
        with as_user(user):
            out, err = at or (_end_of(out_path), _end_of(err_path))
        files = [OutputFile(out_path, "out", *out, user=user), OutputFile(err_path, "err", *err, user=user)]
        self._workers[id] = _WorkerLogs(id, name, owner, files, keep)
        self._owners.setdefault(owner, _Owner())

    def paths(self) -> set[str]:
        """Return the paths of the log files that are read, of living workers and of ended ones."""
        return {file.path for worker in self._workers.values() for file in worker.files}

    def grew(self, ids: list[str]) -> None:
        """Read and send the new output of the workers *ids*, whose log files have grown."""
        self._pending.update(dict.fromkeys(id for id in ids if id in self._workers))
        self._pump()

    def lost(self, id: str, text: str) -> None:
        """Tell head and job of worker *id* that output is lost because of the error *text*; "" when it is written."""
        self._note(id, f"output is lost: {text}" if text else "output is written again", OutputLost(id, text))

    def _note(self, id: str, text: str, notice: OutputLost | None = None) -> None:
        """Log *text* in agentd's log, and send it to the job of worker *id* as a line of the worker's stderr."""
        worker = self._workers.get(id)
        if worker is not None and worker.notes >= _MOST_NOTES:
            return
        log.warning("worker %s: %s", id, text)
        if worker is not None:
            worker.notes += 1
            if notice is not None:
                self._report(notice)
            self._report(LogLines(worker.owner, self._node, [(worker.name, "err", f"[rlinf-actors] {text}")]))

    def finish(self, id: str) -> None:
        """Send the unread output of the ended worker *id*, as far as its job has credit. Wait some time for credit for
        the rest.
        """
        worker = self._workers.get(id)
        if worker is None or worker.final:
            return
        worker.final = True
        self._pending[id] = None
        self._pump(only=id)
        if id in self._workers and not worker.keep:
            worker.drop = self._loop.call_later(_PATIENCE_S, self._drop, [worker])

    def flush(self, owner: str, wait_s: float) -> None:
        """Send the unread output of the ending job *owner* for at most *wait_s* seconds. The last message is a final
        LogLines, with the number of lines that were not sent. If no output may be left out, *wait_s* begins anew with
        each credit.
        """

        def end() -> None:
            workers, state = self._of(owner), self._owners.get(owner)
            if state is not None and any(worker.keep for worker in workers):
                left_s = state.credited_at + wait_s - self._loop.time()
                if left_s > 0:
                    self._flushing[owner] = self._loop.call_later(left_s, end)
                    return
            del self._flushing[owner]
            self._drop(workers, owner)

        if owner in self._flushing:
            return
        self._flushing[owner] = self._loop.call_later(wait_s, end)
        self._pending.update(dict.fromkeys(worker.id for worker in self._of(owner)))
        self._pump()

    def _answer_flushes(self) -> None:
        """Send the final LogLines to each ending job whose output is completely sent."""
        waiting = {self._workers[id].owner for id in self._pending}
        for owner in [owner for owner in self._flushing if owner not in waiting]:
            self._flushing.pop(owner).cancel()
            self._report(LogLines(owner, self._node, [], final=True))

    def _drop(self, workers: list[_WorkerLogs], flushed: str | None = None) -> None:
        """Report to the job of *workers* how many of their lines will not be sent, and forget those workers that have
        ended.

        *flushed* is the job's namespace if the job is ending and waits for a final LogLines; None otherwise.
        """

        async def count(files: list[OutputFile], owner: str) -> None:
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
        """Tell each job how many lines of its workers will not be sent because agentd ends. Call it after the last
        worker's end.
        """
        for owner in list(self._owners):
            files = [file for worker in self._of(owner) for file in worker.files]
            paths = [file.path for file in files if file.more()]
            if paths:
                left = sum(file.left() for file in files)
                self._report(LogLines(owner, self._node, [], left=left, where=_where(paths)))

    def _of(self, owner: str) -> list[_WorkerLogs]:
        return [worker for worker in self._workers.values() if worker.owner == owner]

    def credit(self, chars: int, owner: str) -> None:
        """Allow agentd to send more lines to the job *owner*. Their total cost is at most *chars*."""
        state = self._owners.get(owner)
        if state is not None:
            state.credit = min(state.credit + chars, WINDOW)
            state.credited_at = self._loop.time()
            self._soon()  # not now: a report that cannot be sent returns its credit while it is made

    def close(self) -> None:
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
        def pump() -> None:
            self._scheduled = False
            self._pump()

        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(pump)

    def _pump(self, only: str = "") -> None:
        """Read unread output, as far as the jobs that own it have credit, and send it. Read about _TURN bytes and leave
        the rest for the loop's next turn.

        If *only* is a worker's id, read that worker's output alone, as much as a job's whole credit stands for. The
        credit alone is no bound: lines that replace one another (UPDATE) take none.
        """
        if self._paused:
            return
        budget, ended, touched = WINDOW + 2 * MAX_LINE if only else _TURN, [], {}
        wanted = [only] if only else list(self._pending)
        ready = [id for id in wanted if self._owners[self._workers[id].owner].credit > 0]
        while ready and budget > 0:
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
            self._answer_flushes()

    def _read(self, worker: _WorkerLogs, file: OutputFile) -> int:
        """Read the next lines, at most MAX_LINE bytes, from *file* of *worker*, and collect them for the worker's job.
        Return their size in bytes, or 0 if there is nothing to read. If the job has no credit, read nothing, and return
        1 if there is output.
        """
        owner = self._owners[worker.owner]
        if owner.credit <= 0:
            return 1 if file.more() else 0
        try:
            data, ended = file.read()
        except FileNotFoundError:  # never written, or removed
            return 0
        except OSError as error:
            fault = f"output cannot be shown: {file.path}: {error.strerror}"
            if file.fault != fault:  # once for each fault; new output causes another try
                file.fault = fault
                self._note(worker.id, fault)
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

    def _flush(self, name: str) -> None:
        owner = self._owners[name]
        if owner.entries or owner.skipped:
            lines = LogLines(name, self._node, owner.entries, owner.skipped)
            owner.entries, owner.chars, owner.skipped = [], 0, 0
            self._report(lines)


def _where(paths: list[str]) -> str:
    """Return where the unsent lines can be read: the path, or the common directory of several paths, as UTF-8 text of
    at most MAX_PATH characters; "" for no path.
    """
    if not paths:
        return ""
    # templates name the paths, and one that is not absolute has no directory in common with others
    parents = {os.path.dirname(path) for path in paths if os.path.isabs(path)}
    where = paths[0] if len(paths) == 1 or not parents else os.path.commonpath(parents)
    return os.fsencode(where).decode(errors="replace")[:MAX_PATH]


def opened(path: str, flags: int) -> int:
    """Open a file that a worker has made. Do not follow a link, and do not wait for the writer of a FIFO: a worker may
    have put either in its place.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file")
    return fd


def _end_of(path: str) -> tuple[int, int]:
    """Return the size and inode of a file, or (0, 0) if the file does not exist or cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_ino
