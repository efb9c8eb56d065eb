"""Child members: processes that this worker has started become members of its job here. I/O thread only.

Theory of operation. The worker listens on a unix socket in its run directory (mode 0700), whose path is in its
environment. A process that constructs ``Worker(parent_address=...)`` connects to it. The worker asks the kernel who
that is, before it reads a byte: only a process of its own user that descends from this very worker may go on. It gets
the worker's spec and place, with the job's token in them, brings up a runtime of its own (worker.child), and says where
it listens. Peers ask the worker where a child is (WhereIs), and hear from it when the child ends.

Nothing is unpickled here, and nobody is waited for: a child that says nothing holds its own place alone.

A worker's children that are members: who they are, and who asks for them. Pure.

A child is named by its path, the ranks below the worker's own. A peer that asks for a path hears where that child is,
at the latest when it registers, and then once that it has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.cluster.connect import WorkerJob, set_worker_job
from rlinf_actors.errors import ClusterTimeoutError, RemoteWireError, UsageError
from rlinf_actors.exhaustion import explain
from rlinf_actors.messaging.broadcast import Broadcaster
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.unix_sockets import peer_of
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire import child_protocol as packets
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import MAX_DEPTH, MAX_SIZE
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerSpec, ending
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.context import listen, new_runtime

MAX_CHILDREN = 4096
"""Children of one worker at a time, and ended ones that it remembers."""
MAX_QUESTIONS = 4096
"""Open questions of one link. A peer asks once for each child."""

Path = tuple[int, ...]
Tell = tuple[bytes, frames.AnyFrame]
"""(link, what to say there)."""


class ChildRefused(Exception):
    """A process may not be that child; the text says why."""


@dataclass
class Child:
    """One child. `endpoint` is None until it listens, `exit` until it has ended."""

    id: str
    path: Path
    pid: int
    endpoint: Endpoint | None = None
    exit: ExitReport | None = None


class ChildTable:
    """All children of one worker.

    Args:
        worker_id, name: of the worker.
    """

    def __init__(self, worker_id: str, name: str) -> None:
        self._worker_id = worker_id
        self._name = name
        self._numbers = itertools.count(1)
        self._living: dict[str, Child] = {}  # by id
        self._at: dict[Path, Child] = {}  # the living one, or the last that ended; oldest first
        self._questions: dict[bytes, dict[int, Path]] = {}
        self._askers: dict[Path, dict[tuple[bytes, int], None]] = {}

    def name_of(self, path: Sequence[int]) -> str:
        """Return the name of the child at *path*."""
        return ":".join([self._name, *map(str, path)])

    def reserve(self, path: Path, pid: int) -> Child:
        """Return the child that process *pid* is going to be.

        Raises:
            ChildRefused: another process is that child, this process is another child already, or there are too many.
        """
        known = self._at.get(path)
        if known is not None and known.exit is None:
            raise ChildRefused(
                f"{self.name_of(path)} is process {known.pid}, which runs: end that one first, or take another rank"
            )
        other = next((child for child in self._living.values() if child.pid == pid), None)
        if other is not None:  # two of its threads may ask at once, so the process itself cannot know
            raise ChildRefused(
                f"process {pid} is {self.name_of(other.path)} already: {self.name_of(path)} needs a process of its own"
            )
        if len(self._living) >= MAX_CHILDREN:
            raise ChildRefused(f"{self._name} has {MAX_CHILDREN} children, as many as a worker may have")
        child = Child(f"{self._worker_id}_{next(self._numbers)}", path, pid)
        self._living[child.id] = child
        self._at.pop(path, None)
        self._at[path] = child
        if len(self._at) > 2 * MAX_CHILDREN:
            ended = [path for path, one in self._at.items() if one.exit is not None]
            for path in ended[: len(ended) - MAX_CHILDREN]:
                del self._at[path]
        return child

    def listens(self, id: str, endpoint: Endpoint) -> list[Tell]:
        """The child can be reached. Return what to tell the peers that asked for it."""
        child = self._living[id]
        child.endpoint = endpoint
        return [(link, frames.ChildIs(number, id, endpoint)) for link, number in self._askers.get(child.path, ())]

    def ended(self, id: str, exit: ExitReport) -> list[Tell]:
        """The child has ended. Return what to tell the peers that asked for it.

        They wait on if it has never listened: another process may become that child.
        """
        child = self._living.pop(id)
        child.exit = exit
        if child.endpoint is None:
            del self._at[child.path]
            return []
        asked = self._askers.pop(child.path, {})
        for link, number in asked:
            del self._questions[link][number]
        return [(link, frames.ChildEnded(number, id, exit)) for link, number in asked]

    def asked(self, link: bytes, question: frames.WhereIs) -> list[Tell]:
        """A peer asks where a child is. Return the answer, nothing if that has to wait."""
        path, number = tuple(question.path), question.id
        child = self._at.get(path)
        if child is not None and child.exit is not None:
            return [(link, frames.ChildEnded(number, child.id, child.exit))]
        open_ = self._questions.setdefault(link, {})
        if number in open_:
            return []  # each has a number of its own
        if len(open_) >= MAX_QUESTIONS:
            why = f"{self._name} was asked for more than {MAX_QUESTIONS} children by one process"
            return [(link, frames.ChildEnded(number, "", ExitReport("exited", reason=why)))]
        open_[number] = path
        self._askers.setdefault(path, {})[link, number] = None
        if child is None or child.endpoint is None:
            return []
        return [(link, frames.ChildIs(number, child.id, child.endpoint))]

    def forget(self, link: bytes) -> None:
        """Forget the questions that came by a link: its other end has ended."""
        for number, path in self._questions.pop(link, {}).items():
            asked = self._askers[path]
            del asked[link, number]
            if not asked:
                del self._askers[path]


log = logging.getLogger(__name__)

BACKLOG = 512
"""Connections that wait while the I/O thread is held up; more are refused by the kernel, and try again."""
AGAIN_S = 0.5
"""When to accept again where no descriptor was left."""
LEFT_S = 2.0
"""How long a process whose connection was closed stays a member. As a rule it ends, and how shows in a moment."""


class Children:
    """A worker's children.

    Args:
        loop: of the I/O thread.
        spec, place: of the worker.
        send: answers a peer.
        refused: told what follows "refused" in a line for people.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: WorkerSpec,
        place: WorkerPlace,
        send: Callable[[bytes, frames.AnyFrame], None],
        refused: Callable[[str], None],
    ) -> None:
        self.name = f"{spec.group}:{spec.rank}"
        self.table = ChildTable(spec.id, self.name)
        self.loop = loop
        self._spec = spec
        self._place = place
        self._send = send
        self._refused = refused
        self._extras = os.memfd_create("rlinf-extras")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(packets.socket_path(place.run_dir, spec.id))
        self._listener.listen(BACKLOG)
        loop.add_reader(self._listener, self._accept)

    def asked(self, link: bytes, question: frames.WhereIs, _parts: object) -> None:
        """A peer asks where a child is."""
        self.tell(self.table.asked(link, question))

    def tell(self, told: list[Tell]) -> None:
        """Say to peers what the table decided."""
        for link, frame in told:
            self._send(link, frame)

    def hand_out(self, parts: Sequence[Buffer]) -> None:
        """Give the parts of what the group's owner sent along with the class to children from now on. Main thread."""
        with open(self._extras, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode([bytes(part) for part in parts]))

    def grant(self, sock: socket.socket, child: Child, siblings: int) -> None:
        """Give the process what it needs to be that child. Its environment and import path are its own."""
        spec = msgspec.structs.replace(self._spec, id=child.id, world_size=siblings, env={}, sys_path=[], preload=[])
        try_send(sock, packets.Granted(self._spec.id, spec, self._place), self._extras)

    def remove_socket(self, child: Child) -> None:
        """Remove what a child that has ended may have left."""
        try:
            os.unlink(f"{self._place.run_dir}/w/{child.id}")
        except FileNotFoundError:
            return

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
            self._turn_away(sock, f"its end could not be noticed: {explain(error)}")
            return
        try:
            found = procfs.stat_of(pid) if pidfd >= 0 else None
        except (FileNotFoundError, ProcessLookupError):
            found = None
        except OSError as error:
            os.close(pidfd)
            self._turn_away(sock, f"nobody can tell where it comes from: {explain(error)}")
            return
        ours = found is not None and uid == os.geteuid() and procfs.is_below(pid, os.getpid())
        if pidfd >= 0 and procfs.has_ended(pidfd):  # it may have been ours
            sock.close()
            os.close(pidfd)
            return
        if found is None or not ours:
            self._refused(f"a process of user {uid} as a child: it does not come from this worker")
            self._turn_away(sock, f"process {pid} does not come from {self.name}, which alone admits its own children")
            if pidfd >= 0:
                os.close(pidfd)
            return
        _Connection(self, sock, pidfd, found)

    def _turn_away(self, sock: socket.socket, why: str) -> None:
        with sock:
            try_send(sock, packets.Denied(why))


class _Connection:
    """The connection of one process below the worker, from its first packet to its end."""

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
                self._hung_up()
            elif self._child is None:
                self._enter(packets.decode(data, packets.Enter))
            elif self._child.endpoint is None:
                endpoint = packets.decode(data, packets.Listening).endpoint
                self._children.tell(self._table.listens(self._child.id, endpoint))
                try_send(self._socket, packets.Registered())
        except RemoteWireError as error:
            log.warning("process %d, a child of this worker, is no member: %s", self._process.pid, error)
            self._leave(ExitReport("exited", reason="it said what no child says"))

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

    def _hung_up(self) -> None:
        """The process ends, as a rule: how shows in a moment."""
        self._loop.remove_reader(self._socket)
        if self._child is None or self._child.endpoint is None:
            self._leave(ExitReport("exited"))
        else:
            self._late = self._loop.call_later(LEFT_S, self._left)

    def _left(self) -> None:
        """It runs on without its runtime: another program, by exec."""
        self._leave(ExitReport("exited", reason=f"process {self._process.pid} runs on without its connections"))

    def _ended(self) -> None:
        how = procfs.exit_of(self._pidfd, self._process.pid, self._process.started)
        code, signal = how or (None, None)
        report = ExitReport("exited" if signal is None else "signalled", code, signal)
        if self._child is not None and self._child.endpoint is not None and code != 0:
            log.warning("%s (process %d) %s", self._table.name_of(self._child.path), self._process.pid, ending(report))
        self._leave(report)

    def _leave(self, report: ExitReport) -> None:
        """It is no member any more."""
        self._close()
        if self._child is not None:
            self._children.tell(self._table.ended(self._child.id, report))
            self._children.remove_socket(self._child)

    def _close(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self._pidfd)
        self._socket.close()
        os.close(self._pidfd)


def try_send(sock: socket.socket, packet: packets.Answer, *files: int) -> None:
    """Say it, unless the process at the other end is gone."""
    try:
        socket.send_fds(sock, [packets.encode(packet)], files)
    except (BlockingIOError, ConnectionError):
        return


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
    _, uid = peer_of(sock)
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
