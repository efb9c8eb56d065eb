"""Reads the marks beside a worker's log file: when its parts were written, and in which job. Any thread.

The worker's user can write anything to that file, so a mark that cannot be one is left out. The file may be long, so
it is searched, not read as a whole.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TypeVar

from agentd.logs import opened
from agentd.users import User, as_user
from rlinf_actors.wire.log_values import MARK, MARKED_S, MARKS, MAX_LOG_JOBS, MAX_LOG_MARKS, MAX_TIME, LogMark

T = TypeVar("T")

_JOB = re.compile(rb"[0-9a-f]{8}")


class Marks:
    """The marks of an open file, in the order in which they were written.

    The offsets ascend, and so do the times, but where the node's clock was set back.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._count = os.fstat(fd).st_size // MARK.size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[float, int, bytes]:
        """Return the time, the offset and the job of a mark. Raise struct.error if the file was cut meanwhile."""
        time, offset, job = MARK.unpack(os.pread(self._fd, MARK.size, number * MARK.size))
        return time, offset, job

    def since(self, time: float, size: int) -> int:
        """Return the position of the first of *size* bytes that may have been written after *time*; 0 without marks."""
        first = bisect_right(self, time - MARKED_S, key=lambda mark: mark[0])
        offset = self[first][1] if first < len(self) else size
        return min(offset, size) if len(self) else 0

    def within(self, begin: int, end: int) -> tuple[list[LogMark], int]:
        """Return the marks of the bytes from *begin* to *end*, the first for *begin* itself; and a lower end, if they
        are more than MAX_LOG_MARKS.
        """
        found: list[LogMark] = []
        for number in range(max(0, bisect_right(self, begin, key=lambda mark: mark[1]) - 1), len(self)):
            offset = self[number][1]
            if offset >= end:
                break
            if len(found) == MAX_LOG_MARKS:
                return found, offset if offset > begin else end  # they do not ascend: a worker wrote them
            found += self._mark(number)
        return found, end

    def jobs(self) -> list[LogMark]:
        """Return the first mark of each job, of the last MAX_LOG_JOBS jobs. One job writes after the other."""
        found: list[LogMark] = []
        end = len(self)
        while end and len(found) < MAX_LOG_JOBS:
            job = self[end - 1][2]
            end = bisect_left(range(end), True, key=lambda number: self[number][2] == job)
            found += self._mark(end)
        return found[::-1]

    def _mark(self, number: int) -> list[LogMark]:
        time, offset, job = self[number]
        possible = 0 <= time <= MAX_TIME and offset < 1 << 62
        return [LogMark(offset, time, job.decode() if _JOB.fullmatch(job) else "")] if possible else []


def read_marks(path: str, user: User | None, ask: Callable[[Marks], T], without: T) -> T:
    """Return ``ask(marks)`` for the marks of the log file *path*, which belongs to *user*; *without* if it has none."""
    try:
        with as_user(user):
            fd = opened(path + MARKS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return without
    try:
        return ask(Marks(fd))
    except (OSError, struct.error):  # it was cut meanwhile
        return without
    finally:
        os.close(fd)
