"""Nodes with several network interfaces, of which one leads to the head, in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
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
PROJECT = HERE.parent.parent

DRIVER = """
    import json, subprocess, sys
    from rlinf_actors import Cluster, PackedPlacementStrategy
    import remote_workers

    with Cluster(num_nodes=2, timeout=60) as cluster:
        group = remote_workers.Reducer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="reducers")
        group.wait_ready(120)
        shown = subprocess.run([sys.executable, "-m", "rlinf_actors.cli.main", "nodes", "--json"],
                               capture_output=True, text=True, check=True).stdout
        print("RESULT " + json.dumps({
            "ips": [cluster.get_node_ip(rank) for rank in range(2)],
            "interfaces": group.network().wait(60),
            "sums": group.all_reduce().wait(120),
            "shown": [(node["ip"], node["interface"]) for node in json.loads(shown)],
        }))
"""


def add_interface(host: netns_kit.Host, name: str, address: str, *, default: bool = False) -> None:
    """Another interface of a host, that leads nowhere."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", "-n", host.namespace, *arguments], check=True, capture_output=True)

    ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
    ip("addr", "add", f"{address}/24", "dev", name)
    ip("link", "set", name, "up")
    ip("link", "set", f"{name}-end", "up")
    if default:
        ip("route", "add", "default", "dev", name)


def test_the_route_to_the_head_is_the_nodes_address_and_the_collectives_interface(tmp_path: Path) -> None:
    with netns_kit.hosts(2) as network:
        head, other = network
        for host, number in ((head, 1), (other, 2)):
            add_interface(host, "camera0", f"192.168.40.{number}")
            add_interface(host, "wlan0", f"192.168.50.{number}", default=True)
        address = f"{head.ip}:6399"
        env = {**os.environ, "PYTHONPATH": f"{PROJECT}:{HERE}"}
        agents = []
        for rank, host in enumerate(network):
            folder = tmp_path / f"n{rank}"
            folder.mkdir(mode=0o700)
            role = ["--head", "--listen", address] if rank == 0 else ["--connect", address]
            command = [sys.executable, "-m", "agentd", "--run-dir", str(folder), "--insecure-test-network", *role]
            agents.append(subprocess.Popen(host.command(command), env=env, stdin=subprocess.DEVNULL))
        script = tmp_path / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        try:
            done = subprocess.run(
                head.command([sys.executable, str(script)]),
                env={**env, "RLINF_HEAD": address, "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1"},
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
        finally:
            for agent in agents:
                agent.terminate()
            codes = [agent.wait(30) for agent in agents]
    assert done.returncode == 0, done.stdout + done.stderr
    assert codes == [0, 0]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["ips"] == [head.ip, other.ip]
    assert result["interfaces"] == ["eth0", "eth0"]
    assert result["sums"] == [3.0, 3.0]
    assert result["shown"] == [[head.ip, "eth0"], [other.ip, "eth0"]]
