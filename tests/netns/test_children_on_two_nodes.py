"""Children of workers on two nodes with keys: messages, broadcasts, channels, and a death."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import netns_kit
import pytest
from keyed_hosts import environment, two_nodes

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

DRIVER = """
    import json
    from rlinf_actors import Channel, Cluster, NodePlacementStrategy
    import child_workers

    S = 120
    FOUR = ["spawn", "spawn", "fork", "fork"]
    with Cluster(num_nodes=2, timeout=60) as cluster:
        both = NodePlacementStrategy([0, 1])
        group = child_workers.Parent.create_group().launch(cluster, placement_strategy=both, name="p")
        others = child_workers.Parent.create_group().launch(cluster, placement_strategy=both, name="q")
        on = group.execute_on
        result = {"started": group.start(FOUR).wait(S), "swaps": [], "given": [], "got": []}
        for child in range(4):  # each with one on the other node, and with a worker there
            other = 3 - child
            on(0).begin(child, "swap", "a", "p", [1, other]).wait(S)
            result["swaps"] += on(1).let(other, "swap", "b", "p", [0, child]).wait(S) + on(0).finish(child).wait(S)
            swap = others.execute_on(1).swap("c", "p", (0, child))
            result["swaps"] += on(0).let(child, "swap", "d", "q", 1).wait(S) + [list(swap.wait(S)[0])]
        members = [("p", [[0, 2], [0, 0], [1, 1], [1, 3]]), ("q", [0, 1])]
        places = [(0, 2), (0, 0), (1, 1), (1, 3)]
        for rank, child in places:
            on(rank).begin(child, "give", "all" if (rank, child) == (0, 2) else None, members).wait(S)
        result["given"] += others.give(None, members).wait(S)
        for rank, child in places:
            result["given"] += on(rank).finish(child).wait(S)
        channel = Channel.create("items")
        for rank in range(2):
            for child in range(4):
                on(rank).let(child, "put", "items", [rank, child]).wait(S)
        for rank in (1, 0):
            for child in range(4):
                result["got"] += on(rank).let(child, "get", "items").wait(S)
        ends = [others.execute_on(rank).hear_end("p", (1, 2)) for rank in range(2)]
        on(1).kill(2).wait(S)
        result["ends"] = [end.wait(S)[0] for end in ends]
        channel.put("again")
        result["died"] = on(1).let(0, "get_and_die", "items").wait(S)
        result["again"] = channel.get(timeout=S)
        group.shutdown()
    print("RESULT " + json.dumps(result))
"""


def test_children_on_two_keyed_nodes_exchange_messages(place: Path) -> None:
    with netns_kit.hosts(2) as (head, far):
        address = f"{head.ip}:6399"
        processes: list[subprocess.Popen[str]] = []
        try:
            processes += two_nodes(head, far, place, address)
            script = place / "driver.py"
            script.write_text(textwrap.dedent(DRIVER))
            done = subprocess.run(
                head.command([sys.executable, str(script)]),
                env=environment(place, "head", RLINF_HEAD=address),
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(30)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    assert result["started"] == [[None] * 4] * 2
    swaps = []
    for child in range(4):
        swaps += [[f"p:0:{child}", "a"], [f"p:1:{3 - child}", "b"], ["q:1", "c"], [f"p:0:{child}", "d"]]
    assert result["swaps"] == swaps
    assert result["given"] == ["all"] * 6
    assert sorted(result["got"]) == [[rank, child] for rank in range(2) for child in range(4)]
    for end in result["ends"]:
        assert end.startswith("PeerDiedError: ")
        assert "worker p:1:2 on " in end
        assert "was ended by signal 9 (SIGKILL)" in end
    assert (result["died"], result["again"]) == (["it ended"], "again")
