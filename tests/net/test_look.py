"""Looking at real endpoints: somebody listens, nobody does, and no answer at all."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rlinf_actors.net.link import Sight
from rlinf_actors.net.look import look_at
from rlinf_actors.net.memory import MemoryNetwork


@pytest.fixture
def listener():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def endpoint(listener):
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_process_that_listens_and_takes_no_connection_is_there(listener):
    listener.listen(1)  # nobody accepts: the kernel answers, as for a stopped process
    assert await look_at(endpoint(listener)) is Sight.LISTENS


async def test_a_port_that_nobody_listens_on_is_refused(listener):
    assert await look_at(endpoint(listener)) is Sight.REFUSED


async def test_a_machine_that_does_not_answer_is_silent(listener):
    listener.listen(0)
    with socket.create_connection(listener.getsockname()):  # the queue is full: the kernel drops what comes now
        assert await look_at(endpoint(listener), 0.05) is Sight.SILENT


async def test_unix_sockets_are_never_silent(tmp_path):
    path = str(tmp_path / "s")
    assert await look_at(f"ipc://{path}") is Sight.REFUSED
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert await look_at(f"ipc://{path}") is Sight.REFUSED
        listener.listen(0)
        assert await look_at(f"ipc://{path}") is Sight.LISTENS
        with socket.socket(socket.AF_UNIX) as first:
            first.setblocking(False)
            first.connect_ex(path)
            assert await look_at(f"ipc://{path}", 0.05) is Sight.LISTENS


async def test_the_memory_transport_has_dark_endpoints_too(network_here):
    network_here.listener(lambda *message: None).bind("tcp://here:1")
    network_here.dark.add("tcp://there:1")
    found = [await network_here.look(f"tcp://{name}:1", 0.0) for name in ("here", "there", "nowhere")]
    assert found == [Sight.LISTENS, Sight.SILENT, Sight.REFUSED]


@pytest.fixture
async def network_here():
    return MemoryNetwork(asyncio.get_running_loop())
