"""What a worker process, or a child of one, knows of itself; set before the user's class is constructed."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlinf_actors.cluster.connect import WorkerJob
from rlinf_actors.errors import ConfigError
from rlinf_actors.messaging.broadcast import Broadcaster
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.security.job import JobGate, job_name
from rlinf_actors.settings import Settings, log_level
from rlinf_actors.wire import frames
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker.worker_server import RejectedPeers, RemotePeers, WorkerServer

if TYPE_CHECKING:
    from rlinf_actors.messaging.broadcast import Broadcaster
    from rlinf_actors.messaging.messenger import Messenger
    from rlinf_actors.runtime.runtime import Runtime
    from rlinf_actors.wire.template_protocol import WorkerPlace
    from rlinf_actors.wire.values import WorkerSpec
    from rlinf_actors.worker.children import Children
    from rlinf_actors.worker.device_lock import DeviceLock
    from rlinf_actors.worker.lease_guard import Guard, LeasePage
    from rlinf_actors.worker.worker_server import WorkerServer


@dataclass
class WorkerContext:
    """One worker process, or one that became its child member.

    Attributes:
        address: its place in its group.
        spec, place: what the agent started it, or its worker, with; of a child the spec has its own id.
        runtime: its connections.
        environ: its environment as the agent made it; the ranks come from there.
        ports: ports held for the user's code.
        messenger, broadcaster: its messages to and from other workers.
        device_lock: over its accelerators; None in a child.
        extras: what the owner sent along with the class (hardware_infos and the like).
        server: what others talk to.
        tcp_port: the port it listens on, 0 with a unix socket only.
        pid: of the process that is the worker, or the child; a fork of it has another.
        guard: of a worker with robots.
        children: of a worker.
        lease_page: a worker without robots gets one when it asks.
        connection: of a child to its worker.
    """

    address: WorkerAddress
    spec: WorkerSpec
    place: WorkerPlace
    runtime: Runtime
    environ: Mapping[str, str]
    ports: HeldPorts
    messenger: Messenger
    broadcaster: Broadcaster
    server: WorkerServer
    device_lock: DeviceLock | None
    extras: dict[str, Any] = field(default_factory=dict)
    tcp_port: int = 0
    pid: int = field(default_factory=os.getpid)
    guard: Guard | None = None
    children: Children | None = None
    lease_page: LeasePage | None = None
    connection: socket.socket | None = None

    @property
    def is_child(self) -> bool:
        """True in a child of a worker."""
        return len(self.address.rank_path) > 1

    @property
    def is_here(self) -> bool:
        """True if this process is the worker or child itself, False in a fork of it."""
        return self.pid == os.getpid()

    def accelerator_type(self) -> AcceleratorType:
        """The type of its accelerators; NO_ACCEL without."""
        return accelerator_type(self.environ)


def accelerator_type(environ: Mapping[str, str]) -> AcceleratorType:
    """The type of the accelerators in a worker's environment; NO_ACCEL without."""
    return AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")


_current: WorkerContext | None = None


def install(context: WorkerContext) -> None:
    """Make this process a worker, or a child of one. Once in a process, by worker.main or worker.child."""
    global _current
    _current = context


def current() -> WorkerContext | None:
    """The worker that this process is, None in a driver."""
    return _current


def make_logger(name: str) -> logging.Logger:
    """Return the worker's logger: to stderr, not through the root logger's handlers; RLINF_LOG_LEVEL is its level."""
    logger = logging.getLogger(f"rlinf_actors.worker.{name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        try:
            logger.setLevel(log_level(os.environ))
        except ConfigError as error:  # of the node's environment: the driver's and the launch's are checked there
            logger.setLevel("INFO")
            logger.warning("%s; the level is INFO", error)
    return logger


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
    """

    server: WorkerServer
    endpoint: Endpoint
    messenger: Messenger


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
    on_closed: Callable[[], None] = lambda: None,
) -> Member:
    """Be there for others under *name*. On the I/O loop.

    Args:
        name: "group:rank", or a child's.
        spec, place, runtime, security, job: of this process.
        on_closed: see WorkerServer.
    """
    rejected = RejectedPeers()
    gate = JobGate(security.pair.public, spec.namespace, rejected.add) if security.pair is not None else None
    server = WorkerServer(runtime.network, spec.id, name, spec.token, on_closed, gate, rejected)
    server.far = RemotePeers(runtime.watched.watch, job.connected, server.peer_gone)
    settings = Settings.load()
    transfers = TransferEndpoint(
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
    messenger = Messenger(runtime, job.connected, server.answer, settings.send_window_bytes, transfers)
    server.serve((frames.UserMessage,), messenger.arrived)
    server.on_link_lost(messenger.link_lost)
    server.on_forgotten(messenger.link_forgotten)
    server.serve((frames.Ask, frames.LaneEnded), messenger.tensor_receiver.handle)
    ipc = server.bind(f"ipc://{place.run_dir}/w/{spec.id}")
    tcp = server.bind(f"tcp://{place.listen_ip}:0") if place.listen_ip else ""
    return Member(server, Endpoint(place.host, ipc, tcp), messenger)
