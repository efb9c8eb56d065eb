"""Lanes: a lane carries tensors in one direction between two workers, by a torch process group of the two.

Each end of a lane has one thread (`Lane`), which makes the process group and runs the transfers in the order posted, so
neither worker waits for the other. If a lane fails, its worker reports that to the other worker (`LaneEnded`). A living
worker answers the report; the head reports a dead one. Only then do the lane's transfers fail, with the error that fits
(`Lanes`), and each transfer fails once.

A thread may hang in its back-end (gloo, if the other machine went silent). Such a thread is abandoned: it refers to
nothing but the lane.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from rlinf_actors import exhaustion
from rlinf_actors.errors import CallTimeoutError, RlinfActorsError
from rlinf_actors.messaging import process_groups
from rlinf_actors.messaging.lane_store import LaneStore
from rlinf_actors.messaging.process_groups import Wire
from rlinf_actors.model.accelerator_table import group_facts

log = logging.getLogger(__name__)

_LATE = "it did not end within the time that RLINF_TIMEOUT gives"


class LaneJob(Protocol):
    """A transfer that a lane runs: the tensors of one message, sent at one end and received at the other."""

    def run(self, wire: Wire) -> None:
        """Send or receive the tensors by *wire*. The transfer is done when this returns. Runs on the lane's thread."""

    def fail(self, error: Exception) -> None:
        """Fail the transfer, since the lane has ended before or during `run`. Any thread."""


class Lane:
    """One worker's end of a lane.

    Args:
        name: names the thread, and the lane in errors.
        make: makes this worker's end of the process group (Wire); runs on the lane's thread.
        broke: called once, on the lane's thread, when the process group cannot be made or fails. The caller must then
            call `end`.
        release: called once when the lane has ended, to free what was kept for it.
        clock: starts a timer for one transfer. It takes a function to call when the time is up, and returns a function
            that stops the timer. None if the back-end has time-outs of its own.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Wire],
        broke: Callable[[Lane, Exception], None],
        release: Callable[[], None] = lambda: None,
        clock: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self.name = name
        self.error: Exception | None = None
        self._broke = broke
        self._release = release
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[LaneJob | None] = queue.SimpleQueue()
        self._open: list[LaneJob] = []
        self._wire: Wire | None = None
        self._closed: Callable[[], Exception] | None = None
        self._ended = threading.Event()
        self._make: Callable[[], Wire] | None = make
        self._thread = exhaustion.OwnThread(target=self._run, name=f"rlinf-actors-lane-{name}", daemon=True)
        self._thread.start()

    def post(self, job: LaneJob) -> None:
        """Run *job* after the jobs posted before. If the lane has ended, fail *job*. Any thread."""
        with self._lock:
            closed = self._closed
            if closed is None:
                self._open.append(job)
                self._jobs.put(job)
        if closed is not None:
            job.fail(closed())

    def end(self, error: Callable[[], Exception]) -> None:
        """End the lane: abort the running job, and fail every job, current and future.

        *error* makes a new exception for each job. May be called again, without effect; not on the lane's thread.
        """
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            wire, jobs = self._wire, self._open
            self._open = []
            self._jobs.put(None)
        self._ended.set()
        for job in jobs:
            job.fail(error())
        self._release()
        if wire is not None:
            # on a thread: NCCL's abort waits for its kernels, and this may be the loop's thread
            exhaustion.OwnThread(
                target=process_groups.abort, args=(wire.group,), name="rlinf-actors-abort", daemon=True
            ).start()

    def ends_within(self, seconds: float) -> bool:
        """Wait until `end` was called, for at most *seconds*. Return False if it was not."""
        return self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            make, self._make = self._make, None  # it holds the store's client
            assert make is not None
            wire = make()
            del make
            with self._lock:
                self._wire = wire
                closed = self._closed is not None
            while not closed and self._run_next(wire):
                with self._lock:
                    closed = self._closed is not None
        except Exception as error:
            log.debug("the lane from %s broke", self.name, exc_info=error)
            # without its traceback, whose frames hold the group and its sockets
            self._fail(CallTimeoutError(_LATE) if "imed out" in str(error) else error.with_traceback(None))
        finally:
            with self._lock:
                self._wire = None

    def _run_next(self, wire: Wire) -> bool:
        """Wait for the next job and run it. Return False if the lane has ended instead.

        This is a separate function so that an idle lane keeps no tensors alive.
        """
        job = self._jobs.get()
        if job is None:
            return False
        stop = self._clock(lambda: self._fail(CallTimeoutError(_LATE))) if self._clock is not None else None
        try:
            job.run(wire)
        finally:
            if stop is not None:
                stop()
        with self._lock:
            if job in self._open:
                self._open.remove(job)
        return True

    def _fail(self, error: Exception) -> None:
        with self._lock:
            first = self.error is None and self._closed is None
            if first:
                self.error = error
        if first:
            self._broke(self, error)


class OpenLane(msgspec.Struct, eq=False):
    """One end of a lane with what is needed to end it: the lane's id, and the function that reports its end.

    Attributes:
        id: names the lane in LaneEnded frames from the other worker.
        report: sends a LaneEnded frame with a text to the other worker.
        header: fields of frames.TensorTransfer by which the receiver joins the lane; set only at the sender's end.
        reported: True once `report` was called.
        store: this end of the lane's store, if its keys travel by the link.
    """

    id: Hashable
    backend: str
    lane: Lane
    report: Callable[[str], object]
    header: dict[str, Any] = msgspec.field(default_factory=dict)
    reported: bool = False
    store: LaneStore | None = None


class Lanes:
    """Keeps open lanes: of a sender, those to one other worker; of a receiver, those from all other workers.

    Each lane has a key: at the sender its device and options; at the receiver its link and its number on that link.
    Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, OpenLane] = {}
        self._closed: Callable[[], Exception] | None = None

    def find(self, key: Hashable) -> OpenLane | None:
        with self._lock:
            return self._lanes.get(key)

    def get(self, key: Hashable, make: Callable[[], OpenLane]) -> OpenLane:
        """Return the lane with this key. If there is none, call *make* to make the lane.

        After `end_all`, raise the exception that its *error* makes.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = make()
            return found

    def broke(self, lane: Lane, error: Exception) -> None:
        """Report the failure of *lane* to the other worker, whose answer then ends the lane. Called by the lane.

        If the other worker is dead, the head reports that instead. If *error* is a time-out, end the lane at once.
        """
        with self._lock:
            found = next((one for one in self._lanes.values() if one.lane is lane), None)
        if found is not None:
            self._report(found, str(error))
            if isinstance(error, CallTimeoutError):
                self.end(found, lambda: CallTimeoutError(f"the lane from {lane.name} ({found.backend}): {error}"))

    def key_arrived(self, id: Hashable, key: str, value: bytes) -> None:
        """Give a key from the other worker to the store of the lane *id*. A lane that has ended needs no keys."""
        with self._lock:
            found = next((one for one in self._lanes.values() if one.id == id), None)
        if found is not None and found.store is not None:
            found.store.arrived(key, value)

    def other_end_closed(self, id: Hashable, text: str) -> bool:
        """Handle the report of the other worker that the lane *id* has ended: answer the report, and end the lane here.

        *text* is the reason. Return False if there is no such lane.
        """
        with self._lock:
            found = next((one for one in self._lanes.values() if one.id == id), None)
        if found is None:
            return False
        self._report(found, text)
        self.end(found, lambda: lane_error(found.lane.name, found.backend, str(found.lane.error or text)))
        return True

    def end(self, lane: OpenLane, error: Callable[[], Exception]) -> None:
        """Remove the lane and fail its transfers. *error* makes the exception of each transfer."""
        with self._lock:
            self._lanes = {key: one for key, one in self._lanes.items() if one is not lane}
        lane.lane.end(error)

    def end_all(self, error: Callable[[], Exception]) -> None:
        """End every lane and refuse new ones, because the other worker is gone.

        *error* makes the exception of each transfer.
        """
        with self._lock:
            self._closed = error
            lanes, self._lanes = list(self._lanes.values()), {}
        for one in lanes:
            one.lane.end(error)

    def _report(self, lane: OpenLane, text: str) -> None:
        with self._lock:
            first, lane.reported = not lane.reported, True
        if first:
            lane.report(text)


def lane_error(name: str, backend: str, reason: str) -> RlinfActorsError:
    """Return the error of a transfer whose lane failed although both workers are alive, by its name and *reason*."""
    lines = [line for line in reason.splitlines() if line.strip()]
    why = lines[0].rstrip(".") if lines else "the other side closed it"
    setting = group_facts(backend).log_setting
    return RlinfActorsError(
        f"the lane from {name} ({backend}) failed: {why}. If it says no more, look at "
        f"{backend}'s own log{f' ({setting})' if setting else ''}, at RLINF_COMM_NET_DEVICES, or send by another "
        f"path: RLINF_ACTORS_PATHS=accelerator=staged"
    )
