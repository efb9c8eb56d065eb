"""The memory of one process's trace: where each event, name and argument is, for its writer and its readers. Pure.

The memory belongs to the traced process, which alone writes it. In a worker it is a file that agentd reads, also after
the worker was killed, so there is no order of writing that a reader could rely on: each event has its own number, and
an event whose two copies of the number differ was being written and is left out.

The parts, in this order:

* the header: sizes, the number of names that found no room, and the process in JSON;
* names: slots of NAME_BYTES; each name of an event, or of a thread, has one for the life of the process;
* arguments: a ring of slots of ARGS_BYTES with JSON;
* events: a ring of EVENT records. The event with number n is at place n modulo the capacity.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MAGIC = b"RLTRACE1"
HEADER = struct.Struct("<8sIIIII")
"""magic, event capacity, slots for names, slots for arguments, names without a slot, bytes of JSON."""
HEADER_BYTES = 4096
UNNAMED_AT = 20
"""Position of the number of names that found no slot."""

NAME_BYTES = 128
NAMES = 2048
ARGS_BYTES = 256
ARGS = 2048
ARGS_HEAD = struct.Struct("<QH")
"""Number of the arguments, and bytes of JSON."""

EVENT = struct.Struct("<QQQIIIIQ")
"""number, nanoseconds of CLOCK_MONOTONIC, reference, thread, name, arguments, kind, number again.

The reference of END is the number of its BEGIN, 0 for the last BEGIN of that name on the thread; that of OUT and IN is
the number of the flow, and their third number ("arguments") has the low bits of the BEGIN of their span.
"""
BEGIN, END, OUT, IN = 1, 2, 3, 4

FIRST = "first"
"""Key of the process's description: the number before that of the ring's first event."""
OTHER = 0
"""Number of the name that stands for all names without a slot."""
OTHER_TEXT = "(too many names)\0"
THREAD = "\1"
"""First character of a slot that has the name of a thread."""

DEFAULT_EVENTS = 1 << 16
MAX_EVENTS = 1 << 22


def capacity_of(events: int) -> int:
    """Return the smallest possible capacity of a ring for at least *events* events: a power of two."""
    return max(1024, 1 << (min(events, MAX_EVENTS) - 1).bit_length())


class Layout(msgspec.Struct, frozen=True):
    """Positions of the parts of a ring's memory, by the ring's capacity in events."""

    capacity: int
    names: int = NAMES
    args: int = ARGS

    @property
    def names_at(self) -> int:
        """Position of the names."""
        return HEADER_BYTES

    @property
    def args_at(self) -> int:
        """Position of the arguments."""
        return self.names_at + self.names * NAME_BYTES

    @property
    def events_at(self) -> int:
        """Position of the events."""
        return self.args_at + self.args * ARGS_BYTES

    @property
    def size(self) -> int:
        """Bytes of the whole memory."""
        return self.events_at + self.capacity * EVENT.size


def header(layout: Layout, process: Mapping[str, Any]) -> bytes:
    """Return the header of a ring. *process* describes its process; keys beyond the space for them are left out."""
    text = json.dumps(dict(process)).encode()
    if len(text) > HEADER_BYTES - HEADER.size:
        text = b"{}"
    return HEADER.pack(MAGIC, layout.capacity, layout.names, layout.args, 0, len(text)) + text


def name_slot(text: str) -> bytes:
    """Return the content of a slot for a name. A long text is cut."""
    data = text.encode("utf-8", "replace")
    if len(data) >= NAME_BYTES:
        data = data[: NAME_BYTES - 4].decode("utf-8", "ignore").encode() + "…".encode()
    return bytes([len(data)]) + data


class TraceSpan(msgspec.Struct):
    """One span of a trace: from its BEGIN to its END. Times are nanoseconds of CLOCK_MONOTONIC of its machine."""

    number: int
    name: str
    cat: str
    thread: int
    start: int
    end: int = -1  # -1 while it has not ended
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class Point(msgspec.Struct):
    """An end of an arrow (*kind* ``out`` or ``in``). It has no length."""

    kind: str
    at: int
    flow: int
    span: int  # number of the span to which it belongs, 0 for none


class ProcessTrace(msgspec.Struct):
    """What the ring of one process had.

    Attributes:
        process: the description that the process gave: name, node, pid, ...
        threads: names of the threads, by number.
        spans: its spans, by start.
        points: ends of arrows, by time.
        last: time of the last event, 0 without events.
        fallen_out: number of events that later events have overwritten.
        cut: number of spans whose start was overwritten.
        args_lost: number of events whose arguments were overwritten.
        unnamed: number of events or threads whose names found no room.
    """

    process: dict[str, Any]
    threads: dict[int, str] = msgspec.field(default_factory=dict)
    spans: list[TraceSpan] = msgspec.field(default_factory=list)
    points: list[Point] = msgspec.field(default_factory=list)
    last: int = 0
    fallen_out: int = 0
    cut: int = 0
    args_lost: int = 0
    unnamed: int = 0


def layout_of(data: bytes | memoryview) -> Layout:
    """Return the layout that the header at the beginning of *data* describes.

    Raises:
        ValueError: this is no ring, or one of another version.
    """
    if len(data) < HEADER_BYTES:
        raise ValueError("is too short for a trace")
    magic, capacity, names, args, _, text = HEADER.unpack_from(data)
    fits = 0 < capacity <= MAX_EVENTS and not capacity & (capacity - 1) and names <= NAMES and args <= ARGS
    if magic != MAGIC or not fits or text > HEADER_BYTES - HEADER.size:
        raise ValueError("is not a trace of this version")
    return Layout(capacity, names, args)


def read(data: bytes | memoryview) -> ProcessTrace:
    """Return the events in the memory of a ring, which its process may be writing. The end of *data* may be missing.

    Raises:
        ValueError: this is no ring, or one of another version.
    """
    layout = layout_of(data)
    unnamed, text = HEADER.unpack_from(data)[4:6]
    described = json.loads(bytes(data[HEADER.size : HEADER.size + text]) or b"{}")
    found = ProcessTrace(described if isinstance(described, dict) else {}, unnamed=unnamed)
    names = _names(data, layout)
    events = sorted(_events(data, layout))
    if not events:
        return found
    first = found.process.pop(FIRST, 0)
    found.fallen_out = max(0, events[-1][0] - (first if isinstance(first, int) else 0) - layout.capacity)
    found.last = max(event[1] for event in events)
    _sort(events, names, lambda number: _args(data, layout, number), found)
    found.threads = {number: text[1:] for number, text in names.items() if text.startswith(THREAD)}
    return found


def _names(data: bytes | memoryview, layout: Layout) -> dict[int, str]:
    found = {OTHER: OTHER_TEXT}
    for number in range(1, layout.names):
        at = layout.names_at + number * NAME_BYTES
        length = data[at] if at < len(data) else 0
        if length:
            found[number] = bytes(data[at + 1 : at + 1 + min(length, NAME_BYTES - 1)]).decode("utf-8", "replace")
    return found


_Event = tuple[int, int, int, int, int, int, int]  # number, at, ref, thread, name, args, kind


def _events(data: bytes | memoryview, layout: Layout) -> list[_Event]:
    whole = (len(data) - layout.events_at) // EVENT.size
    found: list[_Event] = []
    for place in range(max(0, min(layout.capacity, whole))):
        number, at, ref, thread, name, args, kind, again = EVENT.unpack_from(
            data, layout.events_at + place * EVENT.size
        )
        if number and number == again and number & (layout.capacity - 1) == place:
            found.append((number, at, ref, thread, name, args, kind))
    return found


def _args(data: bytes | memoryview, layout: Layout, number: int) -> dict[str, Any] | None:
    """Return the arguments with this number, None if they were overwritten."""
    at = layout.args_at + (number - 1) % layout.args * ARGS_BYTES
    stored, length = ARGS_HEAD.unpack_from(data, at)
    if stored & 0xFFFFFFFF != number or length > ARGS_BYTES - ARGS_HEAD.size:
        return None
    text = bytes(data[at + ARGS_HEAD.size : at + ARGS_HEAD.size + length])
    try:
        value = json.loads(text)
    except ValueError:  # cut, or overwritten while it was read
        return {"args": text.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"args": value}


def _sort(
    events: list[_Event],
    names: Mapping[int, str],
    args_of: Callable[[int], dict[str, Any] | None],
    found: ProcessTrace,
) -> None:
    """Pair begins with ends, and fill *found* with the spans and points."""
    spans: dict[int, TraceSpan] = {}
    low: dict[int, int] = {}  # low bits of the spans' numbers
    opened: dict[tuple[int, int], list[TraceSpan]] = {}  # by thread and name: spans that an END without a number ends
    for number, at, ref, thread, name, args, kind in events:
        title, _, cat = names.get(name, OTHER_TEXT).partition("\0")
        if kind == BEGIN:
            values = args_of(args) if args else {}
            found.args_lost += values is None
            spans[number] = span = TraceSpan(number, title, cat, thread, at, args=values or {})
            low[number & 0xFFFFFFFF] = number
            opened.setdefault((thread, name), []).append(span)
        elif kind == END:
            open_ones = opened.get((thread, name), [])
            ended = spans.get(ref) if ref else next((span for span in reversed(open_ones) if span.end < 0), None)
            if ended is None:
                found.cut += 1
                continue
            ended.end = max(at, ended.start)
            if open_ones and open_ones[-1] is ended:
                open_ones.pop()
        elif kind in (OUT, IN):
            found.points.append(Point("out" if kind == OUT else "in", at, ref, low.get(args, 0)))
    found.spans = list(spans.values())
