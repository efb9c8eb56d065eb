"""Two nodes with keys in two network namespaces: a job runs, and its traffic is unreadable."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest
from keyed_hosts import environment, two_nodes

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

HERE = Path(__file__).resolve().parent
MARKER = "a-marker-that-nobody-may-read"
PLAIN, STOP = "a-word-that-everybody-may-read", "the-sniffer-may-stop"
NO_KEY = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZeroMQ's greeting without a key."""
NAMES = ("AgentHello", "ClientHello", "StartWorkers")


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(2) as made:
        yield made


DRIVER = f"""
    import contextlib
    import json
    import socket
    from rlinf_actors import Channel, Cluster, NodePlacementStrategy
    import keyed_workers

    marker = {MARKER!r}
    with Cluster(num_nodes=2, timeout=30) as cluster:
        ips = [cluster.get_node_ip(rank) for rank in range(2)]
        group = keyed_workers.Carrier.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="carriers")
        group.wait_ready(30)
        channel = Channel.create("items")
        result = {{
            "ips": ips,
            "echo": group.echo(marker).wait(20),
            "swap": group.swap(marker).wait(20),
            "through": group.through(channel, marker).wait(20),
            "sockets": group.listening().wait(20),
            "large": len(group.execute_on(1).echo(marker * 50_000).wait(20)[0]),
        }}
        host, _, port = group.control.states()[1].endpoint.tcp.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall({NO_KEY!r})
            with contextlib.suppress(ConnectionError):
                while stranger.recv(64):
                    pass
        assert group.execute_on(1).wait_for_refusal().wait(30) == [True]
        group.shutdown()
    print("RESULT " + json.dumps(result))
"""


def test_traffic_between_two_keyed_nodes_is_unreadable(network: list[netns_kit.Host], place: Path) -> None:
    head, far = network
    address = f"{head.ip}:6399"
    processes: list[subprocess.Popen[str]] = []
    try:
        sniff = subprocess.Popen(
            far.command([sys.executable, str(HERE / "sniffer.py"), STOP, PLAIN, MARKER, *NAMES]),
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(sniff)
        assert sniff.stdout is not None
        assert sniff.stdout.readline() == "listening\n"
        processes += two_nodes(head, far, place, address)
        script = place / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        done = subprocess.run(
            head.command([sys.executable, str(script)]),
            env=environment(place, "head", RLINF_HEAD=address),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        result = json.loads(line.removeprefix("RESULT "))
        assert result["ips"] == [head.ip, far.ip]
        assert result["echo"] == result["swap"] == result["through"] == [MARKER, MARKER]
        check_sockets(*result["sockets"])
        output = (done.stdout + done.stderr).splitlines()
        refused = [line for line in output if "refused a connection" in line and "it came without a key" in line]
        assert len(refused) == 1
        assert "carriers:1" in refused[0]
        assert result["large"] == len(MARKER) * 50_000
        assert f"output: {MARKER}" in done.stdout + done.stderr  # it came to the driver from both
        stranger(head, place, address)
        subprocess.run(head.command([sys.executable, "-c", SAY, far.ip, f"{PLAIN} {STOP}"]), check=True)
        heard = json.loads(sniff.stdout.readline())
        assert heard["seen"] == [PLAIN]  # it would have seen the others
        assert heard["curve"] >= 4  # both directions of the agent's, the drivers' and the workers' connections
        assert heard["bytes"] > len(MARKER) * 50_000
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def check_sockets(*nodes: list[list[str]]) -> None:
    """Every TCP socket is a CURVE server, and every unix socket is in a private directory of this user."""
    # the head, its worker and the channel; the other's worker
    for node, tcp, workers in zip(nodes, (3, 1), (2, 1), strict=True):
        addresses = [(name, how) for name, how in node if not name.startswith(("/", "@"))]
        bulk = [name for name, how in addresses if how == "bulk"]  # a worker's port for large parts
        assert [how for _, how in addresses if how != "bulk"] == ["CURVE"] * tcp, addresses
        assert len(bulk) == workers
        assert not any(name.startswith("0.0.0.0") for name, _ in addresses)
        paths = [(name, how) for name, how in node if name.startswith(("/", "@"))]
        assert len(paths) >= 2  # a worker's, and its template's
        assert {how for _, how in paths} == {"0o40700"}, paths


SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
    plain.sendto(sys.argv[2].encode(), (sys.argv[1], 9))
"""


def stranger(host: netns_kit.Host, place: Path, address: str) -> None:
    """A driver without a key gets that error at once."""
    script = f"from rlinf_actors import Cluster; Cluster(num_nodes=1, head={address!r}, timeout=5)"
    done = subprocess.run(
        host.command([sys.executable, "-c", script]),
        env=environment(place, "stranger", RLINF_ACTORS_INSECURE_TEST_NETWORK="1"),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "what listens there wants a key, and this process has none" in done.stderr
