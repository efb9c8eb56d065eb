"""A lane: one direction between two workers; one process group of two, one thread, strict order.

House rules: jobs run on the lane's thread alone, in the order posted; the group is made there too, so
neither side waits for the other before it goes on. Whatever ends a lane ends every job of it, once.
A thread that its back-end does not let go (gloo towards a machine that went silent) is abandoned: it
holds nothing but the lane, and `abandoned()` counts it.

The lanes from this worker to one other: made when first needed, by back-end, device and options.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import msgspec

from rlinf_actors.errors import CallTimeoutError, RlinfActorsError
from rlinf_actors.messaging import process_groups
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.messaging.process_groups import Wire
from rlinf_actors.messaging.tensor_transfer import Station
from rlinf_actors.model.accelerator_table import group_facts
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames

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
            threading.Thread(
                target=process_groups.abort, args=(wire.group,), name="rlinf-actors-abort", daemon=True
            ).start()

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


@dataclass
class OutLane:
    """One of them.

    Attributes:
        number: its, in this gate.
        backend, endpoint, options: what the receiver joins with.
        lane: carries.
        told: whether the receiver was told of its end.
    """

    number: int
    backend: str
    endpoint: str
    options: CollectiveGroupOptions
    lane: Lane
    told: bool = False

    def label(self, cargo: frames.Cargo) -> frames.Cargo:
        """The cargo, going by this lane."""
        return msgspec.structs.replace(
            cargo,
            lane=self.number,
            backend=self.backend,
            store=self.endpoint,
            options=list(astuple(self.options)),
        )


class OutLanes:
    """Any thread.

    Args:
        station: this worker.
        peer: the receiver.
        gate: number that the receiver's answers come to.
    """

    def __init__(self, station: Station, peer: Peer, gate: Callable[[], int]) -> None:
        self._station = station
        self._peer = peer
        self._gate = gate
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._lanes: dict[tuple[Any, ...], OutLane] = {}
        self._closed: Callable[[], Exception] | None = None

    def lane(self, backend: str, device: Any, options: CollectiveGroupOptions, same_node: bool) -> OutLane:
        """The lane for such tensors; it is made if there is none.

        Args:
            backend: of torch.distributed.
            device: that the tensors are on.
            options: how the back-end is to run.
            same_node: whether the receiver is on this node.

        Raises:
            OSError: the address for its store is not this machine's.
            PeerDiedError: the receiver is gone.
        """
        key = (backend, device, *astuple(options))
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = self._made(backend, options, same_node)
            return found

    def _made(self, backend: str, options: CollectiveGroupOptions, same_node: bool) -> OutLane:
        station = self._station
        ip, timeout_s = station.ip(same_node), station.timeout_s(backend)
        store = process_groups.Store(ip, timeout_s)
        client = process_groups.join(store.endpoint, timeout_s)  # now: on the lane's thread it might be closed by then

        def make() -> process_groups.Wire:
            return process_groups.wire(
                backend, client, process_groups.SENDER, timeout_s=timeout_s, ip=ip, options=options, name=station.job
            )

        name = f"{station.name} to {self._peer.name}"
        lane = Lane(name, make, self._broke, store.close, station.limit(backend))
        return OutLane(next(self._numbers), backend, store.endpoint, options, lane)

    def _broke(self, lane: Lane, error: Exception) -> None:
        """The receiver is told, and answers that it lives; or the head tells that it does not."""
        with self._lock:
            found = next((one for one in self._lanes.values() if one.lane is lane), None)
        if found is not None:
            self._tell(found, str(error))
            if isinstance(error, CallTimeoutError):
                self._drop(found, lambda: CallTimeoutError(f"the lane from {lane.name} ({found.backend}): {error}"))

    def peer_ended(self, frame: frames.LaneEnded) -> None:
        """The receiver has closed its end, so it lives. Loop thread."""
        with self._lock:
            found = next((one for one in self._lanes.values() if one.number == frame.lane), None)
        if found is None:
            return
        self._tell(found, frame.text)
        self._drop(found, lambda: broken(found.lane, found.backend, frame.text))

    def end(self, error: Callable[[], Exception]) -> None:
        """The receiver is gone."""
        with self._lock:
            self._closed = error
            lanes, self._lanes = list(self._lanes.values()), {}
        for one in lanes:
            one.lane.end(error)

    def _tell(self, lane: OutLane, text: str) -> None:
        with self._lock:
            first, lane.told = not lane.told, True
        if first:
            self._peer.send(frames.LaneEnded(self._gate(), lane.number, self._station.worker_id, text))

    def _drop(self, lane: OutLane, error: Callable[[], Exception]) -> None:
        with self._lock:
            self._lanes = {key: one for key, one in self._lanes.items() if one is not lane}
        lane.lane.end(error)


def broken(lane: Lane, backend: str, theirs: str) -> RlinfActorsError:
    """The error of a transfer whose lane failed between two workers that live."""
    ours = str(lane.error) if lane.error is not None else theirs
    setting = group_facts(backend).log_setting
    return RlinfActorsError(
        f"the lane from {lane.name} ({backend}) failed: {_first_line(ours)}. If it says no more, look at "
        f"{backend}'s own log{f' ({setting})' if setting else ''}, at RLINF_COMM_NET_DEVICES, or send by another path: "
        f"RLINF_ACTORS_PATHS=accelerator=staged"
    )


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else "the other side closed it"
