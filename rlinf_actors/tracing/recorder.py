"""The recorder of this process: writes events into the ring (tracing.ring), from any thread, without a lock.

`active` is the recorder, or None while nothing is traced: code that traces asks `recorder.active` first. A number is
taken from an itertools.count, and a record is written by one call of C code, so threads never wait for each other.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from rlinf_actors.tracing import ring
from rlinf_actors.tracing.ring import BEGIN, END, IN, OUT, Layout

active: Recorder | None = None
"""The recorder of this process, None while nothing is traced."""

_number = itertools.count(1).__next__
"""Numbers of events. All recorders of a process take theirs from it, so that the end of a span that an earlier one has
begun is not taken for the end of another span.
"""


def _begin_numbers(capacity: int) -> int:
    """Go on with the numbers at the next multiple of *capacity*, and return it: a ring is filled from its beginning."""
    global _number
    first = (_number() // capacity + 1) * capacity
    _number = itertools.count(first + 1).__next__
    return first


_LOW = 0xFFFFFFFF
_MORE_THREADS = "(more threads)"
"""Name of all threads after the first thousand of a process."""


class Begin(Protocol):
    """Type of `Recorder.begin`: record the start of a span on this thread, and return the span's number for `end`."""

    def __call__(self, name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> int:
        """Return the number of the new span."""
        ...


class Recorder:
    """Writes the trace events of this process into a ring. Any thread; no method blocks.

    Args:
        memory: the ring's memory, of the size of *layout* and filled with zeros.
        layout: the layout of the ring.
        process: description of this process, such as its name.
        path: path of the file that the memory is of, "" without one.

    Attributes:
        memory: the ring's memory.
        path: path of its file.
        capacity: number of events that the ring has room for.
        of_job: False if `rlinf-actors trace start` has begun it. Then agentds tell the job's later workers to record.
        waits: True if a span shows each wait of a thread for a result, as in a driver.
    """

    def __init__(self, memory: mmap.mmap, layout: Layout, process: Mapping[str, Any], path: str = "") -> None:
        self.memory = memory
        self.path = path
        self.of_job, self.waits = True, False
        self._view = memoryview(memory)
        self._layout = layout
        self.capacity = layout.capacity
        self._next_name = itertools.count(1).__next__
        self._next_args = itertools.count(1).__next__
        self._next_thread = itertools.count(1).__next__
        self._next_flow = itertools.count(1).__next__
        self._unnamed = itertools.count(1).__next__
        self._names: dict[Any, int] = {}
        self._threads = threading.local()
        self._flows = zlib.crc32(os.urandom(8)) << 32
        head = ring.header(layout, {**process, ring.FIRST: _begin_numbers(layout.capacity)})
        self._view[: len(head)] = head
        self._make_writers()

    def _make_writers(self) -> None:
        """Make `begin`, `end` and `_write`. As closures they take a third less time than methods with attributes."""
        view, pack, size = self._view, ring.EVENT.pack_into, ring.EVENT.size
        events_at, mask, number = self._layout.events_at, self._layout.capacity - 1, _number
        now, threads, new_thread = time.monotonic_ns, self._threads, self._thread
        names, new_name, new_args = self._names, self._name, self._args

        def begin(name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> int:
            try:
                label, thread = names[name, cat], threads.number
            except (KeyError, AttributeError):
                label, thread = new_name((name, cat), f"{name}\0{cat}"), new_thread()
            third = 0 if args is None else new_args(args)
            n = number()
            pack(view, events_at + (n & mask) * size, n, now(), 0, thread, label, third, BEGIN, n)
            return n

        def write(kind: int, ref: int, name: int, third: int) -> int:
            try:
                thread = threads.number
            except AttributeError:
                thread = new_thread()
            n = number()
            pack(view, events_at + (n & mask) * size, n, now(), ref, thread, name, third, kind, n)
            return n

        self.begin: Begin = begin
        self._write = write

    def end(self, span: int) -> None:
        """Record the end of the span with this number."""
        self._write(END, span, 0, 0)

    def end_last(self, name: str, cat: str = "default") -> None:
        """Record the end of the last span of that name and category on this thread."""
        label = self._names.get((name, cat))
        self._write(END, 0, self._name((name, cat), f"{name}\0{cat}") if label is None else label, 0)

    def flow_out(self, span: int, flow: int) -> None:
        """Record that an arrow begins in a span. `flow_in` with the same number, in any process, is its end."""
        self._write(OUT, flow, 0, span & _LOW)

    def flow_in(self, span: int, flow: int) -> None:
        """Record that an arrow ends in a span."""
        self._write(IN, flow, 0, span & _LOW)

    def new_flow(self) -> int:
        """Return a number for an arrow that no other arrow of the job has."""
        return self._flows | self._next_flow() & _LOW

    def _name(self, key: Any, text: str) -> int:
        """Return the number of a name's slot; give it one if it has none. Return `ring.OTHER` if no slot is left."""
        if (known := self._names.get(key)) is not None:
            return known
        if len(self._names) >= self._layout.names - 1:
            return self._no_slot()
        number = self._next_name()
        if number >= self._layout.names:
            return self._no_slot()
        slot, at = ring.name_slot(text), self._layout.names_at + number * ring.NAME_BYTES
        self._view[at + 1 : at + len(slot)] = slot[1:]
        self._view[at] = slot[0]
        return self._names.setdefault(key, number)

    def _no_slot(self) -> int:
        self._view[ring.UNNAMED_AT : ring.UNNAMED_AT + 4] = (self._unnamed() & _LOW).to_bytes(4, "little")
        return ring.OTHER

    def _thread(self) -> int:
        if (known := getattr(self._threads, "number", None)) is not None:
            return int(known)
        thread = threading.current_thread()
        key, title = (thread.ident, thread.name), thread.name
        if key not in self._names and self._next_thread() > self._layout.names // 2:
            key, title = (0, _MORE_THREADS), _MORE_THREADS  # short-lived threads must not take the slots of all names
        number = self._threads.number = self._name(key, f"{ring.THREAD}{title}")
        return number

    def _args(self, args: Mapping[str, Any]) -> int:
        try:
            text = json.dumps(args, default=str).encode()
        except (TypeError, ValueError):  # keys that are no text, or a circle
            text = json.dumps(repr(args)).encode()
        number = self._next_args()
        text = text[: ring.ARGS_BYTES - ring.ARGS_HEAD.size]
        at = self._layout.args_at + (number - 1) % self._layout.args * ring.ARGS_BYTES
        data = ring.ARGS_HEAD.pack(number, len(text)) + text
        self._view[at : at + len(data)] = data
        return number & _LOW


def start(events: int, process: Mapping[str, Any], path: str = "") -> Recorder:
    """Trace this process from now on, and return its recorder. If the process is traced already, change nothing.

    Args:
        events: number of events that the ring must have room for.
        process: description of this process, such as its name.
        path: path of a new file for the ring; "" for memory of this process alone.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """
    global active
    if active is not None:
        return active
    layout = Layout(ring.capacity_of(events))
    if path:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.size)  # a write to a page without room would be a SIGBUS
            memory = mmap.mmap(fd, layout.size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
    else:
        memory = mmap.mmap(-1, layout.size)
    active = Recorder(memory, layout, {"pid": os.getpid(), **process}, path)
    return active


def for_workers() -> int:
    """Return how many events the workers that this process launches are to keep, 0 if they are to record none."""
    return active.capacity if active is not None and active.of_job else 0


def stop() -> None:
    """Trace this process no longer. Its ring stays as it is. Without effect if nothing is traced."""
    global active
    active = None


os.register_at_fork(after_in_child=stop)  # the memory is the parent's
