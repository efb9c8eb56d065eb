"""Placements that name no resources leave out the nodes on which the job may not launch."""

from dataclasses import replace

import pytest

from rlinf_actors.placement.component import ComponentPlacement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.plan import plan
from rlinf_actors.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, default_strategy


def cluster(accelerators, closed):
    nodes = DescribedCluster.identical(3, accelerators).get_node_group("node").nodes
    return DescribedCluster([replace(one, closed="not here" if one.node_rank in closed else "") for one in nodes])


def where(strategy, on):
    return [placed.cluster_node_rank for placed in strategy.get_placement(on)]


@pytest.mark.parametrize("accelerators", [0, 2])
def test_all_and_the_default_leave_out_closed_nodes(accelerators):
    on = cluster(accelerators, closed=(0,))
    each = max(accelerators, 1)
    config = {"cluster": {"num_nodes": 3, "component_placement": {"actor": "all"}}}
    placement = ComponentPlacement(config, on)
    assert where(placement.get_strategy("actor"), on) == [1] * each + [2] * each
    assert placement.get_hardware_ranks("actor") == list(range(each, 3 * each)), "ranks of resources do not move"
    assert where(default_strategy(on), on) == ([1, 1, 2, 2] if accelerators else [1])


def test_named_resources_stay_what_they_are():
    """The head then refuses the launch; a number never means other hardware than on an open cluster."""
    on = cluster(2, closed=(0,))
    assert where(PackedPlacementStrategy(0, 3), on) == [0, 0, 1, 1]
    assert where(NodePlacementStrategy([0, 2]), on) == [0, 2]
    found = plan({"cluster": {"num_nodes": 3, "component_placement": {"actor": "0-3"}}}, on)
    assert found.closed == ["not here"]
    assert plan({"cluster": {"num_nodes": 3, "component_placement": {"actor": "2-3"}}}, on).closed == []


def test_cluster_without_an_open_node_is_placed_on_as_before():
    on = cluster(2, closed=(0, 1, 2))
    assert where(default_strategy(on), on) == [0, 0, 1, 1, 2, 2]
