"""What makes a process a member that others reach under a worker's address: its sockets, its messages, its place.

A worker and a child of a worker are made of the same parts; `worker.main` and `worker.membership` put them together.

A process that a worker has started becomes a member of the job: ``Worker(parent_address=...)``.

Theory of operation. The process connects to its worker (`worker.child_members` has the other end), which gives it
its place and the job's token, and makes a runtime of its own: sockets, an I/O thread, messages. Nothing that a forked
process has inherited of these is used or closed. It listens before it says so, and the constructor returns when others
find it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_actors.cluster.connect import WorkerJob, set_worker_job
from rlinf_actors.errors import ClusterTimeoutError, RemoteWireError, UsageError
from rlinf_actors.messaging.broadcast import Broadcaster
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint
from rlinf_actors.model.accelerator_table import GLOO_NIC_VARIABLE
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.security.job import JobGate, job_name
from rlinf_actors.settings import CHILDREN, Settings
from rlinf_actors.wire import child_protocol as packets
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import MAX_DEPTH, MAX_SIZE
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.server import FarPeers, RejectedPeers, WorkerServer

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
    server.far = FarPeers(runtime.watched.watch, job.connected, server.peer_gone)
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


ANSWER_S = 30.0
"""How long the worker may take to answer. Its I/O thread does, in a millisecond, whatever the user's code does."""
LEAVE_S = 5.0
"""How long the end of the process waits until its last messages and acknowledgements have arrived."""


def become_member(address: WorkerAddress, siblings: int) -> worker_context.WorkerContext | None:
    """Return the context of this process as the child *address*; None if no worker has started it.

    Raises:
        UsageError: no child can have that address, it is another child already, or its worker does not admit it.
        ClusterTimeoutError: its worker does not answer.
    """
    context = worker_context.current()
    if context is not None and context.is_here and (context.address == address or not context.is_child):
        return context
    path = os.environ.get(CHILDREN, "")
    if context is None and not path:
        return None
    name = address.get_name()
    if context is not None and context.is_here:
        raise UsageError(f"this process is {context.address.get_name()} already: {name} needs a process of its own")
    if not all(0 <= rank <= MAX_SIZE for rank in (*address.rank_path, siblings)) or len(address.rank_path) > MAX_DEPTH:
        raise UsageError(
            f"{name} cannot be the name of one of {siblings} children: ranks and world_size are from 0 to {MAX_SIZE}, "
            f"and a path has at most {MAX_DEPTH} ranks"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        return _enter(sock, path, address, siblings)
    except (OSError, RemoteWireError) as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise ClusterTimeoutError(f"the worker of {name} has not answered its child for {ANSWER_S:g} s") from None
        raise UsageError(
            f"this process cannot become {name}: its worker does not listen for it ({error}). {CHILDREN} in its "
            "environment must be as the worker has it, and the worker must run"
        ) from None
    except BaseException:
        sock.close()
        raise


def _enter(sock: socket.socket, path: str, address: WorkerAddress, siblings: int) -> worker_context.WorkerContext:
    sock.settimeout(ANSWER_S)
    sock.connect(path)
    worker = WorkerAddress(address.root_group_name, address.rank_path[0])
    _, uid, _ = packets.CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(f"user {uid} listens at {path}")
    granted, extras = _asked(sock, packets.Enter(worker.get_name(), list(address.rank_path[1:]), siblings))
    if not isinstance(granted, packets.Granted):
        raise RemoteWireError(f"it said {type(granted).__name__}")
    context, job, endpoint = _bring_up(granted, extras, address)
    try:
        _asked(sock, packets.Listening(endpoint))
    except BaseException:
        context.runtime.close()
        raise
    worker_context.install(context)
    set_worker_job(job)
    context.connection = sock  # open as long as this process: its end is seen by that too
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # a forked child of multiprocessing runs no atexit functions; others run these there too
        util.Finalize(None, _leave, (context,), exitpriority=-100)
    else:
        atexit.register(_leave, context)
    return context


def _asked(sock: socket.socket, packet: packets.Enter | packets.Listening) -> tuple[packets.Answer, bytes]:
    """Say something to the worker; return its answer, and what is in the file that comes with it.

    Raises:
        UsageError: the answer is no; with the reason.
        OSError, RemoteWireError: there is none.
    """
    with contextlib.suppress(BrokenPipeError):  # it has said no, and read nothing
        sock.send(packets.encode(packet))
    try:
        data, fds, _flags, _address = socket.recv_fds(sock, packets.MAX_PACKET, 1)
    except ConnectionResetError:  # told once, before what it had said
        data, fds, _flags, _address = socket.recv_fds(sock, packets.MAX_PACKET, 1)
    attached = b""
    for fd in fds:
        attached = os.pread(fd, os.fstat(fd).st_size, 0)  # its position is shared with siblings that read it too
        os.close(fd)
    if not data:
        raise ConnectionResetError("it closed the connection")
    answer = packets.decode_answer(data)
    if isinstance(answer, packets.Denied):
        raise UsageError(answer.text)
    return answer, attached


def _bring_up(
    granted: packets.Granted, extras_parts: bytes, address: WorkerAddress
) -> tuple[worker_context.WorkerContext, WorkerJob, Endpoint]:
    """Make the runtime of this process, and listen."""
    spec, place, name = granted.spec, granted.place, address.get_name()
    runtime, security = new_runtime(spec, place, parent=granted.parent)
    forked_from = worker_context.current()
    extras = (
        payload.decode(AuthenticatedParts(msgspec.msgpack.decode(extras_parts, type=list[bytes])))
        if extras_parts
        else {}
    )
    job = WorkerJob(runtime, place.head, lambda: extras, spec.node_rank, name)
    try:
        listening = listen(name, spec, place, runtime, security, job)
        member = runtime.io.submit(listening).result()
    except BaseException:
        runtime.close()
        raise
    member.server.refuse(UsageError(f"{name} is a child of a worker, and takes no calls: call its worker"))
    tcp = member.endpoint.tcp
    context = worker_context.WorkerContext(
        address=address,
        spec=spec,
        place=place,
        runtime=runtime,
        environ=dict(os.environ),
        ports=HeldPorts(),
        messenger=member.messenger,
        broadcaster=Broadcaster(member.messenger, address),
        server=member.server,
        device_lock=None,
        extras=extras,
        tcp_port=int(tcp.rpartition(":")[2]) if tcp else 0,
        lease_page=forked_from.lease_page if forked_from is not None else None,
    )
    return context, job, member.endpoint


class _Heard:
    """Waits until a peer has read all that was said to it, or something else that was begun has ended."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """See runtime.peer.Pending. Loop thread."""
        self._end()
        return True

    def fail(self, _: object) -> None:
        """The peer is gone, or it is over in another way. Any thread."""
        self.done.get_loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _settle(context: worker_context.WorkerContext, begun: list[concurrent.futures.Future[Any]]) -> None:
    """Wait until what was sent has arrived: those that it goes to are found, and each answers a question behind it.

    Args:
        context: of this process.
        begun: what its I/O thread was doing: it looks for groups and channels, perhaps.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + LEAVE_S
    waits: list[_Heard] = []

    def one() -> _Heard:
        waits.append(_Heard())
        return waits[-1]

    async def all_of_them() -> None:
        if waits:
            await asyncio.wait([heard.done for heard in waits], timeout=max(0.0, end - loop.time()))
        waits.clear()

    for future in begun:
        future.add_done_callback(one().fail)
    await all_of_them()
    groups, children = context.runtime.groups.all(), context.messenger.directory.children
    children.follow(lambda: one().fail)
    await all_of_them()
    for peer in [*(peer for group in groups for peer in group.peers), *children.all()]:
        if peer.wanted and peer.error is None:
            peer.send(frames.WhatRuns(peer.open(one())))
    await all_of_them()


def _leave(context: worker_context.WorkerContext) -> None:
    """The process ends: let its last words arrive, and say goodbye."""
    if not context.is_here or context.runtime.closed:
        return
    io = context.runtime.io
    io.submit(_settle(context, io.under_way())).result()
    context.runtime.close()
