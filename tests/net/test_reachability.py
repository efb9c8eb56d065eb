"""Reachability checks of real endpoints: with a listener, without one, and without any answer."""

from __future__ import annotations

import asyncio
import socket

import pytest
from descriptor_kit import descriptors_left
from tcp_kit import HOST, receive, tcp_server

from rlinf_actors.net import reachability
from rlinf_actors.net.link import Diagnosis, Reachability
from rlinf_actors.net.reachability import check, diagnose
from tests.memory_network import MemoryNetwork


@pytest.fixture
def listener():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def endpoint(listener):
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def test_process_that_listens_without_accepting_is_reachable(listener):
    listener.listen(1)  # not accepted: the kernel answers, as for a stopped process
    assert await check(endpoint(listener)) is Reachability.LISTENS


async def test_port_without_a_listener_is_refused(listener):
    assert await check(endpoint(listener)) is Reachability.REFUSED


async def test_a_machine_that_does_not_answer_is_silent(listener):
    listener.listen(0)
    with socket.create_connection(listener.getsockname()):  # the queue is full: the kernel drops further connections
        assert await check(endpoint(listener), 0.05) is Reachability.SILENT


async def test_a_process_without_cpu_takes_no_listener_for_silent(listener):
    """The time is over before the event loop has noticed the connection, which the kernel made at once."""
    listener.listen(1)
    assert await check(endpoint(listener), 0.0) is Reachability.LISTENS


async def test_a_process_without_cpu_takes_no_refusal_for_silence(listener):
    assert await check(endpoint(listener), 0.0) is Reachability.REFUSED


async def test_the_address_of_a_name_is_checked(listener):
    listener.listen(1)
    assert await check(endpoint(listener).replace("127.0.0.1", "localhost")) is Reachability.LISTENS


async def test_check_without_free_descriptors_reports_no_silence(listener, caplog):
    with descriptors_left(0):
        assert await check(endpoint(listener)) is Reachability.LISTENS
    assert "raise both with 'ulimit -n 65536'" in caplog.text


async def test_unix_sockets_are_never_silent(tmp_path):
    path = str(tmp_path / "s")
    assert await check(f"ipc://{path}") is Reachability.REFUSED
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert await check(f"ipc://{path}") is Reachability.REFUSED
        listener.listen(0)
        assert await check(f"ipc://{path}") is Reachability.LISTENS
        with socket.socket(socket.AF_UNIX) as first:
            first.setblocking(False)
            first.connect_ex(path)
            assert await check(f"ipc://{path}", 0.05) is Reachability.LISTENS


async def test_dark_endpoints_of_the_memory_network_are_silent(network_here):
    network_here.listener(lambda *message: None).bind("tcp://here:1")
    network_here.dark.add("tcp://there:1")
    found = [await network_here.check_reachability(f"tcp://{name}:1", 0.0) for name in ("here", "there", "nowhere")]
    assert found == [Reachability.LISTENS, Reachability.SILENT, Reachability.REFUSED]


@pytest.fixture
async def network_here():
    return MemoryNetwork(asyncio.get_running_loop())


# --- diagnosis ---


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Long limits, so that a stall of this process does not count as silence. Tests of silence set shorter ones."""
    for name in ("CONNECT_S", "GREETING_S", "STAYS_S"):
        monkeypatch.setattr(reachability, name, 10.0)


async def diagnosis_of_a_server(said: bytes, stays: bool) -> Diagnosis:
    """Diagnose a server that sends *said*, then keeps the connection open if *stays*, else closes it."""
    served = asyncio.Event()

    async def serve(connection: socket.socket) -> None:
        assert len(await receive(connection, 64)) == 64
        await asyncio.get_running_loop().sock_sendall(connection, said)
        if stays:
            assert await receive(connection, 1) == b"", "more than a greeting"
        served.set()

    async with tcp_server(serve) as port:
        found = await diagnose(f"tcp://{HOST}:{port}")
        await asyncio.wait_for(served.wait(), 10)
        return found


MARK = b"\xff" + bytes(8) + b"\x7f\x03\x01"


@pytest.mark.parametrize(
    ("said", "stays", "found"),
    [
        (b"", True, Diagnosis.MUTE),  # a web server, which waits for a request
        (b"", False, Diagnosis.CLOSES),
        (b"SSH-2.0-OpenSSH_9.2\r\n", True, Diagnosis.OTHER),
        (b"\x15\x03\x01\x00\x02\x02\x46", False, Diagnosis.OTHER),  # TLS: an alert
        (MARK + b"CURVE".ljust(52, b"\0"), True, Diagnosis.KEYED),
        (MARK + b"CURVE".ljust(52, b"\0"), False, Diagnosis.CLOSES),  # a head that has too many
        (MARK + b"NULL".ljust(52, b"\0"), True, Diagnosis.PLAIN),
        (MARK, True, Diagnosis.MUTE),
        (MARK, False, Diagnosis.CLOSES),
    ],
)
async def test_diagnosis_follows_from_the_listeners_first_bytes(said, stays, found, monkeypatch):
    if stays:  # no data ends the wait
        monkeypatch.setattr(reachability, "GREETING_S" if found is Diagnosis.MUTE else "STAYS_S", 0.1)
    assert await diagnosis_of_a_server(said, stays) is found


async def test_missing_listener_unknown_name_and_silence_are_distinguished(listener, monkeypatch):
    assert await diagnose(endpoint(listener)) is Diagnosis.NOBODY
    assert await diagnose("tcp://nosuch.invalid:1") is Diagnosis.NAMELESS
    listener.listen(0)
    with socket.create_connection(listener.getsockname()):
        monkeypatch.setattr(reachability, "CONNECT_S", 0.05)
        assert await diagnose(endpoint(listener)) is Diagnosis.SILENT


async def test_diagnosis_of_a_unix_socket_shows_only_if_a_process_listens(tmp_path):
    path = str(tmp_path / "s")
    assert await diagnose(f"ipc://{path}") is Diagnosis.NOBODY
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        assert await diagnose(f"ipc://{path}") is Diagnosis.MUTE
