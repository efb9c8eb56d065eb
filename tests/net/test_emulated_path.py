"""The model of an emulated network, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.config.net_emulation_config import CrossDCPair, NetEmulationConfig
from rlinf_actors.net.emulated_path import MOST_LOSSES, Bandwidth, EmulatedPath, Topology, Transfer, endpoints

pytestmark = pytest.mark.quick

MB = 1_000_000


def path(delay_ms: float = 0.0, **keys: Any) -> EmulatedPath:
    return EmulatedPath(CrossDCPair("a:0", "b:0", delay_ms, **keys), seed="1")


def topology(**section: Any) -> Topology:
    config = NetEmulationConfig.from_cfg({"enabled": True, **section})
    assert config is not None
    return Topology(config)


def pair(src: Any, dst: Any, delay_ms: float, **keys: Any) -> dict[str, Any]:
    return {"src": src, "dst": dst, "delay_ms": delay_ms, **keys}


def between(of: Topology, src: str, dst: str, nodes: tuple[int, int] = (-1, -1)) -> EmulatedPath | None:
    return of.path(endpoints(src, nodes[0]), endpoints(dst, nodes[1]))


def test_latency_delays_each_message_by_itself():
    one = path(20)
    assert [one.depart(now, 1000) for now in (100.0, 100.001, 107.0)] == pytest.approx([100.02, 100.021, 107.02])


def test_bandwidth_sends_one_message_after_the_other():
    one = path(10, bandwidth_mbps=8)
    assert one.depart(5.0, MB) == pytest.approx(6.01)
    assert one.depart(5.0, MB) == pytest.approx(7.01)
    assert one.depart(9.0, MB // 2) == pytest.approx(9.51)


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, 100_000)), min_size=1, max_size=50))
def test_messages_never_overtake_and_never_exceed_the_bandwidth(sends):
    one, now, last, sent = path(5, jitter_ms=50, loss=0.3, bandwidth_mbps=80), 0.0, 0.0, 0
    for gap, size in sends:
        now, sent = now + gap, sent + size
        arrival = one.depart(now, size)
        assert arrival >= max(last, now, sent / (10 * MB))
        last = arrival


def test_jitter_stays_within_its_bound_and_is_the_same_in_each_run():
    def arrivals():
        one = path(50, jitter_ms=10)
        return [one.depart(float(now), 0) - now for now in range(1000)]

    found = arrivals()
    assert found == arrivals()
    assert 0.04 <= min(found) < 0.042
    assert 0.058 < max(found) <= 0.06


def test_lost_messages_are_sent_again_after_the_retransmission_time():
    one = path(10, loss=0.25, retransmit_ms=100)
    late = [one.depart(float(now * 100), 0) - now * 100 for now in range(4000)]
    again = [round((each - 0.01) / 0.1) for each in late]
    assert late == pytest.approx([0.01 + 0.1 * times for times in again])
    assert sum(again) / len(again) == pytest.approx(0.25 / 0.75, rel=0.1)
    assert max(again) <= MOST_LOSSES


def test_retransmission_takes_at_least_tcps_time_and_two_latencies_by_default():
    assert path(10, loss=0.99).depart(0.0, 0) == pytest.approx(0.01 + MOST_LOSSES * 0.2)
    assert path(300, loss=0.99).depart(0.0, 0) == pytest.approx(0.3 + MOST_LOSSES * 0.6)


class TestTopology:
    def test_messages_between_other_workers_are_not_emulated(self):
        found = topology(crossdc_pairs=[pair("Env:0", "Actor:0", 10)])
        assert between(found, "EnvGroup:0", "ActorGroup:0") is not None
        assert between(found, "EnvGroup:1", "ActorGroup:0") is None
        assert between(found, "EnvGroup:0", "Rollout:0") is None

    def test_symmetric_pairs_are_two_paths(self):
        pairs = [pair("Env:0", "Actor:0", 10)]
        both = topology(crossdc_pairs=pairs)
        there, back = between(both, "Env:0", "Actor:0"), between(both, "Actor:0", "Env:0")
        assert there is not None
        assert back is not None
        assert there is not back
        assert between(topology(crossdc_pairs=pairs, symmetric=False), "Actor:0", "Env:0") is None

    def test_two_workers_have_one_path(self):
        found = topology(crossdc_pairs=[pair("Env", "Actor", 10)])
        assert between(found, "Env:3", "Actor:1") is between(found, "EnvGroup:3", "ActorGroup:1:0")
        assert between(found, "Env:3", "Actor:1") is not between(found, "Env:4", "Actor:1")

    def test_nodes_and_the_driver_are_endpoints_and_groups_come_before_them(self):
        found = topology(
            crossdc_pairs=[pair("node:0", "node:1", 10), pair("driver", "node:all", 20), pair("Env:0", "Actor", 30)]
        )
        arrivals = {
            who: round(one.depart(0.0, 0) * 1e3)
            for who, one in {
                "node to node": between(found, "x:0", "y:5", (0, 1)),
                "driver": between(found, "driver", "y:5", (0, 1)),
                "groups": between(found, "Env:0", "Actor:7", (0, 1)),
            }.items()
            if one is not None
        }
        assert arrivals == {"node to node": 10, "driver": 20, "groups": 30}
        assert between(found, "x:0", "y:5", (1, 1)) is None

    def test_members_of_a_bandwidth_group_share_it_in_each_direction(self):
        found = topology(
            crossdc_pairs=[pair("Env:0-1", "Actor:0-1", 0)],
            bandwidth_groups=[{"members": ["Env:0-1"], "bandwidth_mbps": 8}],
        )

        def arrival(src, dst):
            one = between(found, src, dst)
            assert one is not None
            return one.depart(0.0, MB)

        assert arrival("Env:0", "Actor:0") == pytest.approx(1.0)
        assert arrival("Env:1", "Actor:1") == pytest.approx(2.0)
        assert arrival("Actor:0", "Env:0") == pytest.approx(1.0)
        assert arrival("Actor:1", "Env:1") == pytest.approx(2.0)

    def test_broadcast_uses_each_bandwidth_group_once_and_each_path_by_itself(self):
        found = topology(
            crossdc_pairs=[pair("Env:0", ["Actor:0-1"], 100), pair("Env:0", "Actor:2", 300)],
            bandwidth_groups=[
                {"members": ["Env:0"], "bandwidth_mbps": 8},
                {"members": ["Actor:0-2"], "bandwidth_mbps": 8},
            ],
        )
        transfer, paths = Transfer(), [between(found, "Env:0", f"Actor:{rank}") for rank in range(3)]
        arrivals = [one.depart(0.0, MB, transfer) for one in paths if one is not None]
        assert arrivals == pytest.approx([1.1, 1.1, 1.3])
        assert paths[0] is not None
        assert paths[0].depart(0.0, MB) == pytest.approx(2.1), "the next message waits for one transfer"

    def test_stages_of_one_bandwidth_cost_its_time_once(self):
        one = EmulatedPath(CrossDCPair("a:0", "b:0", 0, bandwidth_mbps=8), Bandwidth(MB), Bandwidth(MB))
        assert one.depart(0.0, MB) == pytest.approx(1.0)
        slow = EmulatedPath(CrossDCPair("a:0", "b:0", 0, bandwidth_mbps=8), Bandwidth(MB), Bandwidth(MB / 4))
        assert slow.depart(0.0, MB) == pytest.approx(4.0)


def test_worker_that_comes_back_on_another_node_has_the_path_of_that_node():
    of = topology(crossdc_pairs=[pair("node:0", "node:1", 10), pair("node:0", "node:2", 500)])
    for node, delay in ((1, 0.01), (2, 0.5), (1, 0.01)):
        one = between(of, "a:0", "b:0", (0, node))
        assert one is not None
        assert one.depart(7.0, 1) == pytest.approx(7.0 + delay)
    assert between(of, "a:0", "b:0", (0, 1)) is between(of, "a:0", "b:0", (0, 1))
