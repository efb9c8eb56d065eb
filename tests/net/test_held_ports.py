"""Held ports: which listeners can bind them, and which need a release first."""

from __future__ import annotations

import asyncio
import http.server
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlinf_actors
from rlinf_actors import UsageError
from rlinf_actors.net import host as ports_module
from rlinf_actors.net.host import HeldPorts

HOST = "127.0.0.1"


@pytest.fixture(params=["", "IPv4 only"])
def ports(request, monkeypatch, rlinf_leak_check) -> Iterator[HeldPorts]:
    if request.param:  # a machine without IPv6
        real = ports_module._bind
        monkeypatch.setattr(ports_module, "_bind", lambda *given: real(*given) if given[1] != "::" else _no_ipv6())
    held = HeldPorts()
    yield held
    held.close()


def _no_ipv6():
    raise OSError("Address family not supported by protocol")


def reach(port: int) -> None:
    with socket.create_connection((HOST, port), 10):
        pass


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_up_to_a_bound_is_held_once_and_can_be_listened_on(ports, option):
    free = ports.hold(20_000)
    assert 1023 < free <= 20_000
    port = ports.hold(free)
    assert port < free  # held already
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((HOST, port))
        listener.listen()
        reach(port)
    with pytest.raises(OSError, match="no TCP port from 1024 to 1023 is free"):
        ports.hold(1023)


@pytest.mark.parametrize("address", [HOST, "0.0.0.0"])
@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_listener_with_a_reuse_option_can_bind_a_held_port(ports, option, address):
    port = ports.hold()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((address, port))
        listener.listen()
        listener.settimeout(10)
        reach(port)
        listener.accept()[0].close()


@pytest.mark.parametrize("reuse_port", [None, True])
async def test_asyncio_server_can_bind_a_held_port(ports, reuse_port):
    port = ports.hold()
    reached = asyncio.Event()

    def connected(_reader, writer):
        reached.set()
        writer.close()

    server = await asyncio.start_server(connected, HOST, port, reuse_port=reuse_port)
    _, writer = await asyncio.open_connection(HOST, port)
    await reached.wait()
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


def test_http_server_can_bind_a_held_port(ports):
    with http.server.HTTPServer((HOST, ports.hold()), http.server.BaseHTTPRequestHandler) as server:
        reach(server.server_port)


def test_zeromq_socket_can_bind_a_held_port(ports):
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = ports.hold()
        listener.bind(f"tcp://{HOST}:{port}")
        reach(port)


@pytest.mark.torch
@pytest.mark.parametrize("libuv", [True, False])
def test_torch_tcp_store_can_bind_a_held_port(libuv):
    distributed = pytest.importorskip("torch.distributed")
    ports = HeldPorts()  # no leak check: libuv never closes one of its pipes
    port = ports.hold()
    store = distributed.TCPStore(HOST, port, 1, True, wait_for_workers=False, use_libuv=libuv)
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    ports.close()


@pytest.mark.parametrize("address", [HOST, "0.0.0.0"])
def test_listener_without_reuse_options_needs_a_release(ports, address):
    port = ports.hold()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((address, port))
    ports.release(port)
    with socket.socket() as plain:
        plain.bind((address, port))
        plain.listen()
        reach(port)


def test_only_a_port_that_is_held_can_be_released(ports):
    with pytest.raises(UsageError, match="port 1 is not held here; held: none"):
        ports.release(1)
    port = ports.hold()
    with pytest.raises(UsageError, match=f"held: {port}"):
        ports.release(1)
    ports.release(port)
    with pytest.raises(UsageError, match=f"port {port} is not held here"):
        ports.release(port)


def test_close_releases_all_ports(ports):
    port = ports.hold()
    ports.close()
    ports.close()
    with socket.socket() as plain:
        plain.bind((HOST, port))


ASKING_FOR_ANY = """
import socket
from pathlib import Path
from rlinf_actors.net.host import HeldPorts

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
ports = HeldPorts()
held = ports.hold()
options = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
for chosen in options:
    given = []
    while len(given) < 3:
        asking = socket.socket()
        for option in chosen:
            asking.setsockopt(socket.SOL_SOCKET, option, 1)
        asking.bind(("127.0.0.1", 0))
        given.append(asking)
    assert held not in [one.getsockname()[1] for one in given], chosen
    try:
        socket.socket().bind(("127.0.0.1", 0))
    except OSError:
        print("none left")
    for one in given:
        one.close()
"""


@pytest.mark.netns
def test_kernel_never_assigns_a_held_port_even_if_it_is_the_last():
    """In a network namespace with four ports; the last free one is held."""
    inside = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    root = str(Path(rlinf_actors.__file__).parent.parent)
    command = [*inside, sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{ASKING_FOR_ANY}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr, run.returncode) == ("none left\n" * 4, "", 0)
