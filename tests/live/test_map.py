"""Work over items and different arguments per rank, with real workers."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading

import live_workers as lw
import pace
import pytest
from map_workers import AsyncMapper, Mapper

from rlinf_actors import RestartPolicy, UsageError, WorkerDiedError
from rlinf_actors.compat import timeout

pytestmark = pytest.mark.live


def test_map_handles_ten_thousand_items_without_an_event_loop(cluster):
    group = lw.many(cluster, Mapper, 3)
    before = threading.active_count()
    values = []
    for value in group.method(Mapper.double).map(range(10_000), max_in_flight=8):
        values.append(value)
        assert threading.active_count() <= before
    assert sorted(values) == [2 * n for n in range(10_000)]
    assert list(group.double.map(range(1_000), ordered=True)) == [2 * n for n in range(1_000)]


async def test_map_handles_ten_thousand_items_beside_other_tasks(cluster):
    group = await lw.many(cluster, Mapper, 3)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    values = [value async for value in group.method(Mapper.double).map(range(10_000), max_in_flight=8)]
    beside.cancel()
    assert sorted(values) == [2 * n for n in range(10_000)]
    assert turns > 100


def test_slow_consumer_pauses_the_drawing_of_a_live_map(cluster):
    group = lw.many(cluster, Mapper, 2).wait_ready()
    drawn = []

    def items():
        for n in itertools.count():
            drawn.append(n)
            yield n

    for taken, _ in enumerate(group.double.map(items(), max_in_flight=3), 1):
        group.double(0).wait()  # the workers have run all calls that they received before
        assert len(drawn) == taken + 6
        if taken == 20:
            break
    assert group.double(3).wait() == [6, 6]


@pytest.mark.parametrize("ordered", [False, True])
def test_items_of_a_killed_worker_go_to_other_ranks(cluster, ordered):
    group = lw.many(cluster, Mapper, 3).wait_ready()
    results = group.method(Mapper.pid_after).map(range(500), max_in_flight=4, ordered=ordered)
    numbers, pids, killed = [], set(), 0
    for number, pid in results:
        numbers.append(number)
        pids.add(pid)
        if len(numbers) == 50:
            killed = group.execute_on(1).method(Mapper.pid_after)(0).wait()[0][1]
            os.kill(killed, signal.SIGKILL)
    assert sorted(numbers) == list(range(500))
    assert not ordered or numbers == list(range(500))
    assert killed in pids


def test_worker_that_an_item_killed_is_restarted_and_gets_items_again(cluster):
    policy = RestartPolicy.on_failure(max_restarts=3, within_s=300, backoff_s=0)
    group = lw.many(cluster, Mapper, 2, restart=policy).wait_ready()
    view = group.execute_on(1)
    assert sorted(view.method(Mapper.die_at).map(range(50))) == list(range(50))
    assert view.double(1).wait() == [2]


def test_item_that_kills_every_worker_ends_the_map(cluster):
    policy = RestartPolicy.on_failure(max_restarts=9, within_s=300, backoff_s=0)
    group = lw.many(cluster, Mapper, 1, restart=policy).wait_ready()
    with pytest.raises(WorkerDiedError, match=r"die\(\) may have run for items 0 of map\(\).*was sent 3 times"):
        list(group.die.map([1]))


def test_items_of_a_method_that_is_not_idempotent_are_not_repeated(cluster):
    group = lw.many(cluster, Mapper, 2).wait_ready()
    values = []
    with pytest.raises(WorkerDiedError, match=r"die_once\(\) may have run for items .*\b13\b") as caught:
        values.extend(group.method(Mapper.die_once).map(itertools.count(), max_in_flight=2))
    assert caught.value.exit_code == 3
    assert 13 not in values


def test_map_fails_when_all_workers_are_dead(cluster):
    group = lw.many(cluster, Mapper, 2).wait_ready()
    with pytest.raises(WorkerDiedError):
        list(group.die.map(itertools.count()))


async def test_leaving_the_loop_cancels_the_running_calls(cluster):
    group = await lw.many(cluster, AsyncMapper, 1)
    assert sorted([n async for n in group.method(AsyncMapper.meet).map(range(3), max_in_flight=3)]) == [0, 1, 2]
    results = group.stay.map(range(9), max_in_flight=2)
    step = asyncio.create_task(anext(results))
    async with timeout(pace.PATIENCE_S):
        while await group.staying() != [2]:
            pass
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert await group.staying() == [2]  # a step that was cancelled ends nothing
        del results, step
        while await group.staying() != [0]:
            pass


def test_group_stays_usable_after_a_map_is_left(cluster):
    group = lw.many(cluster, Mapper, 2)
    for _ in group.double.map(itertools.count(), max_in_flight=50):
        break
    assert group.double.scatter([1, 5]).wait() == [2, 10]


async def test_map_works_inside_workers(cluster):
    mappers = await lw.many(cluster, Mapper, 2, name="mappers")
    others = await lw.many(cluster, AsyncMapper, 2)
    assert await others.over.scatter(["mappers"] * 2, [1, 2, 3]) == [[2, 4, 6]] * 2
    with pytest.raises(UsageError, match="waits for its own"):
        await mappers.execute_on(0).over_own_group([1, 2, 3])
