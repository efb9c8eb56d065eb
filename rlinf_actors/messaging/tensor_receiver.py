"""The receiving end of what does not come with the messages themselves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors import exhaustion
from rlinf_actors.errors import CallTimeoutError, PeerDiedError
from rlinf_actors.messaging import cuda_ipc, process_groups
from rlinf_actors.messaging.directory import Directory, gone
from rlinf_actors.messaging.lanes import Lane, broken
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.messaging.tensor_transfer import Arriving, Hold, Station
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

log = logging.getLogger(__name__)

Reply = Callable[[bytes, frames.AnyFrame], None]
Key = tuple[bytes, int, int]
"""(link, the sender's gate, its lane)."""


@dataclass
class _InLane:
    """A lane to this worker. `told`: its sender was told of its end."""

    key: Key
    backend: str
    lane: Lane
    told: bool = False


class Arrivals:
    """Of one worker.

    Args:
        station: this worker.
        directory: finds senders, whose end is to be heard of.
        reply: answers on a link that a message came by.
        local: gives what a gate of this process lent.
    """

    def __init__(
        self,
        station: Station,
        directory: Directory,
        reply: Reply,
        local: Callable[[int, int], tuple[Hold, Sequence[Any]]],
    ) -> None:
        self._station = station
        self._directory = directory
        self._reply = reply
        self._local = local
        self._lock = threading.Lock()
        self._lanes: dict[Key, _InLane] = {}

    def asked(self, link: bytes, frame: frames.Ask) -> None:
        """A sender wants to know what this worker can do. Loop thread."""

        def answer() -> None:  # may load torch and start CUDA: not on the loop's thread
            try:
                facts = self._facts(frame)
            except Exception:
                log.exception("torch or CUDA does not start: tensors arrive on the CPU")
                facts = frames.Facts(frame.id, self._station.host, "NO_ACCEL", [], [], False)
            self._reply(link, facts)

        exhaustion.start(threading.Thread(target=answer, name="rlinf-actors-facts", daemon=True))

    def _facts(self, ask: frames.Ask) -> frames.Facts:
        devices = self._station.devices.get()
        index = devices.seen.get(ask.device)
        shared = False
        if devices.driver is not None and index is not None and ask.memory:
            shared = cuda_ipc.tried(devices.driver, index, ask.memory, ask.event)
        accelerator = devices.accelerator.value
        return frames.Facts(ask.id, self._station.host, accelerator, list(devices.own), devices.backends, shared)

    def arrived(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> Arriving:
        """A message with a cargo came. Loop thread."""
        cargo = frame.cargo
        assert cargo is not None

        def release() -> None:
            self._reply(link, frames.Released(cargo.gate, cargo.n))

        what = f"a tensor from {frame.src}"
        arriving = Arriving(what, cargo, parts, self._station.devices, self._local, release)
        if arriving.by_lane:
            self._lane(link, frame, cargo).lane.post(arriving)
        return arriving

    # --- lanes ---

    def _lane(self, link: bytes, frame: frames.UserMessage, cargo: frames.Cargo) -> _InLane:
        key = (link, cargo.gate, cargo.lane)
        with self._lock:
            found = self._lanes.get(key)
            if found is not None:
                return found
            found = self._lanes[key] = _InLane(key, cargo.backend, self._joined(frame.src, cargo))
        sender = WorkerAddress.from_name(frame.src)
        self._directory.peer(sender, lambda peer: self._watch(key, sender, frame.src_id, peer))
        return found

    def _joined(self, src: str, cargo: frames.Cargo) -> Lane:
        station, backend = self._station, cargo.backend
        timeout_s = station.timeout_s(backend)
        options = CollectiveGroupOptions(*cargo.options)  # type: ignore[arg-type]
        ip = station.ip(cargo.store.rpartition(":")[0] == process_groups.LOOPBACK)

        def make() -> process_groups.Wire:
            store = process_groups.join(cargo.store, timeout_s)
            return process_groups.wire(
                backend, store, process_groups.RECEIVER, timeout_s=timeout_s, ip=ip, options=options, name=station.job
            )

        return Lane(f"{src} to {station.name}", make, self._broke, limit=station.limit(backend))

    def _broke(self, lane: Lane, error: Exception) -> None:
        """The sender is told, and answers that it lives; or the head tells that it does not."""
        with self._lock:
            found = next((one for one in self._lanes.values() if one.lane is lane), None)
        if found is not None:
            self._tell(found, str(error))
            if isinstance(error, CallTimeoutError):
                text = f"the lane from {lane.name} ({found.backend}): {error}"
                self._drop(found, lambda: CallTimeoutError(text))

    def peer_ended(self, link: bytes, frame: frames.LaneEnded) -> None:
        """The sender has closed its end, so it lives. Loop thread."""
        with self._lock:
            found = self._lanes.get((link, frame.id, frame.lane))
        if found is None:  # it waits for the answer all the same
            self._reply(link, frames.LaneEnded(frame.id, frame.lane, self._station.worker_id, frame.text))
            return
        self._tell(found, frame.text)
        self._drop(found, lambda: broken(found.lane, found.backend, frame.text))

    def _tell(self, lane: _InLane, text: str) -> None:
        with self._lock:
            first, lane.told = not lane.told, True
        if first:
            link, gate, number = lane.key
            self._reply(link, frames.LaneEnded(gate, number, self._station.worker_id, text))

    def _drop(self, lane: _InLane, error: Callable[[], Exception]) -> None:
        with self._lock:
            if self._lanes.get(lane.key) is lane:
                del self._lanes[lane.key]
        lane.lane.end(error)

    # --- who is gone ---

    def _watch(self, key: Key, sender: WorkerAddress, src_id: str, peer: Peer | Exception) -> None:
        """The sender was found, or its group has ended."""
        with self._lock:
            lane = self._lanes.get(key)
        if lane is None:
            return
        if isinstance(peer, Exception) or peer.worker_id not in ("", src_id):
            name = sender.get_name()
            self._drop(lane, lambda: PeerDiedError(f"{name}, which was sending a tensor, has ended", peer=name))
            return
        peer.on_gone(lambda error: self._drop(lane, lambda: gone(peer, error, f"a tensor from {peer.name}")))
