"""A launch on a robot that is not up ends when nobody has a handle of it any more: its task was cancelled, say."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import held_workers as hw
import pytest
import robot_kit as rk

from rlinf_actors import Cluster, ComponentPlacement, NodePlacementStrategy, WorkerGroup

pytestmark = pytest.mark.live
Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def arm(tmp_path_factory) -> Iterator[rk.Arm]:
    with rk.Arm(tmp_path_factory.mktemp("arm")) as made:
        yield made


@pytest.fixture
def done(tmp_path) -> Path:
    """The file that ends the constructors."""
    return tmp_path / "done"


@pytest.fixture
def cluster(running, arm) -> Iterator[Cluster]:
    if not running:
        running.append(Cluster(cluster_cfg=rk.config(arm.address())["cluster"]))
    [shared] = running
    yield shared
    for group in shared.runtime.groups.all():
        if group.owned and not group.gone.done():
            shared.runtime.io.submit(shared.runtime.groups.stop(group, 0.0)).result(60)
    arm.forget()


@pytest.fixture
def launch(cluster, arm, done) -> Launch:
    strategy = ComponentPlacement(rk.config(arm.address()), cluster).get_strategy("env")
    return lambda name="env", **options: hw.Homing.create_group(str(done)).launch(
        cluster, strategy, name=name, **options
    )


async def until_homing(arm: rk.Arm) -> None:
    await asyncio.to_thread(arm.until_streaming)


async def works_again(arm: rk.Arm, launch: Launch, done: Path) -> None:
    """The arm has stopped, and another group gets it."""
    group = launch("next")
    await asyncio.to_thread(arm.until_closed)
    os.close(os.open(done, os.O_CREAT))
    assert await (await group).pid()


async def at_once(launch: Launch) -> Any:
    return await launch()


async def in_a_variable(launch: Launch) -> Any:
    group = launch()
    await group
    return group


async def called_at_once(launch: Launch) -> Any:
    return await launch().pid()


async def called(launch: Launch) -> Any:
    group = launch()
    result = group.with_timeout(60).pid()
    return await result


async def streamed(launch: Launch) -> Any:
    return [item async for item in launch().numbers()]


WAYS = [at_once, in_a_variable, called_at_once, called, streamed]


@pytest.mark.parametrize("bring_up", WAYS)
async def test_cancelled_launch_ends_and_the_next_one_gets_the_robot(launch, arm, done, bring_up):
    bringing = asyncio.ensure_future(bring_up(launch))
    await until_homing(arm)
    bringing.cancel()  # and nobody awaits it: it keeps its error, with all frames
    await asyncio.wait([bringing])
    await works_again(arm, launch, done)
    assert bringing.cancelled()


@pytest.mark.parametrize("bring_up", WAYS)
async def test_launch_that_takes_too_long_ends(launch, arm, done, bring_up):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bring_up(launch), 2.0)
    await works_again(arm, launch, done)


async def test_cancelled_launch_that_waits_for_the_robot_ends(launch, arm, done):
    first = launch("first")
    await until_homing(arm)
    waiting = asyncio.ensure_future(in_a_variable(lambda: launch("second", wait_for_hardware=60.0)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    done.touch()
    await first
    await first.shutdown()
    third = await launch("third")
    assert await third.pid()


async def test_launch_goes_on_while_another_task_awaits_it(launch, arm, done):
    group = launch()
    cancelled, other = (asyncio.ensure_future(group) for _ in range(2))
    del group
    await until_homing(arm)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    done.touch()
    assert await (await other).pid()


async def test_launch_goes_on_after_a_time_limit_while_its_handle_is_kept(launch, arm, done):
    group = launch()
    await until_homing(arm)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(group, 0.01)
    done.touch()
    assert await (await group).pid()


async def test_result_that_is_kept_keeps_the_launch(launch, arm, done):
    result = launch().pid()
    await until_homing(arm)
    done.touch()
    assert await result


async def test_call_that_another_task_awaits_keeps_the_launch(launch, arm, done):
    result = launch().pid()
    cancelled, other = (asyncio.ensure_future(result) for _ in range(2))
    del result
    await until_homing(arm)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    done.touch()
    assert await other


async def test_call_goes_on_after_a_time_limit_while_the_handle_is_kept(launch, arm, done):
    group = launch()
    result = group.pid()
    await until_homing(arm)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(result, 0.01)
    done.touch()
    assert await result


def test_dropped_handle_ends_the_launch_and_is_told(launch, arm, caplog):
    group = launch()
    arm.until_streaming()
    del group
    rk.stopped_last(arm.until_closed())
    (said,) = [record.getMessage() for record in caplog.records if "is ended" in record.getMessage()]
    assert "group 'env', with SimulatedArm" in said
    assert "keep what launch() returns" in said


def test_handle_that_only_the_garbage_collector_frees_ends_the_launch(launch, arm):
    cycle = [launch()]
    cycle.append(cycle)
    arm.until_streaming()
    del cycle
    gc.collect()
    rk.stopped_last(arm.until_closed())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda group: group.double(4).wait(), [8]),
        (lambda group: list(group.numbers()), [(0, 0), (0, 1), (0, 2)]),
        (lambda group: list(group.double.map([1, 2, 3], ordered=True)), [2, 4, 6]),
        (lambda group: group.execute_on(0).double(4).wait(), [8]),
        (lambda group: group.with_timeout(60).double(4).wait(), [8]),
    ],
    ids=["call", "stream", "map", "view", "timeout"],
)
def test_call_that_waits_keeps_the_launch(launch, arm, done, call, expected):
    done.touch()
    assert call(launch()) == expected


def test_other_handle_keeps_the_launch(cluster, launch, arm, done):
    group = launch()
    other = WorkerGroup.from_group_name(hw.Homing, "env")
    arm.until_streaming()
    del group
    done.touch()
    assert other.pid().wait()


def test_handle_in_another_process_keeps_the_launch(cluster, launch, arm, done):
    holder = hw.Holder.create_group().launch(cluster, NodePlacementStrategy([0]), name="holder")
    group = launch()
    arm.until_streaming()
    holder.take(group).wait()
    del group
    done.touch()
    assert holder.pid().wait()


def test_launch_without_robots_goes_on_without_a_handle(cluster, done):
    gone = weakref.ref(hw.Waiting.create_group(str(done)).launch(cluster, NodePlacementStrategy([0]), name="plain"))
    assert gone() is None
    done.touch()
    assert WorkerGroup.from_group_name(hw.Waiting, "plain").ready().wait() == [True]


def test_group_that_is_up_goes_on_without_a_handle(launch, arm, done):
    done.touch()
    launch().wait_ready()
    group = WorkerGroup.from_group_name(hw.Homing, "env")
    assert group.pid().wait()
