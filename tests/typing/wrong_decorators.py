"""Marks and calls of marked methods that a type checker must refuse."""

from __future__ import annotations

from rlinf_actors import Worker, WorkerGroup


class Trainer(Worker):
    @Worker.idempotent
    def load(self, key: str) -> bytes:
        return key.encode()

    @Worker.concurrent(threads=2)
    def progress(self) -> int:
        return 0

    @Worker.concurrent("2")  # wrong
    def text(self) -> None: ...


def wrong(group: WorkerGroup[Trainer]) -> None:
    group.call(Trainer.load, 3)  # wrong
    group.call(Trainer.progress, 3)  # wrong
    group.with_retries(1).call(Trainer.load, b"a")  # wrong
    group.with_retries("2")  # wrong
    names: list[str] = group.call(Trainer.progress).wait()  # wrong
    print(names)
