"""Ray, on one node, with no dashboard and no usage reports. Runs in an environment of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.methods import Methods, each_timed, message
from benchmarks.model import Case, Figures

OBJECT_STORE_BYTES = 2 << 30
"""Holds the largest array of the echo several times; allocated as it is used."""


class BenchActor(Methods):
    def __init__(self, torch: bool = False) -> None:
        if torch:
            import torch as _torch  # noqa: F401 - an actor whose work needs it

    def send_and_receive(self, peer: Any, size: int, count: int) -> list[float]:
        value = message(size)
        return each_timed(count, lambda: ray.get(peer.echo.remote(value)))


class RayGroup:
    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def _submit(self, method: str, args: Sequence[object]) -> list[Any]:
        if args:  # once into the object store, as one does for many receivers; small calls have none
            args = [ray.put(arg) for arg in args] if len(self._actors) > 1 else args
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def call(self, method: str, *args: object) -> list[object]:
        return ray.get(self._submit(method, args))

    async def call_async(self, method: str, *args: object) -> list[object]:
        return [await reference for reference in self._submit(method, args)]

    def burst(self, method: str, count: int) -> None:
        ray.get([reference for _ in range(count) for reference in self._submit(method, ())])

    async def burst_async(self, method: str, count: int) -> None:
        for reference in [reference for _ in range(count) for reference in self._submit(method, ())]:
            await reference

    def exchange(self, size: int, count: int) -> list[float]:
        first, second = self._actors
        return ray.get(first.send_and_receive.remote(second, size, count))

    def release(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class OnRay:
    IMPORT = "import ray"
    NAMES = "from ray import init, remote"

    def start(self) -> None:
        ray.init(
            "local",
            include_dashboard=False,
            logging_level="warning",
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),  # the runner removes it
        )

    def spawn(self, count: int, torch: bool = False) -> RayGroup:
        actor = ray.remote(BenchActor)
        return RayGroup([actor.remote(torch) for _ in range(count)])

    def stop(self) -> None:
        ray.shutdown()

    def measure(self, case: Case) -> Figures:
        return case.measure(self)


BACKEND = OnRay()
