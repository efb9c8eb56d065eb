"""The grammar of placement strings; what a string means on a cluster is the resolver's business.

string := part ("," part)*     part := resources [":" processes]
resources := a | a-b | all     processes := a | a-b
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlinf_actors.errors import PlacementError

MAX_PROCESSES = 1_000_000
"""Far above any cluster: a typing error must not fill the memory."""

_SPAN = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_FORM = "write parts such as 0, 0-3, all, 0-3:0-7, with commas between them"


@dataclass(frozen=True)
class Span:
    """The ranks from *first* to *last*, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @classmethod
    def of(cls, first: int, count: int) -> Span:
        """*count* ranks from *first* on."""
        return cls(first, first + count - 1)


@dataclass(frozen=True)
class Part:
    """One part of a placement string.

    Attributes:
        resources: the resource ranks; None for ``all``.
        processes: the process ranks; None where they are left out.
    """

    resources: Span | None
    processes: Span | None = None

    def __str__(self) -> str:
        resources = "all" if self.resources is None else str(self.resources)
        return resources if self.processes is None else f"{resources}:{self.processes}"


def parse(text: str) -> tuple[Part, ...]:
    """The parts of a placement string.

    Raises:
        PlacementError: *text* is not in the grammar; the message quotes the piece that is wrong.
    """
    if not text.strip():
        raise PlacementError(f"the placement is empty; {_FORM}")
    return tuple(_part(piece, text) for piece in text.split(","))


def render(parts: tuple[Part, ...]) -> str:
    """The string that :func:`parse` reads as *parts*."""
    return ",".join(map(str, parts))


def _part(piece: str, whole: str) -> Part:
    fields = piece.split(":")
    if not piece.strip():
        raise PlacementError(f"placement {whole!r} has an empty part (a comma too many); {_FORM}")
    if len(fields) > 2:
        raise PlacementError(
            f"part {piece.strip()!r} of placement {whole!r} has {len(fields) - 1} colons; "
            "a part is resources:processes, and a comma separates parts"
        )
    resources = None if fields[0].strip().lower() == "all" else _span(fields[0], piece, whole, "resource")
    if len(fields) == 1:
        return Part(resources)
    processes = _span(fields[1], piece, whole, "process")
    if processes.last >= MAX_PROCESSES:
        raise PlacementError(
            f"part {piece.strip()!r} of placement {whole!r} asks for process {processes.last}; "
            f"a placement has at most {MAX_PROCESSES} processes"
        )
    return Part(resources, processes)


def _span(field: str, piece: str, whole: str, kind: str) -> Span:
    match = _SPAN.fullmatch(field)
    if match is None:
        if kind == "process" and field.strip().lower() == "all":
            raise PlacementError(
                f"part {piece.strip()!r} of placement {whole!r} has 'all' as processes; "
                "only resources can be 'all', processes are a rank or a range"
            )
        raise PlacementError(
            f"cannot read {field.strip()!r} as {kind} ranks in part {piece.strip()!r} of placement {whole!r}; {_FORM}"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise PlacementError(
            f"the {kind} ranks {first}-{last} in part {piece.strip()!r} of placement {whole!r} run backwards; "
            f"write {last}-{first}"
        )
    return Span(first, last)
