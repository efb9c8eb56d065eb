"""Placement strings: their grammar and rules, and the resource ranks of every process. Pure; no node is needed.

string := part ("," part)*              part := resources [":" processes]
resources := a | a-b | all              processes := a | a-b

ComponentPlacement calls `assign` for each rule. Every error offers the string that was probably meant; the process
ranks of such a string are contiguous. Running time is linear in the processes and resources named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import msgspec

from rlinf_actors.errors import PlacementError

MAX_PROCESSES = 1_000_000
"""Far above any cluster, so that a typing error cannot exhaust the memory."""

_SPAN = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_FORM = "write parts such as 0, 0-3, all, 0-3:0-7, with commas between them"


class Span(msgspec.Struct, frozen=True):
    """The ranks from *first* to *last*, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def ranks(self) -> range:
        return range(self.first, self.last + 1)

    @classmethod
    def of(cls, first: int, count: int) -> Span:
        return cls(first, first + count - 1)


class Part(msgspec.Struct, frozen=True):
    """One part of a placement string, such as ``0-3:0-7``: resources, and the processes that are put on them."""

    resources: Span | None  # the resource ranks; None for "all"
    processes: Span | None = None  # the process ranks; None if the part names none

    def __str__(self) -> str:
        resources = "all" if self.resources is None else str(self.resources)
        return resources if self.processes is None else f"{resources}:{self.processes}"


def parse(text: str) -> tuple[Part, ...]:
    """Return the parts of placement string *text*.

    If *text* does not follow the grammar, raise PlacementError, which quotes the wrong piece.
    """
    if not text.strip():
        raise PlacementError(f"the placement is empty; {_FORM}")
    return tuple(_part(piece, text) for piece in text.split(","))


def names_all(text: str) -> bool:
    """Return True if *text* asks for all resources of a node group, and so names none of them."""
    return any(part.resources is None for part in parse(text))


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
"""The resources of a part, and the number of processes to put on them."""


def fits(resources: int, processes: int) -> bool:
    """True if one of the two numbers divides the other, which every part of a placement string requires."""
    return resources % processes == 0 or processes % resources == 0


def fewer(resources: int, processes: int) -> int:
    """Return the largest number below *processes* that divides *resources* or is a multiple of it; 1 if there is none.

    Error messages suggest this number if *processes* itself does not fit.
    """
    if processes > resources:
        return processes - processes % resources
    return max((count for count in range(1, processes) if resources % count == 0), default=1)


def more(resources: int, processes: int) -> int:
    """Return the smallest number above *processes* that divides *resources* or is a multiple of it.

    Error messages suggest this number if *processes* itself does not fit.
    """
    if processes >= resources:
        return processes + resources - processes % resources
    return next(count for count in range(processes + 1, resources + 1) if resources % count == 0)


def lay_out(wants: Sequence[Want], start: int = 0) -> str:
    """Return the placement string whose parts are *wants*: pairs of resources and a number of processes.

    The process ranks count up from *start*.
    """
    parts: list[str] = []
    for resources, count in wants:
        parts.append(str(Part(resources, Span.of(start, count))))
        start += count
    return ",".join(parts)


def corrections(wants: Sequence[Want]) -> list[str]:
    """Return the placement strings that correct *wants*, for an error message.

    *wants* has the resources and the number of processes of each part. One string has fewer processes in the parts
    where neither number divides the other, a second string has more.
    """
    found: dict[str, None] = {}
    for change in (fewer, more):
        found[lay_out([(r, n if fits(len(r), n) else change(len(r), n)) for r, n in wants])] = None
    return list(found)


def spread(spans: Sequence[Span], processes: int, start: int) -> list[str]:
    """Return the placement strings that may be meant if one process range follows several resource ranges.

    ``0-1,4-5:0-3`` is such a text. *spans* has the resource ranges, *processes* is the number of processes on all of
    them together, and *start* is the rank of the first process. If neither number divides the other, one string with
    fewer and one with more processes is returned. Strings in which a process would need resources of two ranges are
    left out.
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
    return " or ".join(f"`{string}`" for string in strings)


_LONGEST_LIST = 16
"""Largest number of ranks that an error message lists."""


class Target(msgspec.Struct, frozen=True):
    """The resources to which a placement string is applied; ``str()`` describes them for error messages."""

    group: str  # label of the node group, or labels joined by commas
    count: int  # number of resources
    noun: str  # name of one resource: node, accelerator, Franka, resource

    def __str__(self) -> str:
        if self.count == 0:
            return f"node group {self.group!r}, which has no {self.noun}"
        if self.count == 1:
            what = "the node" if self.noun == "node" else f"one {self.noun}"
            return f"node group {self.group!r}, which has one resource ({what}): rank 0"
        return f"node group {self.group!r}, which has {self.count} resources ({self.noun}s): ranks 0-{self.count - 1}"


def assign(text: str, target: Target, maybe_sexagesimal: bool = False) -> list[list[int]]:
    """Return, for each process by rank, the resource ranks that it holds or shares with other processes.

    Args:
        text: the placement string.
        target: the resources that the string is applied to.
        maybe_sexagesimal: True if YAML read the string as a number. YAML reads ``a:b`` as a number in base 60.

    Raises:
        PlacementError: *text* does not follow the grammar or breaks a rule; the message offers a correction.
    """
    found = _parts(text, target, maybe_sexagesimal)
    held: list[list[int]] = [[] for _ in range(sum(len(ranks) for _, ranks in found))]
    for resources, ranks in found:
        block, sharers = max(1, len(resources) // len(ranks)), max(1, len(ranks) // len(resources))
        for index in range(len(ranks)):
            first = resources.first + index // sharers * block
            held[ranks.first + index] = list(range(first, first + block))
    return held


def rank_map(text: str, target: Target, maybe_sexagesimal: bool = False) -> dict[tuple[int, ...], list[int]]:
    """Return, for each part of the placement string, its resource ranks and the process ranks on them.

    Arguments and errors are those of `assign`.
    """
    found = _parts(text, target, maybe_sexagesimal)
    return {tuple(resources.ranks): list(processes.ranks) for resources, processes in found}


def _parts(text: str, target: Target, maybe_sexagesimal: bool) -> list[tuple[Span, Span]]:
    """Return the resources and the processes of each part, after checking all rules."""
    parts = parse(text)
    spans = [_resources(part, text, target) for part in parts]
    _check_range(parts, spans, text, target, maybe_sexagesimal)
    _check_ascending(parts, spans, text)
    processes = _processes(parts, spans)
    _check_union(parts, spans, processes, text)
    _check_lengths(spans, processes, text)
    _check_contiguous(spans, processes, text)
    return list(zip(spans, processes, strict=True))


def _resources(part: Part, text: str, target: Target) -> Span:
    if part.resources is not None:
        return part.resources
    if target.count == 0:
        raise PlacementError(f"placement {text!r} asks for all resources of {target}")
    return Span(0, target.count - 1)


def _check_range(
    parts: Sequence[Part], spans: Sequence[Span], text: str, target: Target, maybe_sexagesimal: bool
) -> None:
    worst = max(span.last for span in spans)
    if worst < target.count:
        return
    advice = ""
    if maybe_sexagesimal and text.isdigit():
        left, right = divmod(int(text), 60)
        advice = f'; if {left}:{right} was meant, YAML read it in base 60: quote it, "{left}:{right}"'
    elif target.count and len(parts) == 1 and len(parts[0].processes or spans[0]) < MAX_PROCESSES:
        # Most likely the processes were meant to be many, not the resources.
        wanted = len(parts[0].processes or spans[0])
        whole = Span(0, target.count - 1)
        strings = corrections([(whole, wanted)])
        meaning = f"to put {wanted} process{'es' if wanted > 1 else ''} there, write"
        exact = fits(len(whole), wanted)
        advice = f"; {meaning} {either(strings)}" if exact else f"; on all of it, write {either(strings)}"
    elif target.count:
        advice = f"; its last rank is {target.count - 1}"
    raise PlacementError(f"placement {text!r} names resource {worst} of {target}{advice}")


def _check_ascending(parts: Sequence[Part], spans: Sequence[Span], text: str) -> None:
    for earlier, later in itertools.pairwise(spans):
        if later.first > earlier.last:
            continue
        ordered = sorted(zip(spans, _processes(parts, spans), strict=True), key=lambda pair: pair[0].first)
        if all(before.last < after.first for (before, _), (after, _) in itertools.pairwise(ordered)):
            better = ",".join(str(Part(resources, processes)) for resources, processes in ordered)
            raise PlacementError(
                f"placement {text!r} names resource {later.first} after {earlier.last}: "
                f"resource ranks ascend from part to part; write `{better}`"
            )
        raise PlacementError(
            f"placement {text!r} names a resource twice (part {str(later)!r} after {str(earlier)!r}): resource ranks "
            f"ascend and do not repeat; for two processes on one resource write them in one part, `{later.first}:0-1`. "
            "Resource ranks must be unique"
        )


def _processes(parts: Sequence[Part], spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    start = 0
    for part, resources in zip(parts, spans, strict=True):
        span = part.processes or Span.of(start, len(resources))
        found.append(span)
        start = span.last + 1
    return found


def _check_union(parts: Sequence[Part], spans: Sequence[Span], processes: Sequence[Span], text: str) -> None:
    """Raise PlacementError if one process range seems to be meant for several resource ranges, as in ``0-1,4-5:0-3``.

    The comma makes two parts of that text, ``0-1`` and ``4-5:0-3``, and both have processes 0 and 1.
    """
    run = 0  # index of the first of the parts without processes that precede this one
    for index, part in enumerate(parts):
        if part.processes is None:
            continue
        if index > run and processes[run].first == part.processes.first:
            ranges = spans[run : index + 1]
            meant = ",".join(map(str, ranges))
            rewrites = spread(ranges, len(part.processes), part.processes.first)
            advice = f"give each range its own processes: {either(rewrites)}" if rewrites else _as_lists(ranges, part)
            raise PlacementError(
                f"placement {text!r} gives process {part.processes.first} twice: a comma starts a new part, "
                f"so {meant!r} is not one part with processes {part.processes}; {advice}"
            )
        run = index + 1


def _as_lists(ranges: Sequence[Span], part: Part) -> str:
    ranks = [rank for span in ranges for rank in range(span.first, span.last + 1)]
    block, rest = divmod(len(ranks), len(part.processes or ()))
    if rest or len(ranks) > _LONGEST_LIST:
        return "list the resources of every process: FlexiblePlacementStrategy([[...], ...])"
    lists = [ranks[start : start + block] for start in range(0, len(ranks), block)]
    return f"a process on resources of two ranges needs FlexiblePlacementStrategy({lists})"


def _check_lengths(spans: Sequence[Span], processes: Sequence[Span], text: str) -> None:
    for resources, ranks in zip(spans, processes, strict=True):
        have, want = len(resources), len(ranks)
        if fits(have, want):
            continue
        strings = corrections([(span, len(run)) for span, run in zip(spans, processes, strict=True)])
        raise PlacementError(
            f"part '{resources}:{ranks}' of placement {text!r} puts {want} processes on {have} resources; "
            f"one of the two numbers must divide the other; write {either(strings)}"
        )


def _check_contiguous(spans: Sequence[Span], processes: Sequence[Span], text: str) -> None:
    total = sum(map(len, processes))
    if total > MAX_PROCESSES:
        raise PlacementError(f"placement {text!r} has {total} processes; at most {MAX_PROCESSES} are possible")
    expected = 0
    for span in sorted(processes, key=lambda span: span.first):
        if span.first == expected:
            expected = span.last + 1
            continue
        better = lay_out([(resources, len(run)) for resources, run in zip(spans, processes, strict=True)])
        fault = f"process {span.first} twice" if span.first < expected else f"no process {expected}"
        raise PlacementError(
            f"placement {text!r} has {fault}: process ranks are contiguous from 0, each once; write `{better}`. "
            "Process ranks must be in ascending order and continuous"
        )
