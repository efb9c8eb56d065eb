"""The accelerators' locks at work: workers ask through their templates, the table decides. Loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentd.locks import LockTable, Wanted, devices_of
from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import ResourceReport, WorkerSpec

PATIENCE_S = 30.0
"""After that long a worker that waits is told, once, for whom."""


@dataclass
class _Asker:
    name: str
    send: Callable[[spawn.ToTemplate], None]
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
        packet: spawn.LockDevices | spawn.UnlockDevices,
        send: Callable[[spawn.ToTemplate], None],
    ) -> None:
        """A living worker asks, or gives back.

        Args:
            spec: the worker.
            packet: what it says.
            send: to its template.
        """
        self._calm(spec.id)
        if isinstance(packet, spawn.UnlockDevices):
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
            self._askers[one.worker].send(spawn.DevicesLocked(one.worker, one.number))

    def _waits(self, worker: str, request: int) -> None:
        holders, before = ([self._askers[id].name for id in ids] for ids in self._table.ahead_of(worker))
        text = f"held by {', '.join(holders) or 'nobody'}"
        if before:
            text += f"; {', '.join(before)} came before"
        self._askers[worker].send(spawn.DevicesBusy(worker, request, self._patience_s, text[: spawn.TEXT_CHARS]))

    def _calm(self, worker: str) -> None:
        asker = self._askers.get(worker)
        if asker is not None and asker.patience is not None:
            asker.patience.cancel()
            asker.patience = None
