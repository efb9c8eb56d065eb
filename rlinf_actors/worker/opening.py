"""Open a worker process or child member: start its I/O thread and runtime, bind its sockets, make its messenger.

Apart from `worker.context`, so that a driver, which imports Worker, does not load the stack of messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_actors.cluster.connect import WorkerJob
from rlinf_actors.config.net_emulation_config import NetEmulationConfig
from rlinf_actors.exhaustion import explain
from rlinf_actors.messaging.broadcaster import Broadcaster
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.receive_into import target_for
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.net.shared_budgets import SharedBudgets
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.security.job import JobGate, job_name
from rlinf_actors.settings import Settings
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.wire.worker_questions import RecordTrace
from rlinf_actors.worker.context import WorkerContext, make_logger
from rlinf_actors.worker.joining import RejectedPeers
from rlinf_actors.worker.remote_peers import RemotePeers
from rlinf_actors.worker.shared_calls import PartsRelay
from rlinf_actors.worker.worker_server import WorkerServer


def _trace(address: WorkerAddress, spec: WorkerSpec, place: WorkerPlace) -> None:
    """Record a trace of this process from now on. Without room for it, say so in the worker's log, and record none."""
    below = "".join(f"_{rank}" for rank in address.rank_path[1:])  # of a child member
    if below and not spec.trace_events:
        return  # `trace stop` reaches only workers, so a child member would record for ever
    events = place.trace_events or spec.trace_events  # an agentd of the version before says only this one
    try:
        active = recorder.start(events, _about(address, place), place.trace_path + below)
        active.of_job = bool(spec.trace_events)
    except OSError as error:
        make_logger(address.get_name()).warning("this process records no trace: %s: %s", place.trace_path, error)


def _about(address: WorkerAddress, place: WorkerPlace) -> dict[str, str]:
    return {"name": address.get_name(), "node": place.node, "host": place.host}


def switch_trace(asked: RecordTrace, context: WorkerContext) -> str:
    """Record a trace of this worker from now on, or no longer, as agentd asks. Return why it records none, "" if it
    does. I/O thread.
    """
    fault = ""
    if not asked.path and not context.spec.trace_events:
        recorder.stop()
    elif asked.path and not _records(asked.path):
        recorder.stop()
        try:
            recorder.start(asked.events, _about(context.address, context.place), asked.path).of_job = False
        except OSError as error:
            fault = f"{asked.path}: {explain(error)}"
    context.server.trace_changed()
    return fault


def _records(path: str) -> bool:
    """Return True if this process records in that file, or because its driver's configuration says so."""
    return recorder.active is not None and (recorder.active.of_job or recorder.active.path == path)


SWITCH_INTERVAL_S = 0.0002
"""sys.setswitchinterval of workers: the I/O thread answers in 0.5 ms while user code computes in Python. With Python's
default of 0.005 s it takes 5 ms. User code gets 4 % slower.
"""


def _runtime(
    name: str,
    spec: WorkerSpec,
    place: WorkerPlace,
    security: Security,
    parent: str,
    on_given_up: Callable[[str], None],
) -> Runtime:
    """Start the runtime of the worker or child *name*, with the emulated network that its variables ask for."""
    runtime = Runtime(
        "worker",
        spec.namespace,
        worker_id=spec.id,
        parent=parent,
        token=spec.token,
        security=security,
        on_given_up=on_given_up,
        claims=spec.claims,
    )
    emulated = NetEmulationConfig.from_environment(os.environ)
    if emulated is not None:
        budgets = SharedBudgets(place.budgets, spec.namespace) if emulated.bandwidth_groups else None
        runtime.emulate(emulated, name, spec.node_rank, budgets)
    return runtime


def open_worker(
    address: WorkerAddress,
    spec: WorkerSpec,
    place: WorkerPlace,
    *,
    parent: str = "",
    on_given_up: Callable[[str], None] = lambda reason: None,
    on_closed: Callable[[Callable[[], None]], None] = lambda answer: answer(),
) -> WorkerContext:
    """Start the I/O thread of this worker or child member, bind its sockets, and return its context.

    The caller must `install` the context.

    Args:
        address: address of the worker or child.
        spec: what to run, from the head; in a child a copy of the worker's spec.
        place: the worker's node and directories, from agentd.
        parent: id of the worker that started this child, "" in a worker.
        on_given_up: called on the I/O thread with the reason when the head has declared the worker dead.
        on_closed: called when `_close` of the user's instance has returned, with a function that answers the call.

    Raises:
        OSError, RuntimeError: this machine has run out of descriptors or threads.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    name = address.get_name()
    if place.trace_path:  # before the server is made, which looks whether this process is traced
        _trace(address, spec, place)
    security = Security.of_worker(spec.token, place.head_key, place.head, place.listen_ip)
    runtime = _runtime(name, spec, place, security, parent, on_given_up)
    extras: dict[str, Any] = {}
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
        server.serve((frames.UserMessage,), messenger.arrived, messenger.arrives_anywhere)
        server.serve((frames.Written,), messenger.arriving.written)
        server.target_for = partial(target_for, messenger)
        server.serve((frames.ShareParts,), PartsRelay(runtime, server.shared_calls).handle)
        messenger.when_read = server.unread.when_read
        server.on_link_lost(messenger.link_lost)
        server.on_forgotten(messenger.link_forgotten)
        server.serve((frames.Ask, frames.LaneEnded, frames.LaneKey), messenger.tensor_receiver.handle)
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
    runtime.io.call(server.serve, (frames.BroadcastFailed,), broadcaster.told)
    return WorkerContext(address, spec, place, runtime, job, endpoint, messenger, broadcaster, server, extras)
