"""Who is meant by ranks, and the tree of a broadcast."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import PlacementError, WorkerAddress
from rlinf_actors.messaging import addressing


def names(addresses):
    return [address.get_name() for address in addresses]


@pytest.mark.parametrize("rank", [3, [3], (3,)])
def test_a_rank_or_a_path(rank):
    assert addressing.address("g", rank) == WorkerAddress("g", 3)


def test_integers_of_numpy():
    np = pytest.importorskip("numpy")
    assert addressing.address("g", np.int64(3)).rank_path == (3,)


@pytest.mark.parametrize(
    ("group", "rank"), [("g", "0"), ("g", 1.0), ("g", True), ("g", None), ("g", []), (3, 0), ("", 0)]
)
def test_other_objects_are_refused_as_ranks(group, rank):
    with pytest.raises(TypeError):
        addressing.address(group, rank)


def test_children_of_workers():
    assert addressing.address("g", [0, 1]) == addressing.address("g", (0, 1)) == WorkerAddress("g", (0, 1))
    for path in ([0, -1], [0] * 9, [0, 1 << 40]):
        with pytest.raises(ValueError, match="leads to no child"):
            addressing.address("g", path)
    named = [("a", (0, 1)), ("a", [0, 1]), ("b", [(0, 0), [0, 1], 2])]
    assert names(addressing.addresses(named)) == ["a:0:1", "a:0", "a:1", "b:0:0", "b:0:1", "b:2"]
    assert addressing.source(("b", (0, 1)), addressing.addresses(named)) == WorkerAddress("b", (0, 1))


def test_a_child_is_in_a_group_that_has_its_worker():
    addressing.check_rank(WorkerAddress("g", (1, 7)), 2)
    with pytest.raises(PlacementError, match="rank 2 is not in group 'g', which has ranks 0-1"):
        addressing.check_rank(WorkerAddress("g", (2, 0)), 2)


def test_groups_name_members_in_order():
    assert names(addressing.addresses([("a", 1), ("b", [0, [2]]), ("a", range(2))])) == ["a:1", "b:0", "b:2", "a:0"]
    with pytest.raises(ValueError, match="names no worker"):
        addressing.addresses([("a", [])])
    with pytest.raises(TypeError, match="each entry must be"):
        addressing.addresses(["a"])


def test_the_source_is_a_member():
    everyone = addressing.addresses([("a", [1, 0]), ("b", 0)])
    assert addressing.source(None, everyone).get_name() == "a:1"
    for src in (("b", 0), "b:0", WorkerAddress("b", 0), ["b", [0]]):
        assert addressing.source(src, everyone).get_name() == "b:0"
    with pytest.raises(ValueError, match="src b:1 is not a member of the broadcast: a:1, a:0, b:0"):
        addressing.source(("b", 1), everyone)
    with pytest.raises(TypeError):
        addressing.source(3, everyone)


def test_the_order_in_which_members_are_named_does_not_matter():
    src = WorkerAddress("b", 0)
    one = addressing.in_order(addressing.addresses([("a", [0, 1]), ("b", [0, 1])]), src)
    other = addressing.in_order(addressing.addresses([("b", [1, 0]), ("a", [1, 0])]), src)
    assert one == other
    assert names(one) == ["b:0", "a:0", "a:1", "b:1"]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=100))
def test_the_tree_reaches_each_member_once_and_each_node_once(nodes):
    parents = addressing.tree(nodes)
    everyone = range(len(nodes))
    assert [index for index in everyone if parents[index] == -1] == [0]
    for index in everyone:
        at, steps = index, 0
        while at != 0:
            at, steps = parents[at], steps + 1
            assert steps <= len(nodes)
    gives = {index: addressing.children(parents, nodes, index) for index in everyone}
    assert sorted(child for given in gives.values() for child in given) == list(range(1, len(nodes)))
    for node in set(nodes):
        left = [child for index in everyone if nodes[index] == node for child in gives[index] if nodes[child] != node]
        entered = [index for index in everyone[1:] if nodes[index] == node != nodes[parents[index]]]
        assert len(left) <= 2
        assert len(entered) == (0 if node == nodes[0] else 1)


def test_a_tree_over_three_nodes():
    nodes = [1, 0, 0, 1, 2, 2, 3]
    assert addressing.tree(nodes) == [-1, 0, 1, 0, 0, 4, 1]
    assert addressing.children(addressing.tree(nodes), nodes, 0) == [1, 4, 3]
    assert addressing.tree([5] * 4) == [-1, 0, 0, 0]


def test_streams_tell_sources_members_and_incarnations_apart():
    a, b = WorkerAddress("a", 0), WorkerAddress("b", 0)
    streams = {
        addressing.stream_name([a, b], ["1", "2"]),
        addressing.stream_name([b, a], ["2", "1"]),
        addressing.stream_name([a, b], ["1", "3"]),
        addressing.stream_name([a], ["1"]),
    }
    assert len(streams) == 4
    assert "" not in streams


def test_a_rank_outside_the_group_is_refused():
    addressing.check_rank(WorkerAddress("a", 1), 2)
    with pytest.raises(PlacementError, match="rank 2 is not in group 'a', which has ranks 0-1"):
        addressing.check_rank(WorkerAddress("a", 2), 2)
