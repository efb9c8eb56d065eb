"""The record of a process: each event is a line, written before the next event, so that kill -9 loses none."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIX = ".events"


@dataclass(frozen=True, slots=True)
class Line:
    """One event.

    Attributes:
        at: seconds of CLOCK_MONOTONIC, which all processes of a machine share.
        what: its kind.
        more: its fields.
    """

    at: float
    what: str
    more: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.more[name]


Records = Mapping[str, list[Line]]
"""Name of a process, unique among all that ever ran, to its lines."""


class Record:
    """A process's own file. Any thread may write: a line is one write() to a file opened for appending.

    Args:
        folder: of all records.
        who: the name of this process.
    """

    def __init__(self, folder: str, who: str) -> None:
        self.who = who
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(Path(folder, who + _SUFFIX), flags, 0o600)

    def write(self, what: str, /, **more: Any) -> None:
        """Write an event down."""
        os.write(self._fd, json.dumps([time.monotonic(), what, more]).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read(folder: str, until: float = math.inf) -> dict[str, list[Line]]:
    """All records of a folder; a line that a killed process did not finish is not there.

    Args:
        folder: of all records.
        until: later lines are left out, so that files that grow while they are read belong together.
    """
    paths = sorted(Path(folder).glob(f"*{_SUFFIX}"))
    return {path.name.removesuffix(_SUFFIX): [line for line in _lines(path) if line.at <= until] for path in paths}


def _lines(path: Path) -> Iterator[Line]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            at, what, more = json.loads(line)
            yield Line(at, what, more)
