"""Tracer as programs written for RLinf use it: the public Tracer, and RLinf's writer of lines.

RLinf's Tracer sends each event to one process, by a proxy that `_get` returns. Code that replaces `_get` gets the
events.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from rlinf_actors.tracing import recorder
from rlinf_actors.tracing.recorder import Recorder
from rlinf_actors.tracing.tracer import Tracer


class LineTracer(Tracer):
    """The public Tracer; an instance writes events to a file, one JSON object in each line.

    Args:
        output_file: path of the file. Its directory is made, and lines are appended.
    """

    MANAGER_NAME = "Tracer"
    _unavailable: ClassVar[bool] = False
    _labeled: ClassVar[bool] = False

    def __init__(self, output_file: str) -> None:
        self._path = os.path.abspath(output_file)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._lock = threading.Lock()
        self._file = open(self._path, "a")  # noqa: SIM115 - closed by finalize

    def record(self, event: Mapping[str, Any]) -> None:
        """Append an event to the file."""
        with self._lock:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    def finalize(self) -> str:
        """Close the file, and return its path."""
        with self._lock:
            self._file.close()
        return self._path

    @classmethod
    def _get(cls) -> Any:
        """Return what takes the events of this process; None while nothing is traced."""
        return None if cls._unavailable else recorder.active

    @staticmethod
    def _pid() -> str:
        from rlinf_actors.worker.worker import Worker

        worker = Worker.current_worker
        return worker.get_name() if worker is not None else "driver"

    @classmethod
    def _event(cls, name: str, cat: str, phase: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
        now = time.time_ns() // 1000
        event = {"name": name, "cat": cat, "ph": phase, "ts": now, "pid": cls._pid(), "tid": "main"}
        return event if args is None else {**event, "args": args}

    @classmethod
    def trace_begin(cls, name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> None:
        """Record the start of a span; see the public Tracer."""
        sink = cls._get()
        if isinstance(sink, Recorder):
            sink.begin(name, cat, args)
        elif sink is not None:
            if not cls._labeled:
                cls._labeled = True
                sink.record(cls._event("process_name", "__metadata", "M", {"name": cls._pid()}))
            sink.record(cls._event(name, cat, "B", args))

    @classmethod
    def trace_end(cls, name: str, cat: str = "default") -> None:
        """Record the end of a span; see the public Tracer."""
        sink = cls._get()
        if isinstance(sink, Recorder):
            sink.end_last(name, cat)
        elif sink is not None:
            sink.record(cls._event(name, cat, "E"))

    @classmethod
    @contextmanager
    def trace_span(cls, name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Record the ``with`` block as a span; see the public Tracer."""
        sink = cls._get()
        if sink is None:
            yield
            return
        span = sink.begin(name, cat, args) if isinstance(sink, Recorder) else cls.trace_begin(name, cat, args)
        try:
            yield
        finally:
            if span is not None:
                sink.end(span)
            else:
                cls.trace_end(name, cat)
