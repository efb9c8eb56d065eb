"""One process group for the tensors of a broadcast, if each member has an accelerator of its own.

The message travels down the tree as usual (`messaging.broadcast`). The source asks every member once for its
accelerators (Ask, Facts), without waiting: until all have answered, and if their accelerators do not fit, the tensors
travel down the tree too. Otherwise the header names a process group of all members (path "group"). Each member then
receives the tensors from the CCL's broadcast, in the order of the messages, on the thread of its end of the group.

Failures. If a member dies, the tree fails at every other member, and so does its end of the group. If the group breaks
at one member, that member reports it to all (BroadcastFailed): the broadcasts that the group carries fail at once at
each member, and the source sends later broadcasts down the tree. A death, too, breaks the group at its members, and
each hears of the death at a time of its own: so a member whose end breaks first waits for that news.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from rlinf_actors.errors import CallTimeoutError, RlinfActorsError
from rlinf_actors.messaging import process_groups, routes
from rlinf_actors.messaging.cuda_ipc import Devices
from rlinf_actors.messaging.lanes import Lane, LaneJob
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions, Wire
from rlinf_actors.messaging.tensor_transfer import (
    DetachedTensors,
    TransferEndpoint,
    as_bytes,
    header_of,
    own_stream,
)
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

FEWEST = 3
"""Members from which a broadcast uses one process group. Two members use a lane."""
PATIENCE_S = 3 * 3600.0
"""Seconds without RLINF_TIMEOUT within which all members must have called broadcast(); those of RLinf."""
NEWS_S = 1.0
"""Most seconds in which a member whose end of a group has broken waits for the news that another member has died."""
_numbers = itertools.count(1)


class GroupSend:
    """The source's transfer of one broadcast's tensors. *ended* is called once, with the error if it failed."""

    def __init__(self, tensors: DetachedTensors, ended: Callable[[Exception | None], object]) -> None:
        self._tensors = tensors
        self._ended: Iterator[Callable[[Exception | None], object]] = iter([ended])

    def run(self, wire: Wire) -> None:
        device = self._tensors.tensors[0].device
        with own_stream(device):
            self._tensors.wait_ready(device)
            wire.send([as_bytes(tensor) for tensor in self._tensors.tensors if tensor.numel()])
        self._end(None)

    def fail(self, error: Exception) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        for ended in self._ended:
            ended(error)


class GroupWire(Wire):
    """One end of a process group of all members of a broadcast, which carries uint8 tensors from rank 0 to the rest."""

    def send(self, tensors: Sequence[Any]) -> None:
        self._broadcast(tensors)

    def recv(self, buffers: Sequence[Any]) -> None:
        self._broadcast(buffers)

    def _broadcast(self, tensors: Sequence[Any]) -> None:
        import torch.distributed

        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self.group.broadcast([tensor], options).wait()


class BroadcastGroup:
    """One member's end of the process groups of a broadcast tree: one for each set of options. Any thread.

    Args:
        endpoint: this worker.
        rank: rank of this worker in the groups; 0 for the source.
        size: number of members.
        tell: reports to all members that a group has failed here; called with the group's number and the reason.
    """

    def __init__(self, endpoint: TransferEndpoint, rank: int, size: int, tell: Callable[[int, str], object]) -> None:
        self._endpoint = endpoint
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._lanes: dict[object, tuple[Lane, frames.TensorTransfer]] = {}
        self._tell = tell
        self._closed: Callable[[], Exception] | None = None
        self._failed: dict[int, Callable[[], Exception]] = {}  # groups that have failed at another member, by number
        self._problems: dict[Any, str] = {}
        self.broken = False

    def header(
        self, tensors: DetachedTensors, options: CollectiveGroupOptions, answers: Sequence[frames.Facts | None]
    ) -> frames.TensorTransfer | None:
        """Return the header that describes *tensors* and their group; make the group if there is none. At the source.

        Return None if the tensors must travel down the tree. *answers* are those of the other members; None if a member
        has not answered. May start CUDA: not on the loop thread.

        Raises:
            OSError: the address for the group's store is not one of this machine.
        """
        facts = [answer for answer in answers if answer is not None]
        if self.broken or len(facts) < len(answers) or not self._fits(tensors.tensors, facts):
            return None
        key = astuple(options)
        with self._lock:
            if self._closed is not None:
                return None
            if key not in self._lanes:
                near = all(answer.host == self._endpoint.host for answer in facts)
                store = process_groups.GroupStore(self._endpoint.ip(near), self._timeout_s())
                backend = self._endpoint.devices.get().ccl
                made = frames.TensorTransfer(0, 0, [], next(_numbers), backend, store.endpoint, list(key))
                self._lanes[key] = self._open(made, store.close), made
            group = self._lanes[key][1]
        headers = [
            header_of(tensor, grad, routes.GROUP if tensor.numel() else "")
            for tensor, grad in zip(tensors.tensors, tensors.requires_grad, strict=True)
        ]
        return msgspec.structs.replace(group, tensors=headers)

    def _fits(self, tensors: Sequence[Any], others: Sequence[frames.Facts]) -> bool:
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors) or not any(tensor.numel() for tensor in tensors):
            return False
        if device not in self._problems:
            self._problems[device] = problem(self._endpoint, self._endpoint.devices.get(), device, others)
            if self._problems[device]:
                log.debug("%s broadcasts down the tree: %s", self._endpoint.name, self._problems[device])
        return not self._problems[device]

    def post(self, transfer: frames.TensorTransfer, job: LaneJob) -> None:
        """Run *job* on this member's end of the group that *transfer* names, after the jobs posted before.

        If the group has ended, fail *job*. Members other than the source join the group with its first job.
        """
        key = tuple(transfer.options) if self._rank == 0 else transfer.lane
        with self._lock:
            closed = self._closed or self._failed.get(transfer.lane)
            if closed is None and key not in self._lanes:
                self._lanes[key] = self._open(transfer, lambda: None), msgspec.structs.replace(transfer, tensors=[])
        if closed is not None:
            job.fail(closed())
        else:
            self._lanes[key][0].post(job)

    def _open(self, group: frames.TensorTransfer, release: Callable[[], None]) -> Lane:
        endpoint, rank, size, backend = self._endpoint, self._rank, self._size, group.backend
        timeout_s, store_at = self._timeout_s(), group.store
        ip = endpoint.ip(store_at.rpartition(":")[0] == process_groups.LOOPBACK)
        options = CollectiveGroupOptions(*group.options)  # type: ignore[arg-type]

        def make() -> Wire:
            store = process_groups.join(store_at, timeout_s)
            return GroupWire(
                process_groups.make(
                    backend, store, rank, size, timeout_s=timeout_s, ip=ip, options=options, name=endpoint.job
                )
            )

        name = f"a broadcast's source to {endpoint.name}" if rank else f"{endpoint.name} to all members of a broadcast"
        return Lane(name, make, self._broke, release, endpoint.job_clock(backend, timeout_s))

    def _timeout_s(self) -> float:
        minutes = self._endpoint.timeout_minutes
        return PATIENCE_S if minutes is None else minutes * 60.0

    def _broke(self, lane: Lane, error: Exception) -> None:
        self.broken = True
        if self._rank == 0:
            log.warning("broadcasts of %s no longer use one process group: %s", self._endpoint.name, error)
        if not isinstance(error, CallTimeoutError) and lane.ends_within(NEWS_S):  # that may come from the loop thread
            return
        lane.end(lambda: RlinfActorsError(f"the process group of {lane.name} failed: {error}"))
        with self._lock:
            number = next((header.lane for known, header in self._lanes.values() if known is lane), 0)
        if number:
            self._tell(number, str(error))

    def told(self, report: frames.BroadcastFailed) -> None:
        """End a group that has failed at another member, which has reported that.

        If it has failed here before, it keeps that error: the other failure may be its consequence.
        """

        def error() -> Exception:
            return RlinfActorsError(f"the process group of a broadcast failed at {report.src}: {report.text}")

        self.broken = True
        with self._lock:
            lane = next((lane for lane, header in self._lanes.values() if header.lane == report.group), None)
            if lane is None:
                self._failed[report.group] = error
        if lane is not None:
            lane.end(error)

    def end(self, error: Callable[[], Exception]) -> None:
        """End all groups, and fail later transfers. *error* makes the exception of each transfer."""
        self.broken = True
        with self._lock:
            self._closed = self._closed or error
            lanes, self._lanes = [lane for lane, _ in self._lanes.values()], {}
        for lane in lanes:
            lane.end(error)


def problem(endpoint: TransferEndpoint, devices: Devices, device: Any, others: Sequence[frames.Facts]) -> str:
    """Return why tensors on *device* cannot be broadcast by one process group, "" if they can.

    *devices* are those of the source, *others* the answers of the other members. May start CUDA.
    """
    if len(others) + 1 < FEWEST:
        return "two members use a lane"
    if endpoint.overrides.get(routes.ACCELERATOR, routes.LANE) != routes.LANE:
        return "RLINF_ACTORS_PATHS names another path"
    if device.type != devices.kind or devices.ccl not in devices.backends:
        return f"this worker has no back-end for tensors on {device}"
    index = device.index or 0
    ours = devices.ccl_facts(index)
    places = {(endpoint.host, ours.parent or devices.uuid(index))}
    for facts in others:
        theirs = routes.Ccl(facts.ccl_version, facts.model, facts.parent)
        if facts.accelerator != devices.accelerator.value or devices.ccl not in facts.backends:
            return "a member has other accelerators"
        if not facts.devices:
            return "a member has no accelerator of its own"
        found = routes.ccl_problem(ours, theirs, facts.host == endpoint.host)
        if found:
            return found
        places.add((facts.host, facts.parent or facts.devices[0]))
    return "" if len(places) == len(others) + 1 else "members share an accelerator"
