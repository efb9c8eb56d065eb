"""Large parts between two nodes in two network namespaces, with keys and without: contents, ends."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pytest
from keyed_hosts import MODULES, environment, two_nodes

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(170),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]


@pytest.fixture
def network() -> Iterator[list[netns_kit.Host]]:
    with netns_kit.hosts(2) as made:
        yield made


DRIVER = """
    import json

    import bulk_workers as bw
    from rlinf_actors import Channel, Cluster, NodePlacementStrategy, WorkerDiedError

    def launch(cluster, name="movers"):
        group = bw.Mover.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 1]), name=name)
        group.wait_ready(60)
        return group

    with Cluster(num_nodes=2, timeout=30) as cluster:
        group = launch(cluster)
        far = group.execute_on(1)
        result = {
            "take": far.take(bw.array(24, 1), 24, 1).wait(60),
            "give": bw.right(far.give(24, 2).wait(60)[0], 24, 2),
            "swap": group.swap(40).wait(60),
            "channel": group.through(Channel.create("items"), 9).wait(60),
            "threads": group.streams().wait(60),
        }
        before = far.descriptors().wait(60)
        for seed in range(10):
            assert far.take(bw.array(3, seed), 3, seed).wait(60) == [True]
        result["descriptors"] = far.descriptors().wait(60)[0] - before[0]

        # the receiver dies while large messages are on their way: the sender's wait ends
        sending = group.execute_on(0).send_much(1000)
        far.wait_for_one().wait(60)
        try:
            far.stop_self().wait(60)
        except WorkerDiedError:
            pass
        try:
            sending.wait(60)
            result["death"] = "the sender did not notice"
        except Exception as error:
            result["death"] = type(error).__name__
        group.shutdown()
    print("RESULT " + json.dumps(result))
"""


@pytest.mark.parametrize(
    "keyed",
    [
        pytest.param(True, id="keys"),
        pytest.param(False, id="plain", marks=pytest.mark.nightly("with keys is how nodes run; tests/net has both")),
    ],
)
def test_large_parts_travel_between_nodes(network: list[netns_kit.Host], tmp_path: Path, keyed: bool) -> None:
    head, far = network
    address = f"{head.ip}:6399"
    if keyed:
        agents = two_nodes(head, far, tmp_path, address)
        env = environment(tmp_path, "head", RLINF_HEAD=address)
    else:
        prefixes = [str(Path(sys.prefix))]
        agents = [
            netns_kit.agentd(head, tmp_path / "n0", prefixes, "--head", "--listen", address, "--node-rank", "0"),
            netns_kit.agentd(far, tmp_path / "n1", prefixes, "--connect", address, "--node-rank", "1"),
        ]
        env = environment(tmp_path, "head", RLINF_HEAD=address, RLINF_ACTORS_INSECURE_TEST_NETWORK="1")
    env["PYTHONPATH"] = MODULES
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    try:
        done = subprocess.run(
            head.command([sys.executable, str(script)]),
            env=env, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    finally:
        for agent in reversed(agents):
            agent.terminate()
            agent.wait(30)
            if agent.stdout is not None:
                agent.stdout.close()
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["take"] == [True]
    assert result["give"]
    assert result["swap"] == [[True] * 3] * 2
    assert result["channel"] == [True, True]
    assert all(1 <= threads <= 4 for threads in result["threads"])
    assert result["descriptors"] <= 2
    assert result["death"] in ("PeerDiedError", "WorkerDiedError"), result["death"]
