"""Messages between workers, timers, locks and what a worker knows of itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlinf_actors import AsyncWork, CollectiveGroupOptions, Worker, WorkerAddress, WorkerInfo

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from rlinf_actors.worker.device_lock import DeviceLock


class Member(Worker):
    def exchange(self, tensor: object) -> None:
        assert_type(self.send({"a": 1}, "others", 0), None)
        assert_type(self.send({"a": 1}, "others", 0, async_op=False), None)
        assert_type(self.send({"a": 1}, "others", 0, async_op=True), AsyncWork[None])
        assert_type(self.send({"a": 1}, "others", 0, True), AsyncWork[None])
        self.send([1], "others", [0, 1], options=CollectiveGroupOptions(), piggyback_payload={"step": 3})
        assert_type(self.recv("others", 0), Any)
        assert_type(self.recv("others", 0, async_op=True), AsyncWork[Any])
        assert_type(self.recv("others", 0, timeout=3), Any)
        assert_type(self.send_tensor(tensor, "others", 0), None)
        assert_type(self.send_tensor(tensor, "others", 0, async_op=True), AsyncWork[None])
        assert_type(self.recv_tensor(tensor, "others", 0), None)
        assert_type(self.recv_tensor(tensor, "others", 0, async_op=True), AsyncWork[None])
        assert_type(self.broadcast(tensor, groups=[("others", [0, 1]), ("members", 0)], src=("members", 0)), Any)
        assert_type(self.broadcast(groups=[("others", 0)], async_op=True), AsyncWork[Any])

    def either(self, wait: bool) -> None:
        work = self.send(1, "others", 0, async_op=not wait)
        if work is not None:
            work.wait()

    def follow(self) -> None:
        work = self.recv("others", 0, async_op=True)
        done = work.then(self.count, 3)
        assert_type(done, AsyncWork[int])
        assert_type(done.wait(timeout=2), int)
        assert_type(work.then(lambda: self.send(1, "others", 0, async_op=True)), AsyncWork[None])

    def count(self, n: int) -> int:
        return n

    async def exchange_later(self) -> None:
        await self.send(1, "others", 0, async_op=True)
        message = await self.recv("others", 0, async_op=True)
        print(message)
        async with self.device_lock:
            assert_type(await self.device_lock.acquire_async(timeout=3.0), bool)

    def itself(self) -> None:
        assert_type(self._rank, int)
        assert_type(self.worker_address, WorkerAddress)
        assert_type(self.worker_info, WorkerInfo)
        assert_type(self.device_lock, DeviceLock)
        assert_type(self.acquire_free_port(), int)
        assert_type(self.pop_execution_times(), dict[str, float])
        assert_type(Worker.torch_device_type, str | None)
        assert_type(Worker.logger, logging.Logger)
        with self.worker_timer("tag"), self.device_lock:
            self.log_info("hello")
        print(self.hardware_infos[0].config.robot_ip)


def engine_rank(parent: WorkerAddress, world_size: int, rank: int) -> None:
    """In a process that a worker has started."""
    me = Worker(parent_address=parent, world_size=world_size, rank=rank)
    assert_type(me.worker_address, WorkerAddress)
    me.recv("actor", 0)
    me.send(1, "actor", (0, 1))
    me.broadcast(1, groups=[("rollout", [(0, 0), (0, 1)]), ("rollout", (1, 0)), ("actor", 0)], src=("rollout", (0, 0)))
