"""What makes a process a member that others reach under a worker's address: its sockets, its messages, its place.

A worker and a child of a worker are made of the same parts; `worker.main` and `worker.child` put them together.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rlinf_actors.cluster.attach import WorkerJob
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE
from rlinf_actors.net.security import Security
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.security.job import JobGate, job_name
from rlinf_actors.settings import Settings
from rlinf_actors.tensors.devices import LazyDevices
from rlinf_actors.tensors.messenger import Messenger
from rlinf_actors.tensors.station import Station
from rlinf_actors.wire import frames
from rlinf_actors.wire.agents import RefusalReport
from rlinf_actors.wire.spawn import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker.farpeers import FarPeers
from rlinf_actors.worker.server import WorkerServer
from rlinf_actors.worker.strangers import Strangers

SWITCH_INTERVAL_S = 0.0002
"""The I/O thread answers in 0.5 ms while the user's thread spins in Python (5 ms at the default of
0.005); it costs the user's code 4 %."""


@dataclass(frozen=True)
class Member:
    """One process, as it is reached.

    Attributes:
        server: what others talk to.
        endpoint: where it listens.
        messenger: its messages.
        strangers: told of whom the sockets do not let in.
    """

    server: WorkerServer
    endpoint: Endpoint
    messenger: Messenger
    strangers: Strangers


def new_runtime(
    spec: WorkerSpec, place: WorkerPlace, on_given_up: Callable[[str], None] = lambda reason: None, parent: str = ""
) -> tuple[Runtime, Security]:
    """Return the runtime of this process, which is *spec*'s worker or, with its id as *parent*, a child of that."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    security = Security.of_worker(spec.token, place.head_key, place.head, place.listen_ip)
    runtime = Runtime(
        "worker",
        spec.namespace,
        worker_id=spec.id,
        parent=parent,
        token=spec.token,
        security=security,
        on_given_up=on_given_up,
    )
    return runtime, security


async def listen(
    name: str,
    spec: WorkerSpec,
    place: WorkerPlace,
    runtime: Runtime,
    security: Security,
    job: WorkerJob,
    tell: Callable[[RefusalReport], bool],
    on_closed: Callable[[], None] = lambda: None,
) -> Member:
    """Be there for others under *name*. On the I/O loop.

    Args:
        name: "group:rank", or a child's.
        spec, place, runtime, security, job: of this process.
        tell: passes on whom the sockets turned away; False if it cannot now.
        on_closed: see WorkerServer.
    """
    strangers = Strangers(asyncio.get_running_loop(), tell)
    gate = JobGate(security.pair.public, spec.namespace, strangers.refused) if security.pair is not None else None
    server = WorkerServer(runtime.network, spec.id, name, spec.token, on_closed, gate, strangers.refused)
    server.far = FarPeers(runtime.watched.watch, job.connected, server.peer_gone)
    settings = Settings.load()
    station = Station(
        runtime.io,
        spec.id,
        name,
        runtime.host,
        place.node_ip,
        LazyDevices(dict(os.environ)),
        settings.paths,
        settings.comm_net_devices or os.environ.get(GLOO_NIC_VARIABLE),
        settings.timeout_minutes,
        job_name(spec.token),
    )
    messenger = Messenger(runtime, name, spec.id, job.connected, server.answer, settings.send_window_bytes, station)
    server.serve((frames.Message,), messenger.arrived)
    server.on_link_lost(messenger.link_lost)
    server.on_forgotten(messenger.link_forgotten)
    server.serve((frames.Ask, frames.LaneEnded), messenger.freight.said)
    ipc = server.bind(f"ipc://{place.run_dir}/w/{spec.id}")
    tcp = server.bind(f"tcp://{place.listen_ip}:0") if place.listen_ip else ""
    return Member(server, Endpoint(place.host, ipc, tcp), messenger, strangers)
