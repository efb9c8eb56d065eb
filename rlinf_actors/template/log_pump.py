"""LogPump copies a worker's stdout or stderr from a pipe to a file, so that the worker never waits for the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections import deque

from rlinf_actors.wire.log_values import MARK, MARKED_S, MARKS

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Other users may write to the directory of the log: links are not followed, and opening a FIFO does not block."""

TAIL_LINES = 20
TAIL_LINE_BYTES = 4096
_CHUNK = 64 << 10
_TURNS = 4
"""Most chunks of _CHUNK bytes to read from one pipe before other pipes get a turn."""
_LEFT_OVER = 4 << 20
"""Most bytes to read from a pipe after the end of its worker. Another process may write to the pipe for ever."""


class Tail:
    """Keeps the last TAIL_LINES lines of a worker's output for the report of how the worker ended."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        *lines, last = data.rsplit(b"\n", TAIL_LINES)
        if lines:
            lines[0] = lines[0].rpartition(b"\n")[2] if b"\n" in lines[0] else self._partial + lines[0]
            self._lines.extend(line[: TAIL_LINE_BYTES + 1] for line in lines)
            self._partial = b""
        self._partial = (self._partial + last)[: TAIL_LINE_BYTES + 1]

    def lines(self) -> list[str]:
        """Return the last lines of the output. Each line is cut after TAIL_LINE_BYTES bytes, so that all fit into one
        packet.
        """
        lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return [_text(line) for line in lines[-TAIL_LINES:]]


def _text(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    data = text.encode()  # the replacement of an undecodable byte has three bytes
    return data[:TAIL_LINE_BYTES].decode(errors="ignore") + " [cut]" if len(data) > TAIL_LINE_BYTES else text


class LogPump:
    """Copies a worker's stdout or stderr from a pipe to a file. The worker writes into the pipe.

    If the file cannot be opened or written (a full disk), output is lost: the pump reads the pipe all the same, and
    stores the error in `fault`. When the file can be written again, the pump first writes a line with the number of
    missing bytes.

    Args:
        path: the file, which is appended to.
        limit: size in bytes at which the file is renamed to ``path.1`` and a new file begins, 0 for never.
        keep: True to rename the file only after a reader has read the earlier ``path.1`` (`reading`), so that no
            output is lost to a slow reader. The file grows beyond *limit* meanwhile.
        job: id of the worker's job, for the marks of the file.

    Attributes:
        path: as given.
        writer: descriptor of the pipe's writing end.
        tail: the last lines.
        began: size and inode of the file before the first byte of this worker.
        fault: the first error of opening or writing the file, "" without one.
        lost: bytes lost since the last successful write.
        reading: inode of the file that a reader has come to, 0 if unknown.
    """

    def __init__(self, path: str, limit: int = 0, keep: bool = False, job: str = "") -> None:
        self.path = path
        self._job = job.encode()
        self._keep = keep
        self.reading = self._inode = 0
        self._rotated = False
        self.lost = 0
        self._limit = limit
        self._size = 0
        self._line_ended = True
        self._marked = 0.0
        self.tail = Tail()
        self.fault = ""
        self.began = (0, 0)
        self._file = -1
        self._pipe, self.writer = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            self._file = _locked(self.path)
            found = os.fstat(self._file)
            self._size, self.began = found.st_size, (found.st_size, found.st_ino)
            self._inode = found.st_ino
        except OSError as error:
            self._failed(error)

    def fileno(self) -> int:
        return self._pipe

    def close_writer(self) -> None:
        os.close(self.writer)
        self.writer = -1

    def pump(self, turns: int = _TURNS) -> tuple[bool, bool]:
        """Copy what is in the pipe to the file, at most *turns* chunks of _CHUNK bytes.

        Returns:
            True if there was any output; and True if the pipe has ended.
        """
        got = False
        for _ in range(turns):
            try:
                data = os.read(self._pipe, _CHUNK)
            except BlockingIOError:
                return got, False
            if not data:
                return got, True
            got = True
            self.tail.feed(data)
            self._write(data)
        return got, False

    def finish(self) -> bool:
        """Copy the output that is left in the pipe after the worker's end. Return True if there was any.

        Other processes may still have the pipe open; their later output is not waited for.
        """
        return self.pump(_LEFT_OVER // _CHUNK)[0]

    def note(self, text: str) -> None:
        """Write *text* as a line of rlinf-actors into the log file and the tail, between the worker's own output."""
        line = f"[rlinf-actors] {text}\n".encode()
        self.tail.feed(line)
        self._write(line)

    def _write(self, data: bytes) -> None:
        full = self._limit and self._size and self._size + len(data) > self._limit
        if full and (not self._keep or not self._rotated or self.reading == self._inode):
            end = 0 if self._line_ended else data.find(b"\n") + 1
            if end or self._line_ended or self._size > 2 * self._limit:  # a file with lines ends with a whole line
                self._append(data[:end])
                self._rotate()
                data = data[end:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            if self.lost and self._file >= 0:
                self._put(memoryview(b"\n[rlinf-actors] %d bytes of output are missing here\n" % self.lost))
                self.lost = 0
            while self._file >= 0 and view:
                view = view[self._put(view) :]
        except OSError as error:  # a full disk may have room later: keep the file, and lose these bytes
            self._failed(error)
        self.lost += len(view)
        self._line_ended = data.endswith(b"\n") if data else self._line_ended

    def _put(self, data: memoryview) -> int:
        now = time.time()
        if not 0 <= now - self._marked < MARKED_S:  # the clock may have been set back
            self._mark(now)
        written = os.write(self._file, data)
        self._size += written
        return written

    def _mark(self, now: float) -> None:
        """Note beside the file that output of now begins here. If that fails, the next output tries again."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._file).st_size  # others may have written to it, or cut it
            marks = _opened(self.path + MARKS)
            try:
                if not size or size < self._size:
                    os.ftruncate(marks, 0)  # they are about output that is gone
                self._size = size
                os.write(marks, MARK.pack(now, size, self._job))
                self._marked = now
            finally:
                os.close(marks)

    def _rotate(self) -> None:
        """Rename the log file to ``path.1`` and begin a new file. If that fails, continue with the old file."""
        begun = f"{self.path}.new"
        try:
            # before the older file goes: readers know a file by its inode, which the kernel reuses
            file = _locked(begun)
            try:
                os.rename(self.path, f"{self.path}.1")
                os.rename(begun, self.path)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            self._failed(error)
            self._size = 0  # not at every line
            return
        with contextlib.suppress(OSError):
            os.rename(f"{self.path}{MARKS}", f"{self.path}.1{MARKS}")
        self._marked = 0.0
        os.close(self._file)
        self._file, self._size, self._inode, self._rotated = file, 0, os.fstat(file).st_ino, True

    def _failed(self, error: OSError) -> None:
        self.fault = self.fault or f"{self.path}: {error.strerror}"

    def close(self) -> None:
        for fd in (self._pipe, self.writer, self._file):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._pipe = self.writer = self._file = -1


def _locked(path: str) -> int:
    """Open a worker's log file as `_opened` does, with a shared lock: agentd removes no file that a template writes."""
    file = _opened(path)
    with contextlib.suppress(OSError):  # a file system without locks; agentd removes nothing there
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _opened(path: str) -> int:
    """Open a worker's log file to append to it, and return the descriptor.

    Raises:
        OSError: the file cannot be opened, or is a FIFO, whose reader would get the output.
    """
    file = os.open(path, _APPEND, 0o644)
    if stat.S_ISFIFO(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is a FIFO, no file")
    return file
