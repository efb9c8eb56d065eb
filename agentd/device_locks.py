"""Locks of a node's accelerators: workers ask through their templates, a pure table decides. Loop thread only.

A request is granted when no accelerator in it is held, or wanted by an earlier request. So no request is overtaken. A
worker gets all its accelerators at once, so two workers that want the same two accelerators cannot block one another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rlinf_actors.hardware.probe_report import resources_from_reports
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.model.readable import duration
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import ResourceReport, WorkerSpec

NONE = AcceleratorType.NO_ACCEL.value


class DeviceRequest(msgspec.Struct, frozen=True):
    """A worker's request to be the only holder of some accelerators of its node. `number` distinguishes the requests
    of one worker.
    """

    worker: str
    number: int
    devices: frozenset[str]


class LockTable:
    """The requests for the accelerators of one node, waiting or granted; at most one for each worker. Pure."""

    def __init__(self) -> None:
        self._held: dict[str, DeviceRequest] = {}
        self._waiting: dict[str, DeviceRequest] = {}

    def ask(self, wanted: DeviceRequest) -> list[DeviceRequest]:
        """Add a worker's request, and remove the earlier request of that worker. Return the requests that are granted
        now.
        """
        self._drop(wanted.worker)
        self._waiting[wanted.worker] = wanted
        return self._grant()

    def release(self, worker: str, number: int) -> list[DeviceRequest]:
        """Remove the request of *worker*, waiting or granted, if it has this number. Return the requests that are
        granted now because of that.
        """
        request = self._held.get(worker) or self._waiting.get(worker)
        return self.remove(worker) if request is not None and request.number == number else []

    def remove(self, worker: str) -> list[DeviceRequest]:
        """Remove the request of *worker*, waiting or granted, if there is one. Return the requests that are granted now
        because of that.
        """
        self._drop(worker)
        return self._grant()

    def ahead_of(self, worker: str) -> tuple[list[str], list[str]]:
        """Return two lists of workers for which *worker* waits: those that hold accelerators in its request, and those
        that requested such accelerators earlier and still wait.
        """
        wanted = self._waiting[worker].devices
        before = list(self._waiting)[: list(self._waiting).index(worker)]
        return (
            [holder for holder, held in self._held.items() if held.devices & wanted],
            [other for other in before if self._waiting[other].devices & wanted],
        )

    def waits(self, worker: str) -> DeviceRequest | None:
        """Return the request of *worker* if it waits, else None."""
        return self._waiting.get(worker)

    def _drop(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._waiting.pop(worker, None)

    def _grant(self) -> list[DeviceRequest]:
        taken: set[str] = set().union(*(held.devices for held in self._held.values()))
        granted = []
        for wanted in list(self._waiting.values()):
            if not wanted.devices & taken:
                self._held[wanted.worker] = self._waiting.pop(wanted.worker)
                granted.append(wanted)
            taken |= wanted.devices
        return granted


def devices_of(spec: WorkerSpec, resources: Sequence[ResourceReport]) -> frozenset[str]:
    """Return the names of the physical accelerators that a worker uses. Each accelerator has the same name for all
    workers of the node.

    The environment in *spec* says on which of the node's *resources* the worker was placed. The result has these
    accelerators, even if the worker sees others too. If the worker was placed on the whole node, the result has all
    accelerators; if the worker uses none, the result is empty.

    Slices of one device have different names if the vendor's tools distinguish the slices.
    """
    if spec.env.get("ACCELERATOR_TYPE", NONE) in ("", NONE):
        return frozenset()
    installed = NodeInfo(hardware_resources=resources_from_reports(resources)).accelerators
    names = [
        (info.uuid or f"{info.type} {info.index}") if isinstance(info, AcceleratorInfo) else f"{info.type} {position}"
        for position, info in enumerate(installed)
    ]
    listed = spec.env.get("LOCAL_HARDWARE_RANKS", "").split(",")
    ranks = [int(rank) for rank in listed if re.fullmatch(r"\s*[0-9]{1,9}\s*", rank)]  # a driver may set any text
    return frozenset(names[rank] for rank in ranks if rank < len(names)) if ranks else frozenset(names)


PATIENCE_S = 30.0
"""Seconds after which a waiting worker gets a notice (DevicesBusy) that names the workers it waits for."""


NAME_CHARS = 256  # of a name in a packet (wire.bounds.Name)
NAMED = 16
"""Most workers that a notice names as holders."""


class _Asker(msgspec.Struct):
    spec: WorkerSpec
    send: Callable[[template_protocol.ToTemplate], None]
    asked: float  # time of the loop at which the worker asked
    since: float = 0.0  # at which it got its accelerators
    notice: asyncio.TimerHandle | None = None


class DeviceLocks:
    """The locks of one node's accelerators: grants them to workers, in the order of their requests, whichever job a
    worker belongs to. If a worker has waited for *patience_s* seconds, a notice tells it which workers it waits for.

    *owners* says which process owns a worker, by the worker's id.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resources: Sequence[ResourceReport],
        owners: Mapping[str, str],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._loop = loop
        self._resources = resources
        self._owners = owners
        self._patience_s = patience_s
        self._table = LockTable()
        self._waiters: dict[str, _Asker] = {}

    def handle(
        self,
        spec: WorkerSpec,
        packet: template_protocol.LockDevices | template_protocol.UnlockDevices,
        send: Callable[[template_protocol.ToTemplate], None],
    ) -> None:
        """Carry out a worker's request to lock or unlock its accelerators. The answer to the worker is passed to
        *send*, which sends a packet to the worker's template.
        """
        self._cancel_notice(spec.id)
        if isinstance(packet, template_protocol.UnlockDevices):
            self._send_grants(self._table.release(spec.id, packet.request))
            return
        waiter = self._waiters[spec.id] = _Asker(spec, send, self._loop.time())
        granted = self._table.ask(DeviceRequest(spec.id, packet.request, devices_of(spec, self._resources)))
        if all(one.worker != spec.id for one in granted):
            waiter.notice = self._loop.call_later(self._patience_s, self._send_busy, spec.id)
        self._send_grants(granted)

    def worker_ended(self, worker: str) -> None:
        self._cancel_notice(worker)
        if self._waiters.pop(worker, None) is not None:
            self._send_grants(self._table.remove(worker))

    def _send_grants(self, granted: Sequence[DeviceRequest]) -> None:
        for one in granted:
            self._cancel_notice(one.worker)
            self._waiters[one.worker].since = self._loop.time()
            self._waiters[one.worker].send(template_protocol.DevicesLocked(one.worker, one.number))

    def say_holders(self, worker: str) -> None:
        """If a worker waits, tell it for whom: its stacks, which are asked for next, then name them."""
        if self._table.waits(worker) is not None:
            self._send_busy(worker, quiet=True)

    def _send_busy(self, worker: str, quiet: bool = False) -> None:
        request, waiter = self._table.waits(worker), self._waiters[worker]
        assert request is not None
        holders, before = self._table.ahead_of(worker)
        held = [f"{self._named(id)} for {duration(self._loop.time() - self._waiters[id].since)}" for id in holders]
        text = f"held by {', '.join(held) or 'no worker any more'}"
        if before:
            text += f"; {', '.join(map(self._named, before))} came before"
        waited_s = self._loop.time() - waiter.asked if quiet else self._patience_s
        own = [self._waiters[id].spec for id in holders]
        names = [f"{one.group}:{one.rank}" for one in own if one.namespace == waiter.spec.namespace]
        names = [name for name in names if len(name) <= NAME_CHARS][:NAMED]
        text = text[: template_protocol.TEXT_CHARS]
        waiter.send(template_protocol.DevicesBusy(worker, request.number, waited_s, text, names, quiet))

    def _named(self, id: str) -> str:
        """Return the name of a worker, with the process that owns it, as far as the head has said that."""
        spec, owner = self._waiters[id].spec, self._owners.get(id, "")
        name = f"{spec.group}:{spec.rank} (job {spec.namespace!r})"
        return f"{name}, owned by {owner}," if owner else name

    def _cancel_notice(self, worker: str) -> None:
        waiter = self._waiters.get(worker)
        if waiter is not None and waiter.notice is not None:
            waiter.notice.cancel()
            waiter.notice = None
