"""The lanes from this worker to one other: made when first needed, by back-end, device and options."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import msgspec

from rlinf_actors.errors import CallTimeoutError, RlinfActorsError
from rlinf_actors.model.accelerator_table import group_facts
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tensors import groups
from rlinf_actors.tensors.lanes import Lane
from rlinf_actors.tensors.options import CollectiveGroupOptions
from rlinf_actors.tensors.station import Station
from rlinf_actors.wire import frames


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
        store = groups.Store(ip, timeout_s)
        client = groups.join(store.endpoint, timeout_s)  # now: on the lane's thread it might be closed by then

        def make() -> groups.Wire:
            return groups.wire(
                backend, client, groups.SENDER, timeout_s=timeout_s, ip=ip, options=options, name=station.job
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
