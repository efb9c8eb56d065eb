"""Freight: the ways of one worker's tensors that are not with the messages; gates out, arrivals in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tensors import paths
from rlinf_actors.tensors.arrivals import Arrivals, Reply
from rlinf_actors.tensors.cargo import Arriving, Hold
from rlinf_actors.tensors.directory import Directory
from rlinf_actors.tensors.gate import Gate, Parcel
from rlinf_actors.tensors.options import CollectiveGroupOptions
from rlinf_actors.tensors.outbox import Letter, Outbox
from rlinf_actors.tensors.station import Station
from rlinf_actors.wire import frames
from rlinf_actors.wire.vouched import Vouched


class Freight:
    """Any thread, unless a method says otherwise.

    Args:
        station: this worker.
        directory: finds senders.
        reply: answers on a link that a message came by.
        outbox: gives that of a peer.
    """

    def __init__(self, station: Station, directory: Directory, reply: Reply, outbox: Callable[[Peer], Outbox]) -> None:
        self._station = station
        self._outbox = outbox
        self._lock = threading.Lock()
        self._gates: dict[Peer, Gate] = {}
        self._arrivals = Arrivals(station, directory, reply, self._local)

    @property
    def lent_count(self) -> int:
        """Of how many messages others have this worker's device memory."""
        return sum(gate.lent_count for gate in list(self._gates.values()))

    def hold(self) -> Hold:
        """What takes the tensors out of one object that is to be sent."""
        return Hold(self._station.overrides.get(paths.CPU) == paths.LANE)

    def post(self, peer: Peer, letter: Letter, hold: Hold, options: CollectiveGroupOptions | None, now: bool) -> None:
        """Send a letter from which *hold* took tensors, after those posted before."""
        gate = self._gates.get(peer)
        if gate is None:
            if not hold.tensors:
                self._outbox(peer).post(letter, now=now)
                return
            gate = self._gate(peer)
        gate.post(Parcel(letter, hold, options or CollectiveGroupOptions(), now))

    def _gate(self, peer: Peer) -> Gate:
        outbox = self._outbox(peer)
        with self._lock:
            gate = self._gates.get(peer)
            if gate is None:
                gate = self._gates[peer] = Gate(self._station, peer, outbox)
        gate.open(self._ended)
        return gate

    def _ended(self, gate: Gate) -> None:
        with self._lock:
            self._gates.pop(gate.peer, None)

    def arrived(self, link: bytes, frame: frames.Message, parts: Vouched) -> Arriving | None:
        """What comes with a message by other ways, None if nothing does. Loop thread."""
        return None if frame.cargo is None else self._arrivals.arrived(link, frame, parts)

    def said(self, link: bytes, frame: frames.AnyFrame, _parts: Sequence[Buffer]) -> None:
        """A sender's Ask or LaneEnded. Loop thread."""
        if isinstance(frame, frames.Ask):
            self._arrivals.asked(link, frame)
        elif isinstance(frame, frames.LaneEnded):
            self._arrivals.peer_ended(link, frame)

    def _local(self, number: int, cargo: int) -> tuple[Hold, Sequence[Any]]:
        gate = next(gate for gate in list(self._gates.values()) if gate.id == number)
        lent = gate.lent(cargo)
        return lent.hold, lent.tensors
