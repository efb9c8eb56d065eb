"""The grammar of placement strings; what a string means on a cluster is the resolver's business.

string := part ("," part)*     part := resources [":" processes]
resources := a | a-b | all     processes := a | a-b

Corrected placement strings for error messages. Process ranks stay contiguous in what is offered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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


Want = tuple[Span, int]
"""The resources of a part and how many processes it is to have."""


def fits(resources: int, processes: int) -> bool:
    """Whether one of the two divides the other."""
    return resources % processes == 0 or processes % resources == 0


def fewer(resources: int, processes: int) -> int:
    """The largest number of processes below *processes* that fits; 1 always does."""
    if processes > resources:
        return processes - processes % resources
    return max((count for count in range(1, processes) if resources % count == 0), default=1)


def more(resources: int, processes: int) -> int:
    """The smallest number of processes above *processes* that fits."""
    if processes >= resources:
        return processes + resources - processes % resources
    return next(count for count in range(processes + 1, resources + 1) if resources % count == 0)


def lay_out(wants: Sequence[Want], start: int = 0) -> str:
    """The string that gives every part its number of processes, ranks running on from *start*."""
    parts: list[Part] = []
    for resources, count in wants:
        parts.append(Part(resources, Span.of(start, count)))
        start += count
    return render(tuple(parts))


def corrections(wants: Sequence[Want]) -> list[str]:
    """Whole strings whose lengths divide: with fewer processes in the parts that do not fit, and with more."""
    found: dict[str, None] = {}
    for change in (fewer, more):
        found[lay_out([(r, n if fits(len(r), n) else change(len(r), n)) for r, n in wants])] = None
    return list(found)


def spread(spans: Sequence[Span], processes: int, start: int) -> list[str]:
    """Per-part rewrites of several ranges that were meant as one part of *processes* processes from *start* on.

    Two where the lengths do not divide, none where a process would need resources of two ranges.
    """
    total = sum(map(len, spans))
    counts = [processes] if fits(total, processes) else [fewer(total, processes), more(total, processes)]
    rewrites: dict[str, None] = {}
    for count in counts:
        shares = [len(span) * count for span in spans]
        # A part's own lengths must divide too: 0-1,3-5 for 2 processes would put one on two parts.
        if all(share % total == 0 and fits(len(s), share // total) for s, share in zip(spans, shares, strict=True)):
            rewrites[lay_out([(s, share // total) for s, share in zip(spans, shares, strict=True)], start)] = None
    return list(rewrites)


def either(strings: Sequence[str]) -> str:
    """``a`` or ``b``, in backquotes, for a message."""
    return " or ".join(f"`{string}`" for string in strings)
