"""The context of a worker process or child member: its address, its runtime, and the server that peers connect to.

`worker.main` (in a worker) and `worker.children` (in a child member) make the runtime and the server, and install the
context before any code of the user's class runs.
"""

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
    from rlinf_actors.worker.children import Children
    from rlinf_actors.worker.device_lock import DeviceLock
    from rlinf_actors.worker.lease_guard import Guard, LeasePage


@dataclass
class WorkerContext:
    """The state of one worker process or child member.

    Attributes:
        address: group and rank path.
        spec, place: spec and place of the worker. In a child, the spec has the child's own id.
        runtime: the connections of this process.
        environ: the environment as agentd made it, with the ranks.
        ports: TCP ports that `acquire_free_port` has reserved.
        messenger, broadcaster: send and receive messages and broadcasts.
        server: accepts connections of peers.
        device_lock: lock over the worker's accelerators; None in a child.
        extras: values that the owner sent with the class, such as hardware_infos.
        tcp_port: port of the server's TCP socket, 0 without one.
        pid: pid of the worker or child. A process forked from it inherits the context, and has another pid.
        guard: guard of a robot worker, None in other processes.
        children: accepts child members; None in a child.
        lease_page: lease page of a robot worker. In other workers None until user code asks for it.
        connection: socket of a child to its worker, None in a worker.
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
        return len(self.address.rank_path) > 1

    @property
    def is_here(self) -> bool:
        """True in the worker or child itself, False in a process forked from it."""
        return self.pid == os.getpid()

    def accelerator_type(self) -> AcceleratorType:
        return accelerator_type(self.environ)


def accelerator_type(environ: Mapping[str, str]) -> AcceleratorType:
    """Return the accelerator type that a worker's environment names, NO_ACCEL if there is none."""
    return AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")


_current: WorkerContext | None = None


def install(context: WorkerContext) -> None:
    """Set the context of this process. Call once, in a worker or a child member."""
    global _current
    _current = context


def current() -> WorkerContext | None:
    """Return the context of this process or of the worker that it was forked from, None in a driver."""
    return _current


def make_logger(name: str) -> logging.Logger:
    """Return a worker's logger. It writes to stderr at the level RLINF_LOG_LEVEL, not through the root logger."""
    logger = logging.getLogger(f"rlinf_actors.worker.{name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        try:
            logger.setLevel(log_level(os.environ))
        except ConfigError as error:  # set by the node: the driver and launch() check their own
            logger.setLevel("INFO")
            logger.warning("%s; the level is INFO", error)
    return logger


SWITCH_INTERVAL_S = 0.0002
"""sys.setswitchinterval of workers: the I/O thread answers in 0.5 ms while user code computes in Python. With Python's
default of 0.005 s it takes 5 ms. User code gets 4 % slower.
"""


def new_runtime(
    spec: WorkerSpec, place: WorkerPlace, on_given_up: Callable[[str], None] = lambda reason: None, parent: str = ""
) -> tuple[Runtime, Security]:
    """Return the runtime and socket keys of the worker of *spec*, or of a child of the worker with the id *parent*."""
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


def listen(
    name: str,
    spec: WorkerSpec,
    place: WorkerPlace,
    runtime: Runtime,
    security: Security,
    job: WorkerJob,
    on_closed: Callable[[], None] = lambda: None,
) -> tuple[WorkerServer, Endpoint, Messenger]:
    """Bind the sockets of this worker or child, and serve links and messages. Runs on the I/O thread.

    Args:
        name: ``group:rank``, or the name of a child.
        spec, place, runtime, security, job: those of this process.
        on_closed: called when `_close` of the user's instance has returned.
    """
    rejected = RejectedPeers()
    gate = JobGate(security.pair.public, spec.namespace, rejected.add) if security.pair is not None else None
    server = WorkerServer(runtime.network, spec.id, name, spec.token, on_closed, gate, rejected)
    server.remote_peers = RemotePeers(runtime.watched.watch, job.connected, server.peer_gone)
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
    return server, Endpoint(place.host, ipc, tcp), messenger


def tcp_port(endpoint: Endpoint) -> int:
    return int(endpoint.tcp.rpartition(":")[2]) if endpoint.tcp else 0
