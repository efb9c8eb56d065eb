"""Marked methods keep their signatures for a type checker, in any order of decorators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from rlinf_actors import Cluster, NodePlacementStrategy, RestartPolicy, Worker, WorkerGroup, WorkerGroupFuncResult

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from rlinf_actors.group.stream import StreamResult


class Trainer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    @Worker.idempotent
    def load(self, key: str, *, version: int = 0) -> bytes:
        return key.encode()

    @Worker.idempotent
    @Worker.timer("fetch")
    async def fetch(self, key: str) -> float:
        return float(key)

    @Worker.timer("size")
    @Worker.idempotent
    def size(self, keys: list[str]) -> int:
        return len(keys)

    @Worker.idempotent
    @staticmethod
    def static(n: int) -> complex:
        return complex(n)

    @classmethod
    @Worker.idempotent
    def of_class(cls, n: int) -> set[int]:
        return {n}

    @Worker.concurrent()
    def progress(self) -> int:
        return self.step

    @Worker.idempotent
    @Worker.concurrent(threads=2)
    def find(self, name: str) -> str | None:
        return name or None

    @Worker.concurrent()
    @Worker.timer()
    def watch(self, every: int) -> Iterator[int]:
        yield self.step // every

    @Worker.idempotent
    async def follow(self, n: int) -> AsyncIterator[str]:
        yield str(n)


def launch(cluster: Cluster) -> WorkerGroup[Trainer]:
    return Trainer.create_group().launch(
        cluster, NodePlacementStrategy([0, 0]), restart=RestartPolicy.on_failure(max_restarts=3)
    )


def calls(group: WorkerGroup[Trainer]) -> None:
    assert_type(group.call(Trainer.load, "a", version=3), WorkerGroupFuncResult[bytes])
    assert_type(group.call(Trainer.fetch, "a").wait(), list[float])
    assert_type(group.call(Trainer.size, ["a"]).wait(), list[int])
    assert_type(group.method(Trainer.static)(3), WorkerGroupFuncResult[complex])
    assert_type(group.method(Trainer.of_class)(3).wait(), list[set[int]])
    assert_type(group.call(Trainer.progress).wait(), list[int])
    assert_type(group.call(Trainer.find, "a").wait(), list[str | None])
    assert_type(group.call(Trainer.watch, 3), StreamResult[int])
    assert_type(group.call(Trainer.follow, 3), StreamResult[str])
    for rank, step in group.call(Trainer.watch, 3):
        assert_type(rank, int)
        assert_type(step, int)


def views(group: WorkerGroup[Trainer]) -> None:
    assert_type(group.with_retries(2).call(Trainer.load, "a").wait(), list[bytes])
    assert_type(group.with_retries(2).with_timeout(3).execute_on(1).call(Trainer.size, []).wait(), list[int])
    assert_type(group.execute_on(0).with_retries(1).call(Trainer.load, "a").attempts, list[int])
