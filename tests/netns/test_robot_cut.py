"""The network between a robot's node and the head is cut: the arm stops, and everybody says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest

HERE = Path(__file__).resolve().parent
PROJECT, LIVE = HERE.parent.parent, HERE.parent / "live"
sys.path.append(str(LIVE))  # the arms and their workers

import robot_kit as rk  # noqa: E402

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

DRIVER = """
    import json, sys
    import robot_kit as rk
    from rlinf_actors import Cluster, ComponentPlacement

    config = json.loads(sys.argv[1])
    with Cluster(cluster_cfg=config["cluster"], timeout=60) as cluster:
        group = rk.Streamer.create_group().launch(
            cluster, ComponentPlacement(config, cluster).get_strategy("env"), name="env")
        try:
            group.moves().wait()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(2) as made:
        yield made


def agentd(host: netns_kit.Host, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    folder.mkdir(mode=0o700)
    command = [
        sys.executable, "-m", "agentd", "--run-dir", str(folder), "--log-dir", str(folder / "logs"),
        "--insecure-test-network", *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}:{LIVE}"}
    return subprocess.Popen(host.command(command), env=env, stdin=subprocess.DEVNULL)


def test_the_arm_stops_when_the_network_is_cut(network: list[netns_kit.Host], tmp_path: Path) -> None:
    head, lab = network
    address = f"{head.ip}:6399"
    agents = [
        agentd(head, tmp_path / "n0", "--head", "--listen", address, "--node-rank", "0"),
        agentd(lab, tmp_path / "n1", "--connect", address, "--node-rank", "1"),
    ]
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    env = {
        **os.environ,
        "PYTHONPATH": f"{PROJECT}:{LIVE}",
        "RLINF_HEAD": address,
        "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1",
    }
    try:
        with rk.Arm(tmp_path, lab.command) as arm:
            config = rk.config(arm.address(), node_rank=1, num_nodes=2)
            with subprocess.Popen(
                head.command([sys.executable, str(script), json.dumps(config)]),
                env=env,
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            ) as driver:
                arm.until_streaming()
                cut = time.monotonic()
                lab.link("down")
                commands = arm.until_closed()
                rk.stopped_last(commands)
                stop = next(one for one in commands if one.text == "stop")
                print(f"stopped {stop.at - cut:.3f} s after the cut")
                assert driver.stdout is not None
                told = driver.stdout.readline()
                lab.link("up")
        assert told.startswith("NodeLostError: ")
        assert re.search(r"its agentd was silent for [\d.]+ s, and so the lease of SimulatedArm", told)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(30)
