"""Clusters, placements, groups by name, events, and the helpers for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlinf_actors import (
    Cluster,
    ComponentPlacement,
    FlexiblePlacementStrategy,
    NodeInfo,
    PackedPlacementStrategy,
    Placement,
    PlacementStrategy,
    RestartPolicy,
    Worker,
    WorkerAddress,
    WorkerGroup,
)
from rlinf_actors.testing import LocalCluster, faults

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from rlinf_actors.group.group import GroupView
    from rlinf_actors.wire.event_values import ClusterEvent


class Actor(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()

    def step(self) -> int:
        return self._rank


def blocking(config: dict[str, Any]) -> None:
    cluster = Cluster(cluster_cfg=config)
    assert_type(cluster, Cluster)
    placement = ComponentPlacement(config, cluster)
    strategy = placement.get_strategy("actor")
    assert_type(strategy, PlacementStrategy)
    assert_type(strategy.get_placement(cluster), list[Placement])
    with Actor.create_group(config).launch(
        cluster, placement_strategy=strategy, name="actor", restart=RestartPolicy.on_failure(max_restarts=3)
    ) as group:
        assert_type(group, WorkerGroup[Actor])
        assert_type(group.placements, list[Placement])
        assert_type(group.world_size, int)
        print(group.step().wait())
    Actor.create_group(config).launch(cluster, PackedPlacementStrategy(0, 3, num_hardware_per_process=2))
    Actor.create_group(config=config).launch(cluster, FlexiblePlacementStrategy([[0, 1], [2]]), memory_limit="8GiB")
    assert_type(Actor.create_group(config).launch(cluster, detached=True, get_if_exists=True), WorkerGroup[Actor])
    assert_type(cluster.allocate(Actor, "one", cls_args=(config,)), WorkerGroup[Actor])
    assert_type(WorkerGroup.from_group_name(Actor, "actor"), WorkerGroup[Actor])
    assert_type(WorkerGroup.from_address(Actor, WorkerAddress("actor", 0)), GroupView[Actor])
    assert_type(cluster.get_node_info(0), NodeInfo)
    assert_type(cluster.num_accelerators, int)
    for event in cluster.events(follow=True):
        assert_type(event, ClusterEvent)
    cluster.shutdown()


async def awaited(config: dict[str, Any]) -> None:
    async with Cluster.connect(num_nodes=1) as cluster:
        assert_type(cluster, Cluster)
        async with Actor.create_group(config).launch(cluster) as group:
            assert_type(group, WorkerGroup[Actor])
            print(await group.step())
        ready = await Actor.create_group(config).launch(cluster)
        assert_type(ready, WorkerGroup[Actor])
        assert_type(await cluster.get_alive_nodes(async_op=True), list[NodeInfo])
        assert_type(await WorkerGroup.from_group_name(Actor, "a", async_op=True), WorkerGroup[Actor])
        assert_type(await WorkerGroup.from_address(Actor, WorkerAddress("a"), async_op=True), GroupView[Actor])
        step = ready.call(Actor.step)
        assert_type(await step.consume_duration(async_op=True), float)
        assert_type(await step.consume_durations("mean", async_op=True), dict[str, float])
        await ready.shutdown()
        await ready.shutdown(async_op=True)
        await cluster.shutdown(async_op=True)
        async for event in cluster.events():
            assert_type(event, ClusterEvent)
    assert_type(await Cluster.connect(num_nodes=0, head="10.0.0.1:6380"), Cluster)


def test_of_a_user(rlinf_cluster: Cluster, local_cluster: Callable[..., LocalCluster]) -> None:
    group = Actor.create_group({}).launch(rlinf_cluster)
    assert group.call(Actor.step).wait() == [0]
    with LocalCluster(num_nodes=2) as local, faults.inject("link.send", faults.drop()):
        assert_type(local.cluster(), Cluster)
        local.kill_node(1)
    local_cluster(3)


async def test_of_a_user_with_asyncio(rlinf_cluster_async: Cluster) -> None:
    async with LocalCluster(num_nodes=2) as local, local.connect() as cluster:
        assert_type(cluster, Cluster)
        await local.kill_node(1, async_op=True)
    assert_type(await LocalCluster().start(async_op=True), LocalCluster)
    assert await Actor.create_group({}).launch(rlinf_cluster_async)
