"""Names of hosts are looked up beside ZeroMQ and the event loop: a name service may not answer, or a head may move."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import net_kit
import pace
import pytest
from namespaces import can_unshare

from rlinf_actors.net.link import LinkOptions

needs_namespaces = pytest.mark.skipif(
    not can_unshare("--net", "--mount", "true"), reason="needs root, to make a network and a mount namespace"
)
HEAD = "head.example"
PROGRAM = f"""
import asyncio, socket
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.reachability import check
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork

async def main():
    network = ZmqNetwork(asyncio.get_running_loop(), Security(True))
    named = network.link("tcp://{HEAD}:6380", b"named", lambda *_: None)
    named.send(b"kept")
    await asyncio.to_thread(silent.recv, 512)
    await check("tcp://{HEAD}:6380", 0.01)
    arrived = asyncio.Event()
    listener = network.listener(lambda *_: arrived.set())
    network.link(listener.bind("tcp://127.0.0.1:0"), b"other", lambda *_: None).send(b"hello")
    await arrived.wait()
    network.close()

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
    silent.bind(("127.0.0.1", 53))
    silent.settimeout(30)
    loop = new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    print("ended", flush=True)
"""


AGENTD = f"""
import socket, subprocess, sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
    silent.bind(("127.0.0.1", 53))
    silent.settimeout(30)
    command = [sys.executable, "-m", "agentd", "--connect", "{HEAD}:6380", "--insecure-test-network", *sys.argv[1:]]
    with subprocess.Popen(command) as agentd:
        silent.recv(512)
        agentd.terminate()
    print(agentd.returncode)
"""


def beside_a_silent_name_service(folder: Path, *command: str) -> list[str]:
    """A command line that runs *command* where lookups take minutes: glibc asks five times, for 30 s each."""
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    (folder / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = "".join(f"mount --bind {folder}/{name} /etc/{name}; " for name in ("resolv.conf", "nsswitch.conf"))
    script = f'ip link set lo up; {mounts}exec "$@"'
    return ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *command]


@pytest.mark.slow
@needs_namespaces
def test_silent_name_service_holds_up_no_other_link_and_no_end(tmp_path):
    command = beside_a_silent_name_service(tmp_path, sys.executable, "-c", PROGRAM)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.slow
@needs_namespaces
def test_agentd_ends_at_sigterm_while_it_looks_for_the_head(tmp_path, short_dir):
    command = beside_a_silent_name_service(tmp_path, sys.executable, "-c", AGENTD, "--run-dir", f"{short_dir}/run")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S)
    assert done.stdout == "0\n", done.stderr


@pytest.fixture
def addresses(monkeypatch):
    """The addresses of the host HEAD, as a name service gives them: a test changes them."""
    found: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, flags=0, **options):
        if host != HEAD:
            return real(host, port, *args, flags=flags, **options)
        if flags & socket.AI_NUMERICHOST or not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


@pytest.fixture
async def wire(short_dir):
    async with net_kit.wire("tcp", short_dir) as wire:
        yield wire


def link_to(wire, endpoint, on_reset=None):
    """A link to the host HEAD, at the port of *endpoint*."""
    name = endpoint.replace("127.0.0.1", HEAD)
    return wire.network.link(name, b"named", lambda *_: None, LinkOptions(on_reset=on_reset))


async def test_message_waits_until_the_name_has_an_address(wire, addresses):
    _, endpoint, inbox = wire.listen()
    link = link_to(wire, endpoint)
    link.send(b"1")
    link.send(b"2")
    addresses.append("127.0.0.1")
    await inbox.until(2)
    assert inbox.headers == [b"1", b"2"]


async def test_link_follows_a_name_to_another_address(wire, addresses):
    addresses.append("127.0.0.1")
    listener, endpoint, inbox = wire.listen()
    reset = asyncio.Event()
    link = link_to(wire, endpoint, reset.set)
    link.send(b"here")
    await inbox.until(1)
    listener.close()
    moved = net_kit.Inbox()
    wire.network.listener(moved).bind(endpoint.replace("127.0.0.1", "127.0.0.2"))
    addresses[:] = ["127.0.0.2"]
    await asyncio.wait_for(reset.wait(), pace.PATIENCE_S)
    link.send(b"there")
    await moved.until(1)
    assert moved.headers == [b"there"]


async def test_next_address_of_a_name_is_tried(wire, addresses):
    _, endpoint, inbox = wire.listen()
    addresses[:] = ["127.0.0.3", "127.0.0.1"]
    link = link_to(wire, endpoint, lambda: link.send(b"again"))
    link.send(b"dropped with the first address")
    await inbox.until(1)
    assert inbox.headers == [b"again"]
