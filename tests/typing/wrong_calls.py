"""Calls that a type checker must refuse: each line with the comment is an error, and no other line is."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_actors import Worker, WorkerGroup


class Counter(Worker):
    def __init__(self, start: int) -> None:
        super().__init__()

    def add(self, n: int) -> int:
        return n

    def history(self, length: int) -> Iterator[float]:
        yield from (float(n) for n in range(length))


class Other(Worker):
    def stop(self) -> None: ...


def wrong(group: WorkerGroup[Counter]) -> None:
    group.call(Counter.add, "3")  # wrong
    group.call(Counter.add)  # wrong
    group.call(Counter.add, 3, 4)  # wrong
    group.call(Counter.add, m=3)  # wrong
    group.method(Counter.add)("3")  # wrong
    group.call(Other.stop)  # wrong
    group.method(Other.stop)()  # wrong
    group.execute_on(0).call(Counter.add, "3")  # wrong
    text: list[str] = group.call(Counter.add, 3).wait()  # wrong
    for rank, item in group.call(Counter.add, 3):  # wrong
        print(rank, item, text)
    group.call(Counter.history, 3).wait()  # wrong
    group.method(Counter.add).scatter(["3"])  # wrong
    group.method(Counter.add).scatter([3], 4)  # wrong
    group.method(Counter.add).map(["3"])  # wrong
    group.method(Counter.history).map([3])  # wrong
    Counter.create_group()  # wrong
    Counter.create_group("3")  # wrong
    Other.create_group(3)  # wrong
    group.execute_on("0")  # wrong
    group.with_timeout("3")  # wrong
