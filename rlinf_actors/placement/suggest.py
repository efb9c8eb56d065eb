"""Corrected placement strings for error messages. Process ranks stay contiguous in what is offered."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_actors.placement.grammar import Part, Span, render

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
