"""Limits of a group's workers: from what a user writes to bytes and counts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlinf_actors.errors import UsageError

POLICIES = ("required", "best_effort")
MIN_MEMORY = 64 << 20
"""Bytes; a worker that has only imported what it needs takes about 40 MiB."""
MIN_PIDS = 16
"""Processes and threads; a worker has three, and each lane or library its own."""

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")


@dataclass(frozen=True)
class Limits:
    """Of one worker and all that it starts.

    Attributes:
        memory: bytes, None for none.
        pids: processes and threads, None for none.
        best_effort: start also where they cannot hold.
    """

    memory: int | None = None
    pids: int | None = None
    best_effort: bool = False

    @classmethod
    def of(cls, memory: str | int | None, pids: int | None, policy: str) -> Limits:
        """Check and normalize what `launch` was given.

        Raises:
            UsageError: a value cannot be.
        """
        if policy not in POLICIES:
            raise UsageError(f"limits is {policy!r}; it must be one of {', '.join(POLICIES)}")
        found = memory if memory is None else _size(memory)
        if found is not None and found < MIN_MEMORY:
            raise UsageError(f"memory_limit is {memory!r}; a worker does not fit in less than {MIN_MEMORY >> 20} MiB")
        if pids is not None and (isinstance(pids, bool) or not isinstance(pids, int) or pids < MIN_PIDS):
            raise UsageError(f"pids_limit is {pids!r}; it must be a whole number from {MIN_PIDS} up: threads count too")
        return cls(found, pids, policy == "best_effort")


def _size(given: str | int) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    match = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise UsageError(
            f"memory_limit is {given!r}; it must be a number of bytes, or a text such as '8GiB' ({', '.join(_UNITS)})"
        )
    return int(float(match[1]) * _UNITS[match[2]])
