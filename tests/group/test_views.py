"""execute_on and with_timeout: views that keep no state on the group."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from rlinf_actors.errors import PlacementError
from rlinf_actors.group.group_spec import GroupDetail, encode
from rlinf_actors.model.placement import Placement


async def test_a_view_calls_its_ranks_only(world):
    result = world.group.execute_on(2, 0).move(1)
    for rank in (0, 2):
        world.ranks[rank].ok((await world.ranks[rank].call()).id, rank)
    assert await result == [2, 0]
    assert world.ranks[1].calls == []


async def test_rank_that_is_given_twice_is_an_error(world):
    with pytest.raises(PlacementError, match="more than once"):
        world.group.execute_on(1, [1])


@pytest.mark.parametrize("ranks", [(0, 1), ([0, 1],), ((0, 1),), (range(2),), (0, [1])])
async def test_execute_on_takes_ranks_in_all_forms(world, ranks):
    assert repr(world.group.execute_on(*ranks).move) == "<method move() of group 'arms', ranks [0, 1]>"


@pytest.mark.parametrize("ranks", [(3,), (-1,), ([0, 3],), ("0",), (1.0,)])
async def test_invalid_rank_is_an_error_and_the_group_stays_usable(world, ranks):
    with pytest.raises(PlacementError, match="is not in group 'arms', which has ranks 0-2"):
        world.group.execute_on(*ranks)
    world.group.move()
    for rank in world.ranks:
        await rank.call()


async def test_execute_on_without_ranks_is_an_error(world):
    with pytest.raises(PlacementError, match="at least one rank"):
        world.group.execute_on()


async def test_a_view_may_be_kept_and_used_again(world):
    view = world.group.execute_on(1)
    view.move()
    view.move()
    await world.ranks[1].until(2)
    assert "ranks [1]" in repr(view)


async def test_two_tasks_use_views_at_once(world):
    async def ask(rank):
        result = world.group.execute_on(rank).move(rank)
        await asyncio.sleep(0)
        return await result

    tasks = [asyncio.create_task(ask(rank)) for rank in range(3)]
    for rank in world.ranks:
        rank.ok((await rank.call()).id, rank.rank)
    assert [await task for task in tasks] == [[0], [1], [2]]
    assert [rank.args for rank in world.ranks] == [[((0,), {})], [((1,), {})], [((2,), {})]]


async def test_view_without_a_call_warns(world):
    """Older scripts write group.execute_on(0) and group.move() on two lines."""
    with pytest.warns(RuntimeWarning, match=r"view of group 'arms' \(ranks \[0\]\) was dropped without a call"):
        world.group.execute_on(0)


async def test_view_that_was_used_or_refined_does_not_warn(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.group.execute_on(0).move()
        world.group.execute_on(0).execute_on(1).move()
        world.group.with_timeout(5).execute_on(1).move()
        world.group.execute_on(1).with_timeout(5).move()
        _ = world.group.worker_info_list
        gc.collect()


async def test_view_of_a_view_keeps_ranks_and_timeout(world):
    world.group.with_timeout(7).execute_on(1).move()
    assert (await world.ranks[1].call()).deadline_s == 7
    world.group.execute_on(2).with_timeout(8).move()
    assert (await world.ranks[2].call()).deadline_s == 8
    assert world.ranks[0].calls == []


def placed(world, *nodes):
    """Place the ranks of the group on these nodes."""
    placements = [Placement(rank, node, node) for rank, node in enumerate(nodes)]
    world.remote.detail = encode(GroupDetail(placements, [f"n{node}" for node in nodes], [""] * len(nodes)))


async def test_on_node_calls_the_ranks_of_that_node_only(world):
    placed(world, 0, 1, 0)
    result = world.group.on_node(0).move(1)
    for rank in (0, 2):
        world.ranks[rank].ok((await world.ranks[rank].call()).id, rank)
    assert await result == [0, 2]
    assert world.ranks[1].calls == []


async def test_on_node_of_a_view_keeps_to_the_ranks_of_the_view(world):
    placed(world, 0, 1, 0)
    assert repr(world.group.execute_on(2, 1).on_node(0).move) == "<method move() of group 'arms', ranks [2]>"


async def test_node_without_ranks_is_an_error_that_names_the_others(world):
    placed(world, 0, 1, 0)
    with pytest.raises(PlacementError, match="on that node; nodes with such ranks: 0, 1"):
        world.group.on_node(5)


async def test_on_node_without_placements_uses_the_states_of_the_head(world):
    world.remote.detail = ""
    nodes = {state.node_rank for state in world.remote.states.values()}
    node = min(nodes)
    ranks = [rank for rank, state in sorted(world.remote.states.items()) if state.node_rank == node]
    assert repr(world.group.on_node(node).move) == f"<method move() of group 'arms', ranks {ranks}>"
