"""Three nodes in three network namespaces, agentd in each, one head: the whole launch over a real network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import environments
import netns_kit
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.torch,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two environments of this Python with torch, one on another Python without."""
    folder = Path(os.environ.get("RLINF_TEST_VENVS") or tmp_path_factory.mktemp("venvs"))
    other = environments.interpreter(12) or environments.interpreter(10)
    if other is None:
        pytest.skip("there is no Python 3.12 or 3.10 on this machine")
    modules = ["zmq", "msgspec", "cloudpickle", "numpy", "torch"]
    ours = [netns_kit.own_venv(folder / name, modules) for name in ("one", "two")]
    return [*ours, environments.installed(folder / "other", other, *environments.RUNTIME, *environments.RUNTIME_310)]


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(3) as made:
        yield made


DRIVER = """
    import json, sys
    from rlinf_actors import Cluster, ComponentPlacement
    import remote_workers

    config = json.loads(sys.argv[1])
    with Cluster(cluster_cfg=config["cluster"], timeout=60) as cluster:
        placement = ComponentPlacement(config, cluster)
        reducers = remote_workers.Reducer.create_group().launch(
            cluster, placement_strategy=placement.get_strategy("reducer"), name="reducers")
        plain = remote_workers.Anywhere.create_group().launch(
            cluster, placement_strategy=placement.get_strategy("plain"), name="plain")
        reducers.wait_ready(120)
        plain.wait_ready(60)
        result = {
            "ips": [cluster.get_node_ip(rank) for rank in range(3)],
            "reducers": reducers.about().wait(60),
            "plain": plain.about().wait(60),
            "sums": reducers.all_reduce().wait(120),
        }
    print("RESULT " + json.dumps(result))
"""


def test_groups_span_nodes_in_the_right_interpreters(
    network: list[netns_kit.Host], venvs: list[str], tmp_path: Path
) -> None:
    head, *rest = network
    address = f"{head.ip}:6399"
    allowed = sorted({str(Path(interpreter).parents[2]) for interpreter in venvs})
    agents = [netns_kit.agentd(head, tmp_path / "n0", allowed, "--head", "--listen", address, "--node-rank", "0")]
    agents += [
        netns_kit.agentd(host, tmp_path / f"n{rank}", allowed, "--connect", address, "--node-rank", str(rank))
        for rank, host in enumerate(rest, start=1)
    ]
    config = {
        "cluster": {
            "num_nodes": 3,
            "component_placement": {
                "reducer": {"node_group": "one,two", "placement": "0-1"},
                "plain": {"node_group": "other", "placement": "0:0-1"},
            },
            "node_groups": [
                {
                    "label": label,
                    "node_ranks": rank,
                    "env_configs": [
                        {
                            "node_ranks": rank,
                            "python_interpreter_path": venvs[rank],
                            "env_vars": [{"GLOO_SOCKET_IFNAME": "eth0"}, {"PYTHONPATH": str(HERE)}],
                        }
                    ],
                }
                for rank, label in enumerate(("one", "two", "other"))
            ],
        }
    }
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    env = {
        **os.environ,
        "PYTHONPATH": f"{netns_kit.PROJECT}:{HERE}",
        "RLINF_HEAD": address,
        "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1",
    }
    try:
        done = subprocess.run(
            head.command([sys.executable, str(script), json.dumps(config)]),
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        for agent in agents:
            agent.terminate()
        codes = [agent.wait(30) for agent in agents]
    assert done.returncode == 0, done.stdout + done.stderr
    assert codes == [0, 0, 0]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))

    assert result["ips"] == [host.ip for host in network]
    assert result["sums"] == [3.0, 3.0]
    for rank, about in enumerate(result["reducers"]):
        assert about["prefix"] == str(Path(venvs[rank]).parent.parent)
        assert about["env"]["RANK"] == str(rank)
        assert about["env"]["WORLD_SIZE"] == "2"
        assert about["env"]["CLUSTER_NODE_RANK"] == str(rank)
        assert about["env"]["NODE_RANK"] == str(rank)
        assert about["env"]["NODE_GROUP_LABEL"] == ("one", "two")[rank]
        assert about["env"]["MASTER_ADDR"] == network[0].ip
        assert about["env"]["MARK"] == network[rank].namespace  # its own node's environment, not the driver's
    assert len({about["env"]["MASTER_PORT"] for about in result["reducers"]}) == 1
    for about in result["plain"]:
        assert about["prefix"] == str(Path(venvs[2]).parent.parent)
        assert about["version"] in ([3, 12], [3, 10])
        assert not about["torch"]
        assert about["env"]["MASTER_ADDR"] == network[2].ip
    left = [path for n in range(3) for path in (tmp_path / f"n{n}").rglob("*") if path.is_socket()]
    assert left == []
