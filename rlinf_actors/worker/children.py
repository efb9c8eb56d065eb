"""Child members: how a process that a worker has started becomes a member of the worker's job.

Theory of operation. A worker listens on a unix socket in its run directory (mode 0700). The variable
RLINF_ACTORS_CHILDREN (`settings.CHILDREN`) has the path. A process that constructs ``Worker(parent_address=...)``
connects to it (`become_member`). Before the worker reads a byte (`Children`), it asks the kernel for the process: only
a process of the same user that descends from this worker may continue. The child sends Enter with its address. The
worker answers Granted with its spec and place, the job's token, and a file with the extras of the class. The child
makes a runtime of its own, binds sockets, and sends Listening. Peers ask the worker where a child listens (WhereIs);
`child_table` has the answers.

In the worker everything but `hand_out` runs on the I/O thread, nothing is unpickled, and nothing waits: a silent child
occupies only its own path. The child neither closes nor uses what it inherited by a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import errno
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.errors import ClusterTimeoutError, RemoteWireError, UsageError
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import call_soon
from rlinf_actors.net.unix_sockets import SUFFIX, peer_of
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire import child_protocol as packets
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.endings import ending
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import MAX_DEPTH, MAX_SIZE
from rlinf_actors.wire.template_protocol import NodeRegistered, WorkerPlace
from rlinf_actors.wire.values import ExitReport, WorkerSpec
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.child_table import Child, ChildRefused, ChildTable, Outgoing

log = logging.getLogger(__name__)

BACKLOG = 512
"""Most connections that wait for a busy I/O thread. Further children wait in `_connect`."""
AGAIN_S = 0.5
LEFT_S = 2.0
"""Seconds that a process stays a member after its connection closed. Usually the process is about to end."""


class Children:
    """Accepts processes that this worker has started as its child members. Runs in the worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: WorkerSpec,
        place: WorkerPlace,
        send: Callable[[bytes, frames.AnyFrame], None],
        rejected: Callable[[str], None],
    ) -> None:
        self.name = f"{spec.group}:{spec.rank}"
        self.table = ChildTable(spec.id, self.name)
        self.loop = loop
        self._spec = spec
        self._place = place
        self._send = send
        self._rejected = rejected
        self._registered: set[_Connection] = set()  # of children that listen
        self._extras = os.memfd_create("rlinf-extras")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(packets.socket_path(place.run_dir, spec.id))
        self._listener.listen(BACKLOG)
        loop.add_reader(self._listener, self._accept)

    def asked(self, link: bytes, question: frames.WhereIs, _parts: object) -> None:
        self.send_all(self.table.asked(link, question))

    def send_all(self, answers: list[Outgoing]) -> None:
        for link, frame in answers:
            self._send(link, frame)

    def tell_all(self, packet: NodeRegistered) -> None:
        """Pass a packet of this worker's agentd on to all children."""
        for connection in self._registered:
            connection.tell(packet)

    def registered(self, connection: _Connection, here: bool = True) -> None:
        """Note that the child at *connection* listens, or with *here* False that its connection has ended."""
        (self._registered.add if here else self._registered.discard)(connection)

    def hand_out(self, parts: Sequence[Buffer]) -> None:
        """Store *parts*, the pickled values that the group's owner sent with the class, for all later children.

        Each child that is admitted gets a copy of these values. Runs on the main thread.
        """
        with open(self._extras, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode([bytes(part) for part in parts]))

    def grant(self, sock: socket.socket, child: Child, siblings: int) -> None:
        spec = msgspec.structs.replace(self._spec, id=child.id, world_size=siblings, env={}, sys_path=(), preload=())
        try_send(sock, packets.Granted(self._spec.id, spec, self._place), self._extras)

    def remove_socket(self, child: Child) -> None:
        path = f"{self._place.run_dir}/w/{child.id}"
        for socket_path in (path, path + SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket_path)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.warning("%s takes no children for the moment: %s", self.name, explain(error))
            self.loop.remove_reader(self._listener)
            self.loop.call_later(AGAIN_S, self.loop.add_reader, self._listener, self._accept)
            return
        sock.setblocking(False)
        pid, uid = peer_of(sock)
        try:
            pidfd = procfs.pidfd_of(pid) if pid > 0 else -1
        except ProcessLookupError:
            sock.close()
            return
        except OSError as error:
            self._deny(sock, f"its end could not be noticed: {explain(error)}")
            return
        try:
            found = procfs.stat_of(pid) if pidfd >= 0 else None
        except (FileNotFoundError, ProcessLookupError):
            found = None
        except OSError as error:
            os.close(pidfd)
            self._deny(sock, f"its parent processes cannot be read: {explain(error)}")
            return
        ours = found is not None and uid == os.geteuid() and procfs.is_below(pid, os.getpid())
        if pidfd >= 0 and procfs.has_ended(pidfd):  # it may have been a child: its entry in /proc is gone
            sock.close()
            os.close(pidfd)
            return
        if found is None or not ours:
            self._rejected(f"a process of user {uid} as a child: it does not come from this worker")
            self._deny(sock, f"process {pid} does not come from {self.name}, which alone admits its own children")
            if pidfd >= 0:
                os.close(pidfd)
            return
        _Connection(self, sock, pidfd, found)

    def _deny(self, sock: socket.socket, why: str) -> None:
        with sock:
            try_send(sock, packets.Denied(why))


class _Connection:
    """The worker's connection to one descendant process, from its first packet to its end."""

    def __init__(self, children: Children, sock: socket.socket, pidfd: int, process: procfs.Stat) -> None:
        self._children = children
        self._table = children.table
        self._loop = children.loop
        self._socket = sock
        self._pidfd = pidfd
        self._process = process
        self._child: Child | None = None
        self._late: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._readable)
        self._loop.add_reader(pidfd, self._ended)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(packets.MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                self._disconnected()
            elif self._child is None:
                self._enter(packets.decode(data, packets.Enter))
            elif self._child.endpoint is None:
                endpoint = packets.decode(data, packets.Listening).endpoint
                self._children.send_all(self._table.listens(self._child.id, endpoint))
                try_send(self._socket, packets.Registered())
                self._children.registered(self)
        except RemoteWireError as error:
            log.warning("process %d, a child of this worker, cannot take part in its job: %s", self._process.pid, error)
            self._leave(ExitReport("exited", reason="it sent an invalid packet"))

    def tell(self, packet: NodeRegistered) -> None:
        try_send(self._socket, packet)

    def _enter(self, asked: packets.Enter) -> None:
        children, pid = self._children, self._process.pid
        try:
            if asked.parent != children.name:
                raise ChildRefused(
                    f"process {pid} comes from {children.name}, not from {asked.parent}: give that as parent"
                )
            child = self._table.reserve(tuple(asked.path), pid)
        except ChildRefused as error:
            try_send(self._socket, packets.Denied(str(error)))
            self._close()
            return
        self._child = child
        children.grant(self._socket, child, asked.siblings)

    def _disconnected(self) -> None:
        """Handle the end of the connection to the process.

        If the process is a child that listens, wait up to LEFT_S seconds for its end, to report its exit code.
        Otherwise record its end at once.
        """
        self._loop.remove_reader(self._socket)
        self._children.registered(self, False)
        if self._child is None or self._child.endpoint is None:
            self._leave(ExitReport("exited"))
        else:
            reason = f"process {self._process.pid} runs on without its connections"  # another program, by exec
            self._late = self._loop.call_later(LEFT_S, self._leave, ExitReport("exited", reason=reason))

    def _ended(self) -> None:
        how = procfs.exit_of(self._pidfd, self._process.pid, self._process.started)
        code, signal = how or (None, None)
        report = ExitReport("exited" if signal is None else "signalled", code, signal)
        if self._child is not None and self._child.endpoint is not None and code != 0:
            log.warning("%s (process %d) %s", self._table.name_of(self._child.path), self._process.pid, ending(report))
        self._leave(report)

    def _leave(self, report: ExitReport) -> None:
        self._close()
        if self._child is not None:
            self._children.send_all(self._table.ended(self._child.id, report))
            self._children.remove_socket(self._child)

    def _close(self) -> None:
        self._children.registered(self, False)
        if self._late is not None:
            self._late.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self._pidfd)
        self._socket.close()
        os.close(self._pidfd)


def try_send(sock: socket.socket, packet: packets.Answer, *files: int) -> None:
    try:
        socket.send_fds(sock, [packets.encode(packet)], files)
    except (BlockingIOError, ConnectionError):
        return


ANSWER_S = 30.0
"""Seconds that the worker has to answer its child. Its I/O thread answers in a millisecond while user code runs."""
LEAVE_S = 5.0
"""Most seconds that a child waits at its end until the messages that it sent have arrived."""


def become_member(address: WorkerAddress, siblings: int) -> worker_context.WorkerContext | None:
    """Make this process the child member *address*, and return its context; None if no worker has started this process.

    Blocks for two round trips to the worker. *siblings* is the number of children at that address, the child's world
    size. In the worker itself, return the worker's context.

    Raises:
        UsageError: the address is invalid, the process is another child already, or the worker denies it.
        ClusterTimeoutError: the worker does not answer within ANSWER_S seconds.
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
    _connect(sock, path)
    sock.settimeout(ANSWER_S)
    worker = WorkerAddress(address.root_group_name, address.rank_path[0])
    _, uid = peer_of(sock)
    if uid != os.geteuid():
        raise PermissionError(f"user {uid} listens at {path}")
    granted, attached = _request(sock, packets.Enter(worker.get_name(), list(address.rank_path[1:]), siblings))
    if not isinstance(granted, packets.Granted):
        raise RemoteWireError(f"it answered {type(granted).__name__}")
    parts = msgspec.msgpack.decode(attached, type=list[bytes]) if attached else []
    extras = payload.decode(AuthenticatedParts(parts)) if parts else {}
    from rlinf_actors.worker.opening import open_worker  # here, so that a driver does not load it

    context = open_worker(address, granted.spec, granted.place, parent=granted.parent)
    context.take(extras)
    forked_from = worker_context.current()
    context.lease_page = forked_from.lease_page if forked_from is not None else None
    refusal = UsageError(f"{address.get_name()} is a child of a worker, and takes no calls: call its worker")
    context.server.refuse(refusal)
    try:
        _request(sock, packets.Listening(context.endpoint))
    except BaseException:
        context.runtime.close()
        raise
    worker_context.install(context)
    context.connection = sock  # stays open until this process ends: the worker notices
    context.runtime.io.call(_listen, context)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # a child forked by multiprocessing runs these, and no atexit functions
        util.Finalize(None, _leave, (context,), exitpriority=-100)
    else:
        atexit.register(_leave, context)
    return context


def _connect(sock: socket.socket, path: str) -> None:
    """Connect *sock* to the worker's socket at *path*.

    If the worker's backlog stays full for ANSWER_S seconds, raise TimeoutError. The limit is set by SO_SNDTIMEO. With
    Python's own timeout the socket would be non-blocking, and `connect` would fail at once when the backlog is full.
    """
    sock.setblocking(True)  # user code may have set a default timeout
    end = time.monotonic() + ANSWER_S
    while (left := end - time.monotonic()) >= 1e-6:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(left), int(left % 1 * 1e6)))
        try:
            sock.connect(path)
            sock.getpeername()
            return
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # else a signal ended the wait, of which Python's connect says nothing
                raise
    raise TimeoutError


def _request(sock: socket.socket, packet: packets.Enter | packets.Listening) -> tuple[packets.Answer, bytes]:
    """Send *packet* to the worker. Return the answer, and the content of the file that came with it, b"" for none."""
    with contextlib.suppress(BrokenPipeError):  # the worker has denied it, and read nothing
        sock.send(packets.encode(packet))
    try:
        data, fds, _flags, _address = socket.recv_fds(sock, packets.MAX_PACKET, 1)
    except ConnectionResetError:  # reported once, before the packets that the worker sent
        data, fds, _flags, _address = socket.recv_fds(sock, packets.MAX_PACKET, 1)
    attached = b""
    for fd in fds:
        attached = os.pread(fd, os.fstat(fd).st_size, 0)  # siblings that read it share its position
        os.close(fd)
    if not data:
        raise ConnectionResetError("it closed the connection")
    answer = packets.decode_answer(data)
    if isinstance(answer, packets.Denied):
        raise UsageError(answer.text)
    return answer, attached


def _listen(context: worker_context.WorkerContext) -> None:
    """Handle what the worker sends to this child from now on. I/O thread."""
    loop, sock = asyncio.get_running_loop(), context.connection
    assert sock is not None

    def readable() -> None:
        try:
            data = sock.recv(packets.MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the worker has ended
            loop.remove_reader(sock.fileno())
            return
        try:
            packet = packets.decode_answer(data)
        except RemoteWireError as error:
            log.warning("dropped a packet of this process's worker: %s", error)
            return
        if isinstance(packet, NodeRegistered):
            context.runtime.node_registered(packet.epoch, packet.again)

    loop.add_reader(sock.fileno(), readable)


class _Answered:
    """Waits for one answer of a peer: the future `done` is set when the peer answers or has died."""

    anywhere = False

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self._end()
        return True

    def fail(self, _: object) -> None:
        call_soon(self.done.get_loop(), self._end)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _settle(context: worker_context.WorkerContext, begun: list[concurrent.futures.Future[Any]]) -> None:
    """Wait until the messages that this process sent have arrived, LEAVE_S seconds at most.

    The function waits for three things in turn: the operations in *begun*, such as the search for a group; the
    addresses of child members that messages are sent to; and an answer of each peer to a question that is sent after
    all messages.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + LEAVE_S
    waits: list[_Answered] = []

    def wait() -> _Answered:
        waits.append(_Answered())
        return waits[-1]

    async def all_waits() -> None:
        if waits:
            await asyncio.wait([one.done for one in waits], timeout=max(0.0, end - loop.time()))
        waits.clear()

    for future in begun:
        future.add_done_callback(wait().fail)
    await all_waits()
    groups, children = context.runtime.groups.all(), context.messenger.directory.children
    children.follow(lambda: wait().fail)
    await all_waits()
    for peer in [*(peer for group in groups for peer in group.peers), *children.all()]:
        if peer.wanted and peer.error is None:
            peer.send(frames.WhatRuns(peer.open(wait())))
    await all_waits()


def _leave(context: worker_context.WorkerContext) -> None:
    """Wait until the last messages of this child process have arrived, then close its runtime.

    Runs when the process ends.
    """
    if not context.is_here or context.runtime.closed:
        return
    io = context.runtime.io
    io.submit(_settle(context, io.under_way())).result()
    context.runtime.close()
