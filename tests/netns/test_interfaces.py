"""Collectives use the interface that holds the node's address: among several, and with a misleading hostname."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

HERE = Path(__file__).resolve().parent

PLAN: list[dict[str, netns_kit.Wire]] = [
    # The head: a network of its own, and two addresses on the one that it shares. It listens on the second.
    {"office": ("nowhere0", ["10.99.0.1/24"]), "fabric": ("shared", ["10.213.8.1/24", "10.213.8.101/24"])},
    # Two networks that lead nowhere, one of them with the default route, and one that leads to the head.
    {
        "eth0": ("nowhere1", ["10.99.1.1/24"]),
        "eth1": ("nowhere2", ["172.29.0.1/24"]),
        "net7": ("shared", ["10.213.8.2/24"]),
    },
    # The way to the head is its only one.
    {"eth0": ("shared", ["10.213.8.3/24"])},
    # A stranger, with no agentd.
    {"eth0": ("shared", ["10.213.8.66/24"])},
]
ADDRESS = "10.213.8.101:6399"

DRIVER = """
    import json
    from rlinf_actors import Cluster, NodePlacementStrategy
    import remote_workers

    with Cluster(num_nodes=3, timeout=60) as cluster:
        torch = {"preload": ["torch"]}  # once a node, not once a worker
        group = remote_workers.Reducer.create_group().launch(
            cluster, NodePlacementStrategy([0, 1]), name="reducers", **torch)
        told = group.about().wait(60)
        alone = remote_workers.Anywhere.create_group().launch(cluster, NodePlacementStrategy([2]), name="alone")
        chosen = remote_workers.Anywhere.create_group().launch(
            cluster, NodePlacementStrategy([1]), name="chosen", env_vars={"GLOO_SOCKET_IFNAME": "eth1"})
        laners = remote_workers.Laner.create_group().launch(
            cluster, NodePlacementStrategy([0, 1]), name="laners", env_vars={"RLINF_ACTORS_PATHS": "cpu=lane"}, **torch)
        result = {
            "listening": laners.swap().wait(60),
            "ips": [cluster.get_node_ip(rank) for rank in range(3)],
            "told": told,
            "alone": alone.about().wait(60),
            "chosen": chosen.about().wait(60),
            "sums": group.all_reduce().wait(120),
            "users": group.listened().wait(),
        }
    print("RESULT " + json.dumps(result))
"""


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.wired(PLAN) as made:
        netns_kit.default_route(made[0], "10.99.0.254")
        netns_kit.default_route(made[1], "10.99.1.254")
        yield made


def on(host: netns_kit.Host, *command: str, head: str = ADDRESS) -> str:
    env = {
        **{name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")},
        "PYTHONPATH": f"{netns_kit.PROJECT}:{HERE}",
        "RLINF_HEAD": head,
        "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1",
    }
    done = subprocess.run(
        host.command([sys.executable, *command]), env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LISTENER = """
    import socket, sys
    with socket.create_server(("10.213.8.2", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sys.stdin.read()
"""


def close_to_strangers(network: list[netns_kit.Host], place: Path) -> dict[str, bool]:
    """Load the rules of `units print --firewall` on all nodes. Return who can connect to what, before and after.

    A listener on a port that the kernel chose stands for a worker and for gloo, which choose theirs in the same way.
    """
    head, node, _, stranger = network
    program = [sys.executable, "-c", textwrap.dedent(LISTENER)]
    with subprocess.Popen(node.command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        address = f"10.213.8.2:{listener.stdout.readline().strip()}"
        on(head, "-c", "from rlinf_actors import Cluster; Cluster(num_nodes=3, timeout=60).shutdown()")
        before = connects(stranger, address) and connects(stranger, ADDRESS)
        rules = place / "rlinf.nft"
        rules.write_text(on(head, "-m", "rlinf_actors.cli.main", "units", "print", "--firewall"))
        for host in network[:3]:
            subprocess.run(host.command(["nft", "-c", "-f", str(rules)]), check=True)
            subprocess.run(host.command(["nft", "-f", str(rules)]), check=True)
            subprocess.run(host.command(["nft", "-f", str(rules)]), check=True)  # replaces itself
        found = {"head": connects(stranger, ADDRESS), "worker": connects(stranger, address)}
        return {"before": before, **found, "node": connects(head, address) and connects(node, ADDRESS)}


def connects(host: netns_kit.Host, address: str) -> bool:
    """True if a TCP connection from *host* to *address* is made within a second: what is dropped never is."""
    ip, _, port = address.partition(":")
    program = f"import socket; socket.create_connection(({ip!r}, {port}), 1)"
    done = subprocess.run(host.command([sys.executable, "-c", program]), capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "timed out" in done.stderr, done.stderr
    return done.returncode == 0


def test_collectives_use_the_interface_towards_the_head(network: list[netns_kit.Host], tmp_path: Path) -> None:
    agents = [
        netns_kit.agentd(
            host, tmp_path / f"n{rank}", [sys.prefix], "--node-rank", str(rank),
            *(["--head", "--listen", ADDRESS] if rank == 0 else ["--connect", ADDRESS]),
        )
        for rank, host in enumerate(network[:3])
    ]  # fmt: skip
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    try:
        closed = [close_to_strangers(network, tmp_path)] if shutil.which("nft") else []
        out = on(network[0], str(script))
        listed = on(network[0], "-m", "rlinf_actors.cli.main", "nodes")
        nodes = json.loads(on(network[0], "-m", "rlinf_actors.cli.main", "nodes", "--json"))
    finally:
        for agent in agents:
            agent.terminate()
        codes = [agent.wait(30) for agent in agents]
    assert codes == [0, 0, 0]
    assert closed in ([], [{"before": True, "head": False, "worker": False, "node": True}])
    result = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))
    assert result["ips"] == ["10.213.8.101", "10.213.8.2", "10.213.8.3"]
    assert [told["env"]["GLOO_SOCKET_IFNAME"] for told in result["told"]] == ["fabric", "net7"]
    assert {told["env"]["MASTER_ADDR"] for told in result["told"]} == {"10.213.8.101"}
    assert result["sums"] == [3.0, 3.0]
    # our store and gloo's sockets: only on the interface towards the head
    first, second = (set(addresses) for addresses in result["listening"])
    assert first <= {"10.213.8.1", "10.213.8.101"}
    assert second == {"10.213.8.2"}
    assert len(result["listening"][0]) > 1, "more than the worker's own"
    # users' groups: the store on MASTER_ADDR, gloo on the first address of the interface that its variable names
    assert [set(addresses) for addresses in result["users"]] == [{"10.213.8.1", "10.213.8.101"}, {"10.213.8.2"}]
    assert result["alone"][0]["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert result["chosen"][0]["env"]["GLOO_SOCKET_IFNAME"] == "eth1"
    assert [(node["ip"], node["interface"]) for node in nodes] == [
        ("10.213.8.101", "fabric"),
        ("10.213.8.2", "net7"),
        ("10.213.8.3", "eth0"),
    ]
    assert nodes[1]["interfaces"] == {
        "lo": "127.0.0.1",
        "eth0": "10.99.1.1",
        "eth1": "172.29.0.1",
        "net7": "10.213.8.2",
    }
    assert "10.213.8.2 (net7)" in listed


ONE_INTERFACE_DRIVER = """
    import json
    from rlinf_actors import Cluster, NodePlacementStrategy
    import remote_workers

    with Cluster(num_nodes=2, timeout=60) as cluster:
        def launch(name, **options):
            return remote_workers.Reducer.create_group().launch(
                cluster, NodePlacementStrategy([0, 1]), name=name, preload=["torch"], **options)
        plain = launch("plain")
        chosen = launch("chosen", env_vars={"RLINF_COMM_NET_DEVICES": "eth0,lo", "NCCL_SOCKET_IFNAME": "ib0"})
        result = {
            "sums": plain.all_reduce().wait(120),
            "plain": plain.about().wait(60),
            "chosen": chosen.about().wait(60),
        }
    print("RESULT " + json.dumps(result))
"""


@pytest.fixture
def misleading() -> Iterator[list[netns_kit.Host]]:
    """Two hosts with one interface each, which resolve their own hostname to 127.0.1.1, as by Debian's default."""
    with netns_kit.hosts(2) as made, contextlib.ExitStack() as stack:
        for host in made:  # `ip netns exec` mounts these files over those in /etc
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        yield made


@pytest.mark.nightly("the collectives of the other test use the same interface")
def test_gloo_ignores_a_hostname_that_is_a_loopback_address(misleading: list[netns_kit.Host], tmp_path: Path) -> None:
    address = f"{misleading[0].ip}:6399"
    agents = [
        netns_kit.agentd(host, tmp_path / f"n{rank}", [sys.prefix], "--node-rank", str(rank), way, address, *more)
        for rank, (host, way, more) in enumerate(
            zip(misleading, ("--listen", "--connect"), (["--head"], []), strict=True)
        )
    ]
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(ONE_INTERFACE_DRIVER))
    try:
        name = on(misleading[1], "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))", head=address)
        out = on(misleading[0], str(script), head=address)
    finally:
        for agent in agents:
            agent.terminate()
        codes = [agent.wait(30) for agent in agents]
    assert name.strip() == "127.0.1.1"
    assert codes == [0, 0]
    result = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))
    assert result["sums"] == [3.0, 3.0]
    for told in result["plain"]:
        assert (told["env"]["GLOO_SOCKET_IFNAME"], told["env"]["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0")
    for told in result["chosen"]:
        assert (told["env"]["GLOO_SOCKET_IFNAME"], told["env"]["NCCL_SOCKET_IFNAME"]) == ("eth0,lo", "ib0")
