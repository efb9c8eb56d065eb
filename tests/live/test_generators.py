"""Streams of plain generators: on which thread they run, how far ahead, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal

import live_workers as lw
import pytest
from beside_workers import AsyncGenerating, Generating

from rlinf_actors import SerializationError, UsageError, WorkerDiedError
from rlinf_actors.group.stream import WINDOW

pytestmark = pytest.mark.live


@pytest.mark.parametrize("cls", [Generating, AsyncGenerating])
def test_a_script_iterates_all_ranks_and_each_runs_on_its_main_thread(cluster, cls):
    group = lw.many(cluster, cls, 2)
    got = list(group.rollouts(100))
    for rank in range(2):
        assert [item for who, item in got if who == rank] == [(k, "main") for k in range(100)]
    assert group.how_it_went().wait() == [(100, "main")] * 2


@pytest.mark.parametrize("cls", [Generating, AsyncGenerating])
def test_leaving_the_loop_closes_the_generator_on_the_main_thread(cluster, cls):
    group = lw.many(cluster, cls, 1)
    for _, (k, _) in group.rollouts(10**9):
        if k == 20:
            break
    made, thread = group.how_it_went().wait()[0]
    assert thread == "main"
    assert 21 <= made <= 21 + WINDOW + 1


async def test_aclose_and_cancel_close_the_generator(cluster):
    group = await lw.many(cluster, Generating, 1)
    stream = group.rollouts(10**9)
    async for _, (k, _) in stream:
        if k == 3:
            await stream.aclose()
    assert (await group.how_it_went())[0][1] == "main"

    async def read(begun: asyncio.Event) -> None:
        async for _ in group.rollouts(10**9):
            begun.set()

    begun = asyncio.Event()
    reading = asyncio.create_task(read(begun))
    await begun.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert (await group.how_it_went())[0][1] == "main"


def test_stream_that_waits_for_its_caller_blocks_other_calls(cluster, late_answers):
    group = lw.many(cluster, Generating, 1)
    stream = group.rollouts(10**9)
    items = iter(stream)
    next(items)
    queued = group.how_it_went()
    with pytest.raises(TimeoutError, match=r"has been running rollouts\(\) for .* and 1 call waits there"):
        queued.wait(0.3)
    stream.close()
    assert queued.wait()[0][1] == "main"


def test_other_calls_run_between_items_on_an_event_loop(cluster):
    group = lw.many(cluster, AsyncGenerating, 1)
    items = iter(group.rollouts(10**9))
    next(items)
    assert group.spin().wait() == ["main"]
    items.close()
    assert group.how_it_went().wait()[0][1] == "main"


def test_stream_occupies_one_of_several_threads(cluster):
    group = lw.many(cluster, Generating, 1, max_concurrency=2)
    items = iter(group.rollouts(10**9))
    _, (_, thread) = next(items)
    waiting = group.how_it_went()
    items.close()
    assert waiting.wait()[0][1] == thread


@pytest.mark.parametrize("cls", [Generating, AsyncGenerating])
def test_end_of_the_caller_closes_the_generator(cluster, cls, tmp_path):
    group = lw.many(cluster, cls, 1, str(tmp_path), name="source")
    group.wait_ready()
    caller = lw.many(cluster, Generating, 1)
    with pytest.raises(WorkerDiedError):
        caller.takes("source", 20).wait()
    assert group.how_it_went().wait()[0][1] == "main"
    assert (tmp_path / "closed").read_text() == "main"


def test_errors_and_deaths_end_the_stream(cluster):
    group = lw.many(cluster, Generating, 1)
    items = iter(group.breaks())
    assert next(items) == (0, 1)
    with pytest.raises(ValueError, match="raised ValueError: dry"):
        next(items)
    with pytest.raises(WorkerDiedError) as caught:
        list(group.dies())
    assert caught.value.signal == signal.SIGKILL


def test_forked_child_that_returns_at_a_yield_ends(cluster):
    group = lw.many(cluster, Generating, 1)
    (_, (child, parent)), (_, (code, same)) = list(group.forks())
    assert child
    assert (code, same) == (1, parent)
    assert not os.path.exists(f"/proc/{child}")


def test_stream_of_no_generator_or_with_a_deadline_is_an_error(cluster):
    group = lw.many(cluster, Generating, 1)
    with pytest.raises(SerializationError, match=r"cannot pickle 'generator' object. To stream its items make makes"):
        group.makes_a_list().wait()
    with pytest.raises(UsageError, match="a stream has no deadline"):
        group.with_timeout(1).rollouts(1)
