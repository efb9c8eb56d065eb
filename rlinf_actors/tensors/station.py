"""What one worker's end of all paths is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces
from rlinf_actors.model.accelerator_table import group_facts
from rlinf_actors.net.loop import IoThread
from rlinf_actors.tensors import groups
from rlinf_actors.tensors.devices import LazyDevices


@dataclass(frozen=True)
class Station:
    """This worker, for paths.

    Attributes:
        io: its loop.
        worker_id, name: its.
        host: its host key; equal for processes that can use each other's memory.
        node_ip: its node's address.
        devices: its accelerators.
        overrides: kind of buffer to path; Settings.paths.
        net_devices: names of interfaces, RLINF_COMM_NET_DEVICES or what was made of it.
        timeout_minutes: RLINF_TIMEOUT.
        job: what its members call their process groups; see security.job.job_name.
    """

    io: IoThread
    worker_id: str
    name: str
    host: str = ""
    node_ip: str = groups.LOOPBACK
    devices: LazyDevices = field(default_factory=lambda: LazyDevices({}))
    overrides: Mapping[str, str] = field(default_factory=dict)
    net_devices: str | None = None
    timeout_minutes: float | None = None
    job: str = groups.GROUP

    def timeout_s(self, backend: str) -> float:
        """How long a transfer may take: torch.distributed's own default unless RLINF_TIMEOUT is set."""
        if self.timeout_minutes is not None:
            return self.timeout_minutes * 60.0
        return group_facts(backend).timeout_s

    def limit(self, backend: str) -> Callable[[Callable[[], None]], Callable[[], None]] | None:
        """A clock for a lane's jobs; see Lane."""
        if backend == "gloo":
            return None

        def start(late: Callable[[], None]) -> Callable[[], None]:
            timers = []
            self.io.call(lambda: timers.append(self.io.loop.call_later(self.timeout_s(backend), late)))
            return lambda: self.io.call(lambda: timers[0].cancel())

        return start

    def ip(self, same_node: bool) -> str:
        """The address on which others reach a store or a socket of this worker."""
        holder = interface_of(self.node_ip)
        return groups.advertised_ip(same_node, self.node_ip, self.net_devices, ipv4_interfaces(), holder)
