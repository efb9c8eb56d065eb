"""Which node gets which rank."""

# ruff: noqa: E501 (tables: a case a line)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import ConfigError
from rlinf_actors.placement.node_order import RegisteredNode, missing_ranks, order_nodes


def test_explicit_ranks() -> None:
    nodes = [RegisteredNode("a", 2), RegisteredNode("b", 0, is_head=True), RegisteredNode("c", 1)]
    assert order_nodes(nodes) == {"a": 2, "b": 0, "c": 1}


def test_head_then_type_then_address_as_a_number() -> None:
    nodes = [
        RegisteredNode("cpu", ip="10.0.0.1"),
        RegisteredNode("npu", accelerator_type="NPU", ip="10.0.0.2"),
        RegisteredNode("nv10", accelerator_type="NV_GPU", ip="10.0.0.10"),
        RegisteredNode("nv9", accelerator_type="NV_GPU", ip="10.0.0.9"),
        RegisteredNode("nv6", accelerator_type="NV_GPU", ip="fd00::1"),
        RegisteredNode("named", accelerator_type="NV_GPU", ip="host-7"),
        RegisteredNode("other", accelerator_type="NEW", ip="10.0.0.0"),
        RegisteredNode("head", is_head=True, ip="10.0.0.99"),
    ]
    expected = ["head", "nv9", "nv10", "nv6", "named", "npu", "other", "cpu"]
    assert sorted(order_nodes(nodes), key=order_nodes(nodes).__getitem__) == expected


def test_fixed_ranks_stay() -> None:
    nodes = [
        RegisteredNode("new", ip="10.0.0.1"),
        RegisteredNode("old", ip="10.0.0.2"),
        RegisteredNode("x", ip="10.0.0.3"),
    ]
    assert order_nodes(nodes, {"old": 0, "away": 2}) == {"old": 0, "new": 1, "x": 3}
    explicit = [RegisteredNode("a", 0), RegisteredNode("b", 1)]
    assert order_nodes(explicit, {"a": 0}) == {"a": 0, "b": 1}


def test_gaps_may_still_fill() -> None:
    nodes = [RegisteredNode("a", 0), RegisteredNode("b", 3)]
    assert order_nodes(nodes, complete=False) == {"a": 0, "b": 3}
    assert missing_ranks({"a": 0, "b": 3}, 4) == [1, 2]


@pytest.mark.parametrize(
    ("nodes", "fixed", "message"),
    [
        ([RegisteredNode("a", 0, ip="10.0.0.1"), RegisteredNode("b")], {}, "set on a (10.0.0.1) but not on b; set it on all nodes or on none"),
        ([RegisteredNode("a", 0), RegisteredNode("b", 0)], {}, "is 0 on two nodes, a and b"),
        ([RegisteredNode("a", 0), RegisteredNode("b", 2)], {}, "gives ranks [0, 2] to a, b, and none has 1; 2 nodes have ranks 0-1"),
        ([RegisteredNode("a", 1)], {"a": 0}, "is 1 on node a, which has rank 0 in this cluster already"),
        ([RegisteredNode("a", 1)], {"b": 1}, "is 1 on two nodes, b and a"),
    ],
)  # fmt: skip
def test_each_fault_names_the_nodes(nodes: list[RegisteredNode], fixed: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        order_nodes(nodes, fixed)
    assert message in str(caught.value)
    assert caught.value.path == "RLINF_NODE_RANK"


entries = st.builds(
    RegisteredNode,
    key=st.text("abcdef", min_size=1, max_size=3),
    explicit=st.none(),
    is_head=st.booleans(),
    accelerator_type=st.sampled_from(["NV_GPU", "NPU", "NO_ACCEL"]),
    ip=st.ip_addresses().map(str) | st.just("10.0.0.1"),
)


@given(st.lists(entries, unique_by=lambda node: node.key, max_size=6), st.randoms())
def test_the_order_of_arrival_does_not_matter(nodes: list[RegisteredNode], random: object) -> None:
    ranks = order_nodes(nodes)
    assert sorted(ranks.values()) == list(range(len(nodes)))
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order_nodes(shuffled) == ranks
    for count in range(len(nodes)):  # nodes that came early keep their ranks
        early = order_nodes(shuffled[:count])
        late = order_nodes(shuffled, early)
        assert {key: late[key] for key in early} == early
        assert sorted(late.values()) == list(range(len(nodes)))
