"""Calls on a group whose arguments and results a type checker knows."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker, WorkerGroup, WorkerGroupFuncResult

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from rlinf_actors.group.group import GroupView
    from rlinf_actors.group.mapping import MapResult
    from rlinf_actors.group.stream import StreamResult


class Base(Worker):
    def inherited(self) -> bytes:
        return b""


class Counter(Base):
    def __init__(self, start: int, *, step: int = 1) -> None:
        super().__init__()
        self._count = start

    def add(self, n: int) -> int:
        self._count += n
        return self._count

    def reset(self) -> None:
        self._count = 0

    def label(self, n: int, text: str = "") -> str:
        return f"{text}{n}"

    def default(self, n: int = 2) -> list[int]:
        return [n] * self._count

    def anything(self, n: Any) -> Any:
        return n

    def history(self, length: int) -> Iterator[float]:
        yield from (float(n) for n in range(length))

    def history_too(self, length: int) -> Generator[float, None, None]:
        yield from (float(n) for n in range(length))

    async def add_later(self, n: int) -> int:
        return self.add(n)

    async def follow(self, length: int) -> AsyncIterator[bytes]:
        for n in range(length):
            yield bytes(n)

    async def follow_too(self, length: int) -> AsyncGenerator[bytes, None]:
        for n in range(length):
            yield bytes(n)

    @Worker.timer("timed")
    def timed(self, n: int) -> complex:
        return complex(n)

    @Worker.timer()
    async def timed_later(self, n: int) -> complex:
        return complex(n)

    @staticmethod
    def static(n: int) -> set[int]:
        return {n}

    @classmethod
    async def of_class(cls, n: int) -> set[int]:
        return {n}

    add_two = functools.partialmethod(add, 2)


def calls(group: WorkerGroup[Counter]) -> None:
    assert_type(group.call(Counter.add, 3), WorkerGroupFuncResult[int])
    assert_type(group.call(Counter.add, n=3), WorkerGroupFuncResult[int])
    assert_type(group.method(Counter.add)(3), WorkerGroupFuncResult[int])
    assert_type(group.call(Counter.add, 3).wait(), list[int])
    assert_type(group.call(Counter.reset), WorkerGroupFuncResult[None])
    assert_type(group.call(Counter.label, 3, text="n"), WorkerGroupFuncResult[str])
    assert_type(group.call(Counter.default), WorkerGroupFuncResult[list[int]])
    assert_type(group.call(Counter.inherited), WorkerGroupFuncResult[bytes])
    assert_type(group.call(Base.inherited), WorkerGroupFuncResult[bytes])
    assert_type(group.call(Counter.anything, 3), Any)
    assert_type(group.call(Counter.history, 3), StreamResult[float])
    assert_type(group.call(Counter.history_too, 3), StreamResult[float])
    assert_type(group.call(Counter.add_later, 3), WorkerGroupFuncResult[int])
    assert_type(group.call(Counter.follow, 3), StreamResult[bytes])
    assert_type(group.call(Counter.follow_too, 3), StreamResult[bytes])
    assert_type(group.call(Counter.timed, 3), WorkerGroupFuncResult[complex])
    assert_type(group.call(Counter.timed_later, 3), WorkerGroupFuncResult[complex])
    assert_type(group.method(Counter.static)(3), WorkerGroupFuncResult[set[int]])
    assert_type(group.method(Counter.of_class)(3), WorkerGroupFuncResult[set[int]])
    group.method(Counter.add_two)().wait()
    for rank, number in group.call(Counter.history, 3):
        assert_type((rank, number), tuple[int, float])


async def awaited_calls(group: WorkerGroup[Counter]) -> None:
    assert_type(await group, WorkerGroup[Counter])
    assert_type(await group.call(Counter.add, 3), list[int])
    assert_type(await group.call(Counter.add_later, 3).async_wait(), list[int])
    async for rank, item in group.call(Counter.follow, 3):
        assert_type((rank, item), tuple[int, bytes])
    async for rank, value in group.call(Counter.add, 3).as_completed():
        assert_type((rank, value), tuple[int, int])
    async for rank, outcome in group.call(Counter.add, 3).as_completed(return_exceptions=True):
        print(rank, outcome) if isinstance(outcome, Exception) else assert_type(outcome, int)


def views(group: WorkerGroup[Counter]) -> None:
    view = group.execute_on(0, 1)
    assert_type(view, GroupView[Counter])
    assert_type(group.with_timeout(3).execute_on([0]).call(Counter.add, 3).wait(), list[int])
    for info in group.worker_info_list:
        assert_type(info.worker, GroupView[Counter])
        assert_type(info.worker.call(Counter.add, 3).wait()[0], int)
        assert_type(info.rank, int)


def per_rank(group: WorkerGroup[Counter]) -> None:
    assert_type(group.method(Counter.add).scatter([1, 2]), WorkerGroupFuncResult[int])
    assert_type(group.method(Counter.label).scatter([1, 2], "n"), WorkerGroupFuncResult[str])
    assert_type(group.method(Counter.label).scatter((1, 2), text="n").wait(), list[str])
    assert_type(group.method(Counter.history).scatter([1, 2]), StreamResult[float])
    group.execute_on(0, 1).label.scatter([1, 2], text="n").wait()


def over_items(group: WorkerGroup[Counter]) -> None:
    assert_type(group.method(Counter.add).map(range(10)), MapResult[int])
    for number in group.method(Counter.add).map(range(10), max_in_flight=4, ordered=True):
        assert_type(number, int)
    assert_type(list(group.execute_on(0).method(Counter.default).map([1, 2])), list[list[int]])
    assert_type(next(iter(group.method(Counter.add_later).map({1, 2}))), int)
    print([value + 1 for value in group.add.map(range(10))])


async def over_items_later(group: WorkerGroup[Counter], items: AsyncIterator[int]) -> None:
    async for number in group.method(Counter.add).map(items):
        assert_type(number, int)
    assert_type([text async for text in group.method(Counter.label).map([1, 2])], list[str])
    results = group.method(Counter.timed_later).map(items, ordered=True)
    assert_type(await anext(results), complex)
    await results.aclose()


def results(group: WorkerGroup[Counter]) -> None:
    result = group.call(Counter.add, 3)
    assert_type(result.wait(timeout=1), list[int])
    assert_type(result.consume_duration(), float)
    assert_type(result.consume_durations(), dict[str, float])
    reduced, per_rank = result.consume_durations("mean", return_per_rank=True)
    assert_type(reduced, dict[str, float])
    assert_type(per_rank, list[dict[str, float]])
    assert_type(result.exception(), "BaseException | None")
    assert_type(result.cancel(), bool)
    assert_type(result.done(), bool)


def by_attribute(group: WorkerGroup[Counter]) -> None:
    """As in scripts for RLinf: what it gives is Any."""
    total: int = sum(group.add(3).wait())
    first, *_ = group.execute_on(0).add(3).wait()
    for rank, number in group.history(3):
        print(rank, number, total, first)


def main() -> None:
    cluster = Cluster(num_nodes=1)
    group = Counter.create_group(3, step=2).launch(cluster, NodePlacementStrategy([0]), name="counters")
    assert_type(group, WorkerGroup[Counter])
    calls(group)
    assert_type(Base.create_group().launch(cluster), WorkerGroup[Base])
    assert_type(WorkerGroup.from_group_name(Counter, "counters"), WorkerGroup[Counter])


def launch_any(worker_cls: type[Worker], cluster: Cluster) -> WorkerGroup[Worker]:
    return worker_cls.create_group().launch(cluster)


def choose(fast: bool, cluster: Cluster) -> None:
    chosen = Fast if fast else Slow
    group = chosen.create_group(1).launch(cluster)
    group.step(1).wait()
    group.call(Slow.step, 1).wait()


class Slow(Worker):
    def __init__(self, n: int) -> None:
        super().__init__()

    def step(self, n: int) -> int:
        return n


class Fast(Slow):
    def step(self, n: int) -> int:
        return n + 1


if __name__ == "__main__":
    main()
