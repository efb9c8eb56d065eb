"""A worker's stdout or stderr: from its pipe to its file, without ever making the worker wait."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Others may write to the directory: no link leads our bytes out of it then, and no FIFO lets us wait for a reader."""

TAIL_LINES = 20
TAIL_LINE_BYTES = 4096
_CHUNK = 64 << 10
_TURNS = 4
"""Chunks taken from one pipe before others get a turn."""
_LEFT_OVER = 4 << 20
"""Most that is taken from a pipe after its worker ended: one that still writes is not followed for ever."""


class Tail:
    """The last lines of a stream of bytes."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        *lines, last = data.rsplit(b"\n", TAIL_LINES)
        if lines:
            lines[0] = lines[0].rpartition(b"\n")[2] if b"\n" in lines[0] else self._partial + lines[0]
            self._lines.extend(line[: TAIL_LINE_BYTES + 1] for line in lines)
            self._partial = b""
        self._partial = (self._partial + last)[: TAIL_LINE_BYTES + 1]

    def lines(self) -> list[str]:
        """At most TAIL_LINES of them, each cut after TAIL_LINE_BYTES, so that all fit into a packet.

        Undecodable bytes are replaced.
        """
        lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return [_text(line) for line in lines[-TAIL_LINES:]]


def _text(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    data = text.encode()  # what replaces an undecodable byte is three
    return data[:TAIL_LINE_BYTES].decode(errors="ignore") + " [cut]" if len(data) > TAIL_LINE_BYTES else text


class LogPump:
    """Copies what a pipe holds to a file, as long as that takes it.

    Args:
        path: the file, appended to. One that cannot be opened or written (a full disk) loses
            what does not fit; the pipe is emptied all the same, `fault` says why, and when there is room again, a
            line in the file says how much is missing there.
        limit: bytes; a longer file becomes ``path.1``, in place of an earlier one. 0 for none.

    Attributes:
        tail: the last lines that went through.
        began: where its first byte goes: bytes of the file, and the file's inode.
        fault: the first error of the file, "" while there was none.
        lost: bytes that could not be written, since the last that could.
    """

    def __init__(self, path: str, limit: int = 0) -> None:
        self.path = path
        self.lost = 0
        self._limit = limit
        self._size = 0
        self._line_ended = True
        self.tail = Tail()
        self.fault = ""
        self.began = (0, 0)
        self._file = -1
        self._pipe, self.writer = os.pipe()
        os.set_blocking(self._pipe, False)
        self._open()

    def _open(self) -> None:
        try:
            self._file = _opened(self.path)
            found = os.fstat(self._file)
            self._size, self.began = found.st_size, (found.st_size, found.st_ino)
        except OSError as error:
            self._failed(error)

    def fileno(self) -> int:
        """The pipe's read end, for a selector."""
        return self._pipe

    def fds(self) -> list[int]:
        """All that is open; a forked child closes them."""
        return [fd for fd in (self._pipe, self.writer, self._file) if fd >= 0]

    def close_writer(self) -> None:
        """Only the worker writes from now on."""
        os.close(self.writer)
        self.writer = -1

    def pump(self, turns: int = _TURNS) -> tuple[bool, bool]:
        """Copy what is there. Returns (whether there was something, whether the pipe has ended)."""
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
        """Copy what is left, without waiting for other writers to close. Returns whether there was something."""
        return self.pump(_LEFT_OVER // _CHUNK)[0]

    def note(self, text: str) -> None:
        """A line of ours among the worker's."""
        line = f"[rlinf-actors] {text}\n".encode()
        self.tail.feed(line)
        self._write(line)

    def _write(self, data: bytes) -> None:
        if self._limit and self._size and self._size + len(data) > self._limit:
            end = 0 if self._line_ended else data.find(b"\n") + 1
            if end or self._line_ended or self._size > 2 * self._limit:  # where there are lines, a file ends with one
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
        except OSError as error:  # a full disk may have room again later: keep the file, lose these bytes
            self._failed(error)
        self.lost += len(view)
        self._line_ended = data.endswith(b"\n") if data else self._line_ended

    def _put(self, data: memoryview) -> int:
        written = os.write(self._file, data)
        self._size += written
        return written

    def _rotate(self) -> None:
        """Begin a new file; the old one keeps its name with .1. Where that cannot be, the old one grows."""
        begun = f"{self.path}.new"
        try:
            # before the older one goes: who reads knows a file by its inode, and the kernel gives those out again
            file = _opened(begun)
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
        os.close(self._file)
        self._file, self._size = file, 0

    def _failed(self, error: OSError) -> None:
        self.fault = self.fault or f"{self.path}: {error.strerror}"

    def close(self) -> None:
        """Twice is fine."""
        for fd in self.fds():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pipe = self.writer = self._file = -1


def _opened(path: str) -> int:
    """A log file to append to; made if it is not there. What is appended to a FIFO, whoever reads that would have.

    Raises:
        OSError: it cannot be opened, or is a FIFO.
    """
    file = os.open(path, _APPEND, 0o644)
    if stat.S_ISFIFO(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is a FIFO, no file")
    return file
