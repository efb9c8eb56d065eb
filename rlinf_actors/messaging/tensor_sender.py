"""The gate before one outbox: what this worker sends to one other with tensors that do not go by the link.

The first time it asks the receiver what that can do; whatever is sent meanwhile waits behind, in order.
Then it chooses a path per tensor. House rules: no accelerator is touched on the loop's thread; headers keep
the order, and a lane's jobs are posted under the outbox's lock, in the order of their headers.

Freight: the ways of one worker's tensors that are not with the messages; gates out, arrivals in.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors import exhaustion
from rlinf_actors.messaging import cuda_ipc, routes
from rlinf_actors.messaging.cuda_ipc import CudaError
from rlinf_actors.messaging.directory import Directory, gone
from rlinf_actors.messaging.lanes import OutLanes
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.messaging.outbox import Letter, Outbox, Trip
from rlinf_actors.messaging.tensor_receiver import Arrivals, Reply
from rlinf_actors.messaging.tensor_transfer import (
    Arriving,
    Hold,
    Send,
    Station,
    crate_of,
    ipc_crate,
    size_of,
    staged_part,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parcel:
    """A letter, what was taken out of it, and how its lane is to be made."""

    letter: Letter
    hold: Hold
    options: CollectiveGroupOptions
    now: bool


@dataclass(frozen=True)
class Lent:
    """What a receiver has the memory of, by number of the tensor; None for those that went by other ways."""

    tensors: list[Any]
    hold: Hold
    event: Any


@dataclass
class _Load:
    """How one message's tensors go. `kept` has an entry for each: what the receiver shares, or None."""

    crates: list[frames.TensorHeader] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    staged: list[Buffer] = field(default_factory=list)
    by_lane: list[Any] = field(default_factory=list)
    event: Any = None
    device: Any = None


class Gate:
    """To one worker. Any thread.

    Args:
        station: this worker.
        peer: the receiver.
        outbox: to it.
    """

    def __init__(self, station: Station, peer: Peer, outbox: Outbox) -> None:
        self.peer = peer
        self._station = station
        self._outbox = outbox
        self._ended: Callable[[Gate], None] = lambda gate: None
        self._lock = threading.Lock()
        self._facts: frames.Facts | None = None
        self._waiting: list[Parcel] = []
        self._shipping = False
        self._error: Exception | None = None
        self._numbers = itertools.count(1)
        self._lent: dict[int, Lent] = {}
        self._lanes = OutLanes(station, peer, lambda: self.id)
        self._probe: cuda_ipc.Probe | None = None
        self.id = 0

    def open(self, ended: Callable[[Gate], None]) -> None:
        """Ask the receiver what it can do; twice is fine.

        Args:
            ended: called when the receiver is gone.
        """
        with self._lock:
            if self.id:
                return
            self.id, self._ended = self.peer.listen(self._answered), ended
        self.peer.on_gone(self._fail)
        try:
            exhaustion.start(threading.Thread(target=self._ask, name="rlinf-actors-ask", daemon=True))
        except RuntimeError as error:
            self._ask_without_a_device(error)

    def _ask(self) -> None:
        """Not on the loop's thread: it may load torch and start CUDA."""
        try:
            ask = self._question()
        except Exception as error:  # noqa: BLE001 - it is logged, and the question goes out
            self._ask_without_a_device(error)
        else:
            self.peer.send(ask)
        if self._error is not None:
            self._tried()

    def _ask_without_a_device(self, error: Exception) -> None:
        """Ask all the same, for sends wait for the answer. One that needs what is broken raises the error again."""
        log.warning(
            "device memory cannot be shared with other workers, and is copied: %s: %s", type(error).__name__, error,
            exc_info=not isinstance(error, (CudaError, RuntimeError)),
        )  # fmt: skip
        self.peer.send(frames.Ask(self.id))

    def _question(self) -> frames.Ask:
        devices = self._station.devices.get()
        if devices.driver is None or devices.home is None or self._to_myself:
            return frames.Ask(self.id)
        probe = cuda_ipc.Probe(devices.driver, devices.home)
        with self._lock:
            self._probe = probe
        return frames.Ask(self.id, devices.uuid(devices.home), probe.memory, probe.event)

    def _tried(self) -> None:
        with self._lock:
            probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()

    @property
    def _to_myself(self) -> bool:
        return self.peer.worker_id == self._station.worker_id

    def post(self, parcel: Parcel) -> None:
        """Send, after what was posted before."""
        with self._lock:
            error = self._error
            idle = self._facts is not None and not self._waiting and not self._shipping
            at_once = idle and not (parcel.hold.tensors and self._station.io.inside())
            if error is None and not at_once:
                self._waiting.append(parcel)
                self._shipping = self._shipping or idle
        if error is not None:
            parcel.letter.work.reject(gone(self.peer, error, parcel.letter.work._what))
        elif at_once:
            self._ship(parcel)
        elif idle:
            self._start()

    def lent(self, number: int) -> Lent:
        """What the receiver of cargo *number* has the memory of."""
        return self._lent[number]

    @property
    def lent_count(self) -> int:
        """How many messages the receiver has memory of."""
        return len(self._lent)

    # --- what the receiver says, and its end ---

    def _answered(self, frame: frames.AnyFrame) -> None:
        """Facts, Released or LaneEnded. Loop thread."""
        if type(frame) is frames.Facts:
            with self._lock:
                self._facts = frame
                start = bool(self._waiting) and not self._shipping
                self._shipping = self._shipping or start
            self._tried()
            if start:
                self._start()
        elif type(frame) is frames.Released:
            with self._lock:
                dropped = self._lent.pop(frame.n, None)
            del dropped  # not under the lock: it runs finalizers
        elif type(frame) is frames.LaneEnded:
            self._lanes.peer_ended(frame)

    def _fail(self, error: Exception) -> None:
        """The receiver is gone. Any thread."""
        with self._lock:
            self._error = self._error or error
            lost, self._waiting = self._waiting, []
            lent, self._lent = self._lent, {}
        self._tried()
        self._ended(self)
        self._lanes.end(lambda: gone(self.peer, error, f"a tensor's way to {self.peer.name}"))
        for parcel in lost:
            work = parcel.letter.work
            work.reject(gone(self.peer, error, work._what))
        del lent

    # --- shipping ---

    def _start(self) -> None:
        """Ship what waits, on a thread for that, which `_shipping` has announced; fail it where there is no thread."""
        try:
            exhaustion.start(threading.Thread(target=self._ship_waiting, name="rlinf-actors-freight", daemon=True))
        except RuntimeError as error:
            with self._lock:
                self._shipping = False
                lost, self._waiting = self._waiting, []
            for parcel in lost:
                parcel.letter.work.reject(error)

    def _ship_waiting(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                if not waiting:
                    self._shipping = False
                    return
            for parcel in waiting:
                self._ship(parcel)

    def _ship(self, parcel: Parcel) -> None:
        letter = parcel.letter
        try:
            if parcel.hold.tensors:
                letter = self._loaded(parcel)
        except Exception as error:  # noqa: BLE001 - torch's or CUDA's: it reaches the sender
            letter.work.reject(error)
            return
        self._outbox.post(letter, now=parcel.now)

    def _loaded(self, parcel: Parcel) -> Letter:
        """The letter with its cargo."""
        letter, hold, facts = parcel.letter, parcel.hold, self._facts
        assert facts is not None
        load = self._load(hold, facts)
        cargo = frames.Cargo(self.id, next(self._numbers), load.crates)
        trip = Trip(letter.work, 2 if load.by_lane else 1)
        departed: Callable[[], None] | None = None
        if load.by_lane:
            first = load.by_lane[0]
            same_node = facts.host == self._station.host
            lane = self._lanes.lane(self._backend(first), first.device, parcel.options, same_node)
            cargo = lane.label(cargo)
            job = Send(hold, load.by_lane, trip.one_done, trip.failed)

            def departed() -> None:
                lane.lane.post(job)

        if any(one is not None for one in load.kept):
            cargo.event = b"" if load.event is None else load.event.ipc_handle()
            with self._lock:
                if self._error is None:
                    self._lent[cargo.n] = Lent(load.kept, hold, load.event)
        # what is lent counts too: it is kept here as long as nobody asks for it there
        shared = [tensor for tensor, kept in zip(hold.tensors, load.kept, strict=True) if kept is not None]
        weight = sum(map(size_of, [*load.by_lane, *shared]))
        return Letter(letter.stream, [*letter.parts, *load.staged], True, trip.held, weight, cargo, departed)

    def _load(self, hold: Hold, facts: frames.Facts) -> _Load:
        """Choose the path of each tensor, and make ready what the header must tell."""
        load = _Load()
        for tensor, wanted in zip(hold.tensors, hold.wanted, strict=True):
            path = self._path(tensor, facts, load) if tensor.numel() else ""
            kept = None
            if path == routes.IPC:
                hold.let_wait(tensor.device)
                crate, kept = ipc_crate(self._station.devices.get(), tensor, wanted)
            else:
                crate = crate_of(tensor, wanted, path)
            if path == routes.LOCAL:
                kept = tensor
            elif path == routes.STAGED:
                load.staged.append(staged_part(hold, tensor))
            elif path == routes.LANE:
                load.by_lane.append(tensor)
            load.crates.append(crate)
            load.kept.append(kept)
        if any(crate.path == routes.IPC for crate in load.crates):
            load.event = cuda_ipc.event(load.device.index)
        return load

    def _path(self, tensor: Any, facts: frames.Facts, load: _Load) -> str:
        """The way of one tensor. Lane and ipc take those of one device, the first's; the others are staged."""
        devices, backend = self._station.devices.get(), self._backend(tensor)
        on_cpu = tensor.device.type == "cpu"
        same_node = facts.host == self._station.host
        uuid = "" if on_cpu else devices.uuid(tensor.device.index)
        same_device = same_node and uuid in facts.devices
        pair = routes.Pair(
            same_process=self._to_myself,
            same_node=same_node,
            same_device=same_device,
            ccl=backend in devices.backends
            and backend in facts.backends
            and (on_cpu or facts.accelerator == devices.accelerator.value),
            shared=facts.ipc,
        )
        path = routes.choose(routes.CPU if on_cpu else routes.ACCELERATOR, pair, self._station.overrides)
        if path == routes.LOCAL:
            return path
        if path in (routes.IPC, routes.LANE) and load.device in (None, tensor.device):
            load.device = tensor.device
            return path
        return routes.STAGED

    def _backend(self, tensor: Any) -> str:
        return "gloo" if tensor.device.type == "cpu" else self._station.devices.get().ccl


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
        return Hold(self._station.overrides.get(routes.CPU) == routes.LANE)

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

    def arrived(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> Arriving | None:
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
