"""Execution times by tag."""

from __future__ import annotations

import threading

import pytest

from rlinf_actors.worker.execution_times import ExecutionTimes, timed


class TestTimers:
    def test_tags_add_up_until_popped(self):
        timers = ExecutionTimes()
        timers.add("env", 1.0)
        timers.add("env", 2.0)
        timers.add("train", 4.0)
        assert timers.pop("env") == 3.0
        with pytest.raises(ValueError, match="no time was recorded under 'env'; recorded tags: train"):
            timers.pop("env")
        assert timers.pop_all() == {"train": 4.0}
        assert timers.pop_all() == {}

    def test_nothing_recorded(self):
        with pytest.raises(ValueError, match="recorded tags: none"):
            ExecutionTimes().pop("x")

    def test_a_block_that_raises_is_recorded_too(self):
        timers = ExecutionTimes()
        with pytest.raises(KeyError), timers.measure("x"):
            raise KeyError
        assert timers.pop("x") >= 0

    def test_threads_add_up(self):
        timers = ExecutionTimes()
        threads = [threading.Thread(target=lambda: [timers.add("x", 1.0) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert timers.pop("x") == 2000.0


class Timed:
    def __init__(self) -> None:
        self._timers = ExecutionTimes()

    @timed("tagged")
    def plain(self, x, *, y=0):
        """Keeps its docstring."""
        return x + y

    @timed()
    def by_name(self): ...

    @timed("async")
    async def coroutine(self):
        return 1

    @timed("stream")
    async def stream(self):
        yield 1
        yield 2

    @timed("bad")
    def raises(self):
        raise ValueError("bad")


class TestDecorator:
    def test_plain_methods(self):
        worker = Timed()
        assert worker.plain(1, y=2) == 3
        worker.by_name()
        assert set(worker._timers.pop_all()) == {"tagged", "by_name"}
        assert Timed.plain.__doc__ == "Keeps its docstring."

    async def test_async_methods(self):
        worker = Timed()
        assert await worker.coroutine() == 1
        assert [item async for item in worker.stream()] == [1, 2]
        assert set(worker._timers.pop_all()) == {"async", "stream"}

    def test_errors_pass_and_are_timed(self):
        worker = Timed()
        with pytest.raises(ValueError, match="bad"):
            worker.raises()
        assert worker._timers.pop("bad") >= 0
