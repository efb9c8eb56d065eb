"""Where a worker admits its children, in one process: its listener is real, and so are the processes that connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from rlinf_actors import ClusterTimeoutError, UsageError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire import child_protocol as packets
from rlinf_actors.wire.template_protocol import NodeRegistered, WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec
from rlinf_actors.worker import children as worker_children
from rlinf_actors.worker.children import Children, become_member

SPEC = WorkerSpec("g-0", "g", "ns", 0, 1, 0, {})


@pytest.fixture
async def listening(tmp_path, monkeypatch):
    """The worker's end; and `refused`, what it says of strangers."""
    (tmp_path / "w").mkdir()
    place = WorkerPlace(str(tmp_path), "", "", "n", "", "", "", "")
    refused: list[str] = []
    children = Children(asyncio.get_running_loop(), SPEC, place, lambda link, frame: None, refused.append)
    monkeypatch.setenv(CHILDREN, packets.socket_path(str(tmp_path), SPEC.id))
    yield children, refused
    children.loop.remove_reader(children._listener)
    children._listener.close()
    os.close(children._extras)


def started(*, lives: bool) -> tuple[int, int]:
    """A child that has connected: its pid, and what ends it when closed."""
    connected, tell = os.pipe()
    gate, end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(end)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(os.environ[CHILDREN])
                os.write(tell, b"x")
                if lives:
                    os.read(gate, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(gate)
    assert os.read(connected, 1) == b"x"
    os.close(connected)
    return pid, end


def wait(pid: int, reap: bool = True) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | (0 if reap else os.WNOWAIT))


async def accepted() -> None:
    """Let the loop take the connections that are there."""
    for _ in range(3):
        await asyncio.sleep(0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_child_that_ended_before_its_check_is_not_counted_as_rejected(listening):
    _children, refused = listening
    before = descriptors()
    pid, end = started(lives=False)
    os.close(end)
    wait(pid, reap=False)
    await accepted()
    wait(pid)
    assert refused == []
    assert descriptors() == before


async def test_child_that_cannot_be_checked_is_not_counted_as_rejected(listening):
    """Two descriptors are left, for its connection and its pidfd."""
    _children, refused = listening
    before = descriptors()
    pid, end = started(lives=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 64, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(end))
        for _ in range(2):
            os.close(held.pop())
        await accepted()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(end)
    wait(pid)
    assert refused == []
    assert descriptors() == before


def joined_child() -> tuple[socket.socket, int]:
    """A child that has become a member, without a runtime: its connection, and its pid."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(os.environ[CHILDREN])
                for packet in (packets.Enter("g:0", [0], 1), packets.Listening(Endpoint("h", "ipc:///c"))):
                    sock.send(packets.encode(packet))
                    sock.recv(packets.MAX_PACKET)
                theirs.send(b"joined")
                while data := sock.recv(packets.MAX_PACKET):
                    theirs.send(data)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


async def test_child_gets_what_agentd_tells_the_worker_until_it_ends(listening):
    children, _ = listening
    loop, packet = asyncio.get_running_loop(), NodeRegistered("e2", True)
    children.tell_all(packet)  # nobody is there yet
    sock, pid = joined_child()
    with sock:
        sock.setblocking(False)
        assert await loop.sock_recv(sock, 100) == b"joined"
        children.tell_all(packet)
        assert packets.decode_answer(await loop.sock_recv(sock, 1000)) == packet
        os.kill(pid, signal.SIGKILL)
        assert await loop.sock_recv(sock, 100) == b""
    wait(pid)
    await accepted()
    assert not children._registered


async def test_child_passes_registrations_of_its_node_on_and_survives_its_worker():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: asyncio.Queue = asyncio.Queue()
    runtime = SimpleNamespace(node_registered=lambda *what: told.put_nowait(what))
    with theirs:
        worker_children._listen(SimpleNamespace(connection=theirs, runtime=runtime))
        with ours:
            ours.send(b"no packet")
            ours.send(packets.encode(packets.Registered()))
            ours.send(packets.encode(NodeRegistered("e2", True)))
            assert await told.get() == ("e2", True)
        loop = asyncio.get_running_loop()
        while loop.remove_reader(theirs.fileno()):  # until the end of the worker was read
            worker_children._listen(SimpleNamespace(connection=theirs, runtime=runtime))
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("path", "siblings"), [((0, -1), 1), ((0, 100_001), 1), ((0,) * 9, 1), ((0, 0), -1), ((0, 0), 10**6)]
)
async def test_invalid_address_of_a_child_is_a_usage_error(listening, path, siblings):
    with pytest.raises(UsageError, match="ranks and world_size are from 0 to 100000, and a path has at most 8 ranks"):
        await asyncio.to_thread(become_member, WorkerAddress("g", path), siblings)


@pytest.fixture
def busy_worker(tmp_path, monkeypatch):
    """The listener of a worker that accepts nothing, and the connections that fill its backlog."""
    path = str(tmp_path / "c")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                waiting.connect(path)
        monkeypatch.setenv(CHILDREN, path)
        listener.settimeout(0.1)
        yield listener


@pytest.fixture
def interruptions():
    """Number of signals that were handled. Their handler interrupts system calls."""
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    yield handled
    signal.signal(signal.SIGUSR1, before)


def begin(errors: list[BaseException]) -> threading.Thread:
    """A thread that becomes a member of the busy worker; its error goes to *errors*."""

    def become() -> None:
        try:
            become_member(WorkerAddress("g", (0, 0)), 1)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=become)
    thread.start()
    return thread


def deny_all(listener: socket.socket, thread: threading.Thread) -> None:
    while thread.is_alive():
        with contextlib.suppress(TimeoutError, ConnectionError):
            sock, _ = listener.accept()
            with sock:
                sock.send(packets.encode(packets.Denied("not today")))
    thread.join()


def test_child_waits_while_the_backlog_of_its_worker_is_full(busy_worker):
    errors: list[BaseException] = []
    thread = begin(errors)
    thread.join(0.2)
    assert thread.is_alive(), errors
    deny_all(busy_worker, thread)
    assert [str(error) for error in errors] == ["not today"]


def test_child_waits_for_the_backlog_after_a_signal(busy_worker, interruptions):
    errors: list[BaseException] = []
    thread = begin(errors)
    for _ in range(5):
        time.sleep(0.05)
        assert thread.is_alive(), errors
        signal.pthread_kill(thread.ident or 0, signal.SIGUSR1)
    thread.join(0.1)
    assert thread.is_alive(), errors
    deny_all(busy_worker, thread)
    assert [str(error) for error in errors] == ["not today"]
    assert interruptions


def test_worker_whose_backlog_stays_full_does_not_answer(busy_worker, monkeypatch):
    monkeypatch.setattr(worker_children, "ANSWER_S", 0.2)
    with pytest.raises(ClusterTimeoutError, match=r"has not answered its child for 0\.2 s"):
        become_member(WorkerAddress("g", (0, 0)), 1)
