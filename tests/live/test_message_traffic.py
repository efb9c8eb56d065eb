"""Random traffic among three workers, with and without one that is killed: order, loss, contents, memory."""

from __future__ import annotations

import os
import signal

import live_workers as lw
import pytest
import traffic_workers as tw

from rlinf_actors import Cluster, WorkerDiedError
from rlinf_actors.settings import SEND_WINDOW

pytestmark = pytest.mark.live

NAMES = ("a", "b", "c")


@pytest.mark.parametrize("kill", [False, True], ids=["in peace", "with a death"])
def test_random_traffic_keeps_order_and_contents(kill):
    cluster = Cluster(num_nodes=1)
    try:
        window = {SEND_WINDOW: str(4 << 20)}
        groups = {name: lw.many(cluster, tw.Traffic, 1, name=name, env_vars=window) for name in NAMES}
        others = {name: [other for other in NAMES if other != name] for name in NAMES}
        meeting = [group.meet(others[name]) for name, group in groups.items()]
        for met in meeting:
            met.wait()
        victim = groups["c"].pid().wait()[0]
        talks = {
            name: group.talk(others[name], 300, seed, half=kill and name == "c")
            for seed, (name, group) in enumerate(groups.items())
        }
        if kill:
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(WorkerDiedError):
                talks.pop("c").wait()
        for name, talk in talks.items():
            ended = talk.wait()[0]
            held = ended.pop("held")
            assert set(ended) == {f"{way} {other}" for way in ("to", "from") for other in others[name]}
            for what, how in ended.items():
                assert how == ("died" if kill and what.endswith(" c") else "all"), what
            assert kill or held == 0  # what the victim had on its way may come after the news of its death
    finally:
        cluster.shutdown()
