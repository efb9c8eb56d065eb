"""The accelerators' locks at work: workers ask through their templates, the table decides. Loop thread only.

Who may use which accelerator now: first come, first served on each, and all of one's own or none. Pure.

House rules: requests keep the order in which they came; one is granted when no accelerator of it is
held or wanted by an earlier one. So nobody is overtaken, and since all are taken at once, two
workers that want the same two accelerators cannot block one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlinf_actors.hardware.probe_report import resources_from_reports
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareInfo
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import ResourceReport, WorkerSpec

NONE = AcceleratorType.NO_ACCEL.value


@dataclass(frozen=True)
class Wanted:
    """A worker's request; `number` tells it from the worker's other ones."""

    worker: str
    number: int
    devices: frozenset[str]


class LockTable:
    """The locks of one node. A worker has one request at a time, waiting or granted."""

    def __init__(self) -> None:
        self._held: dict[str, Wanted] = {}
        self._waiting: dict[str, Wanted] = {}

    def ask(self, wanted: Wanted) -> list[Wanted]:
        """A worker wants its accelerators; a request that it had before is dropped. Returns what is granted now."""
        self._drop(wanted.worker)
        self._waiting[wanted.worker] = wanted
        return self._grant()

    def leave(self, worker: str, number: int) -> list[Wanted]:
        """A worker gives a request up, granted or not; one that is over is ignored. Returns what is granted now."""
        request = self._held.get(worker) or self._waiting.get(worker)
        if request is None or request.number != number:
            return []
        return self.gone(worker)

    def gone(self, worker: str) -> list[Wanted]:
        """A worker has ended, or wants nothing any more. Returns what is granted now."""
        self._drop(worker)
        return self._grant()

    def ahead_of(self, worker: str) -> tuple[list[str], list[str]]:
        """Who holds what a waiting worker wants, and who waits for it before that one."""
        wanted = self._waiting[worker].devices
        before = list(self._waiting)[: list(self._waiting).index(worker)]
        return (
            [holder for holder, held in self._held.items() if held.devices & wanted],
            [other for other in before if self._waiting[other].devices & wanted],
        )

    def _drop(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._waiting.pop(worker, None)

    def _grant(self) -> list[Wanted]:
        taken: set[str] = set().union(*(held.devices for held in self._held.values()))
        granted = []
        for wanted in list(self._waiting.values()):
            if not wanted.devices & taken:
                self._held[wanted.worker] = self._waiting.pop(wanted.worker)
                granted.append(wanted)
            taken |= wanted.devices
        return granted


def devices_of(spec: WorkerSpec, resources: Sequence[ResourceReport]) -> frozenset[str]:
    """The physical accelerators of a worker, by names that are the same for every worker of the node.

    Those that it was placed on, whether or not it sees others too; all of the node's for one that was placed on
    the node; none for one without accelerators. Slices of one device that the vendor tells apart are apart here.

    Args:
        spec: the worker; its environment says where it was placed.
        resources: what its node has.
    """
    if spec.env.get("ACCELERATOR_TYPE", NONE) in ("", NONE):
        return frozenset()
    installed = NodeInfo(hardware_resources=resources_from_reports(resources)).accelerators
    names = [_name(info, position) for position, info in enumerate(installed)]
    ranks = [int(rank) for rank in spec.env.get("LOCAL_HARDWARE_RANKS", "").split(",") if rank.strip().isdigit()]
    return frozenset(names[rank] for rank in ranks if rank < len(names)) if ranks else frozenset(names)


def _name(info: HardwareInfo, position: int) -> str:
    if not isinstance(info, AcceleratorInfo):
        return f"{info.type} {position}"
    return info.uuid or f"{info.type} {info.index}"


PATIENCE_S = 30.0
"""After that long a worker that waits is told, once, for whom."""


@dataclass
class _Asker:
    name: str
    send: Callable[[template_protocol.ToTemplate], None]
    patience: asyncio.TimerHandle | None = field(default=None)


class DeviceLocks:
    """Grants the accelerators of one node to its workers, whatever jobs they are of.

    Args:
        loop: for the timers.
        resources: what the node has.
        patience_s: see PATIENCE_S.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, resources: Sequence[ResourceReport], patience_s: float = PATIENCE_S
    ) -> None:
        self._loop = loop
        self._resources = resources
        self._patience_s = patience_s
        self._table = LockTable()
        self._askers: dict[str, _Asker] = {}

    def said(
        self,
        spec: WorkerSpec,
        packet: template_protocol.LockDevices | template_protocol.UnlockDevices,
        send: Callable[[template_protocol.ToTemplate], None],
    ) -> None:
        """A living worker asks, or gives back.

        Args:
            spec: the worker.
            packet: what it says.
            send: to its template.
        """
        self._calm(spec.id)
        if isinstance(packet, template_protocol.UnlockDevices):
            self._tell(self._table.leave(spec.id, packet.request))
            return
        asker = self._askers[spec.id] = _Asker(f"{spec.group}:{spec.rank} (namespace {spec.namespace!r})", send)
        granted = self._table.ask(Wanted(spec.id, packet.request, devices_of(spec, self._resources)))
        if all(one.worker != spec.id for one in granted):
            asker.patience = self._loop.call_later(self._patience_s, self._waits, spec.id, packet.request)
        self._tell(granted)

    def gone(self, worker: str) -> None:
        """A worker has ended: what it held is free, and it waits no more."""
        self._calm(worker)
        if self._askers.pop(worker, None) is not None:
            self._tell(self._table.gone(worker))

    def _tell(self, granted: Sequence[Wanted]) -> None:
        for one in granted:
            self._calm(one.worker)
            self._askers[one.worker].send(template_protocol.DevicesLocked(one.worker, one.number))

    def _waits(self, worker: str, request: int) -> None:
        holders, before = ([self._askers[id].name for id in ids] for ids in self._table.ahead_of(worker))
        text = f"held by {', '.join(holders) or 'nobody'}"
        if before:
            text += f"; {', '.join(before)} came before"
        self._askers[worker].send(
            template_protocol.DevicesBusy(worker, request, self._patience_s, text[: template_protocol.TEXT_CHARS])
        )

    def _calm(self, worker: str) -> None:
        asker = self._askers.get(worker)
        if asker is not None and asker.patience is not None:
            asker.patience.cancel()
            asker.patience = None
