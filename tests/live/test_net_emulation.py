"""cluster.net_emulation in running workers: what takes how long, against the configuration."""

from __future__ import annotations

import pytest
from emulated_workers import Far, Near

from rlinf_actors import Channel, Cluster, ConfigError, NodePlacementStrategy
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

LATENCY_S = 0.1
RATE = 10e6  # bytes a second: slow enough that twice the time is more than what a busy machine is late
MBPS = RATE * 8 / 1e6
CONFIG = {
    "num_nodes": 1,
    "net_emulation": {
        "enabled": True,
        "crossdc_pairs": [
            {"src": ["Near:0", "Other:0"], "dst": ["Far:0-1", "Late", "slow"], "delay_ms": LATENCY_S * 1e3}
        ],
        "bandwidth_groups": [{"members": ["Far:0-1"], "bandwidth_mbps": MBPS}],
    },
}


def check(took: list[float], hops: int) -> None:
    """No message is early, and none of the *hops* delays it twice."""
    assert hops * LATENCY_S <= min(took) < (hops + 1) * LATENCY_S


def test_messages_calls_channels_and_broadcasts_take_the_time_of_the_network(rlinf_leak_check):
    with Cluster(cluster_cfg=CONFIG) as cluster:
        near = Near.create_group().launch(cluster, name="NearGroup")
        far = Far.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="FarGroup")
        bare = Far.create_group().launch(cluster, name="bare")
        count = 5

        def sent(to, name, size=0, count=count):
            result = to.execute_on(0).receive("NearGroup", count)
            near.send_to(name, count, size).wait()
            return result.wait()[0]

        sent(bare, "bare")  # connects
        sent(far, "FarGroup")
        free = sent(bare, "bare")
        assert min(free) < LATENCY_S / 2, "the network to this group is not emulated"
        # one after another: what delays this machine for a moment delays all messages that are on their way
        check([sent(far, "FarGroup", count=1)[0] for _ in range(count)], 1)
        check(near.call(far, 0, count).wait()[0], 2)

        count, size = 2, 5_000_000  # in shared memory
        result = far.execute_on(0).receive_first_and_last("NearGroup", count)
        near.send_to("FarGroup", count, size).wait()
        expected, ((first, last),) = LATENCY_S + count * size / RATE, result.wait()
        assert expected <= last - first < expected + 0.9 * count * size / RATE, "each byte is counted once"

        other = Near.create_group().launch(cluster, name="OtherGroup")
        names = ["NearGroup", "OtherGroup"]
        for _ in range(2):  # the first time connects
            results = [far.execute_on(rank).receive_first_and_last(name, count) for rank, name in enumerate(names)]
            sends = [group.send_to("FarGroup", count, size, rank) for rank, group in enumerate((near, other))]
            times = [result.wait()[0] for result in results]
            assert all(send.wait() == [None] for send in sends)
        took = max(last for _, last in times) - min(first for first, _ in times)  # one may begin later than the other
        assert took >= LATENCY_S + 1.9 * count * size / RATE, "two processes share the bandwidth of the receivers"

        members = [("NearGroup", 0), ("FarGroup", [0, 1])]
        times = []
        for _ in range(3):
            result = far.member(members)
            near.source(size, members).wait()
            times.append(result.wait())
        expected = LATENCY_S + size / RATE  # once, for both
        assert all(expected <= min(took) < expected + size / RATE * 0.9 for took in zip(*times, strict=True))

        channel = Channel.create("items")
        near.put(channel, 1).wait()
        bare.get(channel, 1).wait()
        near.put(channel, count).wait()
        assert min(far.execute_on(0).get(channel, count).wait()[0]) >= LATENCY_S
        assert min(near.launch_another().wait()[0]) >= LATENCY_S


def test_nodes_are_endpoints_and_a_rank_that_a_group_does_not_have_is_refused(rlinf_leak_check):
    pairs = [
        {"src": "node:0", "dst": "node:1", "delay_ms": LATENCY_S * 1e3},
        {"src": "Few:0-7", "dst": "NearGroup:0", "delay_ms": 1},
    ]
    config = {"num_nodes": 2, "net_emulation": {"enabled": True, "crossdc_pairs": pairs}}
    with LocalCluster(2) as local:
        cluster = local.cluster(cluster_cfg=config)
        near = Near.create_group().launch(cluster, NodePlacementStrategy([0]), name="NearGroup")
        far = Far.create_group().launch(cluster, NodePlacementStrategy([1, 0]), name="FarGroup")
        assert min(near.call(far, 0, 3).wait()[0]) >= 2 * LATENCY_S
        assert min(near.call(far, 1, 3).wait()[0]) < LATENCY_S
        with pytest.raises(ConfigError, match=r"has Few:1, but group 'few' is launched with 1 rank,"):
            Far.create_group().launch(cluster, name="few")
