"""A lane: one direction between two workers; one process group of two, one thread, strict order.

House rules: jobs run on the lane's thread alone, in the order posted; the group is made there too, so
neither side waits for the other before it goes on. Whatever ends a lane ends every job of it, once.
A thread that its back-end does not let go (gloo towards a machine that went silent) is abandoned: it
holds nothing but the lane, and `abandoned()` counts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.tensors import groups
from rlinf_actors.tensors.groups import Wire

log = logging.getLogger(__name__)

_LATE = "it did not end within the time that RLINF_TIMEOUT gives"

_ended: weakref.WeakSet[Lane] = weakref.WeakSet()


class Job(Protocol):
    """What a lane carries."""

    def run(self, wire: Wire) -> None:
        """Send or receive on the lane's thread; done when it returns."""

    def fail(self, error: Exception) -> None:
        """The lane ended before, or while, it ran. Any thread."""


class Lane:
    """One end of a lane.

    Args:
        name: for the thread and for errors.
        make: makes the wire; runs on the lane's thread.
        broke: called once (lane's thread) when the group cannot be made or fails; then `end` is to follow.
        release: called once when the lane has ended: frees what was kept for it.
        limit: starts a clock for one job, which calls its argument when the time is up, and returns what stops
            it; None where the back-end has a clock of its own.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Wire],
        broke: Callable[[Lane, Exception], None],
        release: Callable[[], None] = lambda: None,
        limit: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._broke = broke
        self._release = release
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: list[Job] = []
        self._wire: Wire | None = None
        self._error: Exception | None = None
        self._closed: Callable[[], Exception] | None = None
        self._thread = threading.Thread(target=self._run, name=f"rlinf-actors-lane-{name}", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        """What broke it, None as long as it works."""
        return self._error

    @property
    def running(self) -> bool:
        """Whether its thread is there."""
        return self._thread.is_alive()

    def post(self, job: Job) -> None:
        """Run *job* after those posted before. Any thread."""
        with self._lock:
            closed = self._closed
            if closed is None:
                self._open.append(job)
                self._jobs.put(job)
        if closed is not None:
            job.fail(closed())

    def end(self, error: Callable[[], Exception]) -> None:
        """Abort what runs and fail every job, now and later. Any thread but its own; twice is fine.

        Args:
            error: makes the error of each.
        """
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            wire, jobs = self._wire, self._open
            self._open = []
            self._jobs.put(None)
        for job in jobs:
            job.fail(error())
        _ended.add(self)
        self._release()
        if wire is not None:
            # not here: NCCL's waits for the kernels to end, and this may be the loop's thread
            threading.Thread(target=groups.abort, args=(wire.group,), name="rlinf-actors-abort", daemon=True).start()

    def _run(self) -> None:
        try:
            make, self._make = self._make, _made  # it holds what it makes the wire of
            wire = make()
            del make
            with self._lock:
                self._wire = wire
                closed = self._closed is not None
            while not closed and self._next(wire):
                with self._lock:
                    closed = self._closed is not None
        except Exception as error:
            log.debug("the lane from %s broke", self.name, exc_info=error)
            # without its traceback, whose frames hold the group and its sockets
            self._breaks(CallTimeoutError(_LATE) if "imed out" in str(error) else error.with_traceback(None))
        finally:
            with self._lock:
                self._wire = None
            _ended.discard(self)

    def _next(self, wire: Wire) -> bool:
        """Run one job; False if there are no more. Between two, nothing holds the last one's tensors."""
        job = self._jobs.get()
        if job is None:
            return False
        stop = self._limit(self._late) if self._limit is not None else None
        try:
            job.run(wire)
        finally:
            if stop is not None:
                stop()
        with self._lock:
            if job in self._open:
                self._open.remove(job)
        return True

    def _late(self) -> None:
        self._breaks(CallTimeoutError(_LATE))

    def _breaks(self, error: Exception) -> None:
        with self._lock:
            first = self._error is None and self._closed is None
            if first:
                self._error = error
        if first:
            self._broke(self, error)


def _made() -> Wire:
    raise AssertionError("a lane makes its wire once")


def abandoned() -> int:
    """How many lanes have ended and still have a thread: their back-end does not let it go."""
    return sum(lane.running for lane in list(_ended))
