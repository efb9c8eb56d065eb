"""Where a worker admits its children, in one process: its listener is real, and so are the processes that connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket

import pytest

from rlinf_actors import UsageError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire import child_protocol as packets
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import WorkerSpec
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


@pytest.mark.parametrize(
    ("path", "siblings"), [((0, -1), 1), ((0, 100_001), 1), ((0,) * 9, 1), ((0, 0), -1), ((0, 0), 10**6)]
)
async def test_invalid_address_of_a_child_is_a_usage_error(listening, path, siblings):
    with pytest.raises(UsageError, match="ranks and world_size are from 0 to 100000, and a path has at most 8 ranks"):
        await asyncio.to_thread(become_member, WorkerAddress("g", path), siblings)
