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
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from rlinf_actors.cluster.connect import WorkerJob, set_worker_job
from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.messaging.broadcast import Broadcaster
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.shared_budgets import SharedBudgets
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.security.job import JobGate, job_name
from rlinf_actors.settings import Settings, log_level
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker.remote_peers import RemotePeers
from rlinf_actors.worker.shared_calls import PartsRelay
from rlinf_actors.worker.worker_server import RejectedPeers, WorkerServer

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
    from rlinf_actors.worker.children import Children
    from rlinf_actors.worker.device_lock import DeviceLock
    from rlinf_actors.worker.lease_guard import Guard, LeasePage
else:
    _StreamHandler = logging.StreamHandler  # no type arguments before Python 3.11


class WorkerContext(msgspec.Struct):
    """What the library keeps about this worker process or child member, for `Worker` and its base classes.

    In a child member, *spec* is a copy of the worker's spec with the child's own id and world size.
    """

    address: WorkerAddress
    spec: WorkerSpec
    place: WorkerPlace
    runtime: Runtime
    job: WorkerJob
    endpoint: Endpoint  # where the server listens
    messenger: Messenger
    broadcaster: Broadcaster
    server: WorkerServer
    extras: dict[str, Any]  # values that the owner sent with the class, such as hardware_infos
    environ: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(os.environ))  # before user code changes it
    ports: HeldPorts = msgspec.field(default_factory=HeldPorts)
    pid: int = msgspec.field(default_factory=os.getpid)  # a process forked from this one inherits the context
    device_lock: DeviceLock | None = None  # None in a child
    guard: Guard | None = None  # of a robot worker
    children: Children | None = None  # None in a child
    lease_page: LeasePage | None = None  # in a worker without robots None until user code asks for it
    connection: socket.socket | None = None  # of a child to its worker

    @property
    def tcp_port(self) -> int:
        """Port of the TCP socket on which this worker listens; 0 if it listens on none."""
        return int(self.endpoint.tcp.rpartition(":")[2] or 0)

    @property
    def is_child(self) -> bool:
        return len(self.address.rank_path) > 1

    @property
    def is_here(self) -> bool:
        """True in the worker or child member itself, False in a process that was forked from it."""
        return self.pid == os.getpid()


def accelerator_type(environ: Mapping[str, str]) -> AcceleratorType:
    """Return the accelerator type that a worker's environment names, NO_ACCEL if there is none."""
    return AcceleratorType.named(environ.get("ACCELERATOR_TYPE") or "NO_ACCEL")


_current: WorkerContext | None = None


def install(context: WorkerContext) -> None:
    """Make *context* the context of this process, which `current` returns.

    Called once, in a worker or a child member.
    """
    global _current
    _current = context
    set_worker_job(context.job)
    driver_logger()  # code that came from the driver may use it


def current() -> WorkerContext | None:
    """Return the context of this process or of the worker that it was forked from, None in a driver."""
    return _current


_FORMAT = "[%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"


def make_logger(name: str) -> logging.Logger:
    """Return the logger of the worker *name*. It writes to stderr, at the level of RLINF_LOG_LEVEL.

    The root logger gets none of its messages.
    """
    logger = logging.getLogger(f"rlinf_actors.worker.{name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
        _set_level(logger)
    return logger


def driver_logger() -> logging.Logger:
    """Return the logger that `Worker.logger` is in a driver. Its level is that of RLINF_LOG_LEVEL.

    The root logger gets its messages. While the program has not configured the root logger, they go to stderr.
    """
    logger = logging.getLogger("rlinf_actors.driver")
    if not logger.handlers:
        handler = _UnlessConfigured(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        _set_level(logger)
    return logger


class _UnlessConfigured(_StreamHandler):
    """Writes a message only if the root logger has no handler, so that no message is written twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def _set_level(logger: logging.Logger) -> None:
    try:
        logger.setLevel(log_level(os.environ))
    except ConfigError as error:  # set by the node: the driver and launch() check their own
        logger.setLevel("INFO")
        logger.warning("%s; the level is INFO", error)


def _trace(address: WorkerAddress, spec: WorkerSpec, place: WorkerPlace) -> None:
    """Record a trace of this process from now on. Without room for it, say so in the worker's log, and record none."""
    below = "".join(f"_{rank}" for rank in address.rank_path[1:])  # of a child member
    about = {"name": address.get_name(), "node": place.node, "host": place.host}
    try:
        recorder.start(spec.trace_events, about, place.trace_path + below)
    except OSError as error:
        make_logger(address.get_name()).warning("this process records no trace: %s: %s", place.trace_path, error)


SWITCH_INTERVAL_S = 0.0002
"""sys.setswitchinterval of workers: the I/O thread answers in 0.5 ms while user code computes in Python. With Python's
default of 0.005 s it takes 5 ms. User code gets 4 % slower.
"""


def start(
    address: WorkerAddress,
    spec: WorkerSpec,
    place: WorkerPlace,
    extras: dict[str, Any],
    *,
    parent: str = "",
    on_given_up: Callable[[str], None] = lambda reason: None,
    on_closed: Callable[[], None] = lambda: None,
) -> WorkerContext:
    """Start the I/O thread of this worker or child member, bind its sockets, and return its context.

    The caller must `install` the context.

    Args:
        address: address of the worker or child.
        spec: what to run, from the head; in a child a copy of the worker's spec.
        place: the worker's node and directories, from agentd.
        extras: values that the group's owner sends with the class. In a worker, the dict is filled when they arrive.
        parent: id of the worker that started this child, "" in a worker.
        on_given_up: called on the I/O thread with the reason when the head has declared the worker dead.
        on_closed: called when `_close` of the user's instance has returned.

    Raises:
        OSError, RuntimeError: this machine has run out of descriptors or threads.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    name = address.get_name()
    if place.trace_path:  # before the server is made, which looks whether this process is traced
        _trace(address, spec, place)
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
    emulated = NetEmulationConfig.from_environment(os.environ)
    if emulated is not None:
        budgets = SharedBudgets(place.budgets, spec.namespace) if emulated.bandwidth_groups else None
        runtime.emulate(emulated, name, spec.node_rank, budgets)
    job = WorkerJob(runtime, place.head, lambda: extras, spec.node_rank, name)

    async def listen() -> tuple[WorkerServer, Endpoint, Messenger]:
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
        server.serve((frames.Written,), messenger.written)
        server.serve((frames.ShareParts,), PartsRelay(runtime, server.shared_calls).handle)
        server.on_link_lost(messenger.link_lost)
        server.on_forgotten(messenger.link_forgotten)
        server.serve((frames.Ask, frames.LaneEnded), messenger.tensor_receiver.handle)
        ipc = server.bind(f"ipc://{place.run_dir}/w/{spec.id}")
        tcp = server.bind(f"tcp://{place.listen_ip}:0") if place.listen_ip else ""
        bulk = runtime.network.bulk.listen(place.listen_ip) if tcp and runtime.network.bulk is not None else 0
        return server, Endpoint(place.host, ipc, tcp, bulk), messenger

    try:
        server, endpoint, messenger = runtime.io.submit(listen()).result()
    except BaseException:
        runtime.close()
        raise
    broadcaster = Broadcaster(messenger, address)
    return WorkerContext(address, spec, place, runtime, job, endpoint, messenger, broadcaster, server, extras)
