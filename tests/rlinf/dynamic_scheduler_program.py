"""A program with RLinf's own dynamic scheduler: it moves GPUs from rollout instances to the actor during a step.

    python -m rlinf_actors.dropin dynamic_scheduler_program.py     # with RLinf's checkout on PYTHONPATH

The rollouts and the actor are small CPU workers that follow RLinf's protocol. Each prints what it was told; the last
line is JSON: the sequence groups that each rollout ended with, and the world sizes that the actor was given.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker
from rlinf.scheduler.dynamic_scheduler.manager import RolloutScalingScheduler
from rlinf.scheduler.dynamic_scheduler.scheduler_worker import SchedulerWorker
from rlinf.scheduler.dynamic_scheduler.utils import (
    get_scheduler_channel,
    get_scheduler_request_queue,
    get_scheduler_response_queue,
)

ROLLOUTS = 4
MINIBATCHES = 4
CONF = {
    "cluster": {"use_pre_process_policy": True, "use_wait_before_last_iter_policy": True},
    "rollout": {"rollout_backend": "sglang", "max_running_requests": 4},
    "actor": {"training_backend": "megatron"},
    "algorithm": {"group_size": 2, "n_minibatches": MINIBATCHES},
    "data": {"rollout_batch_size": 32},
}
TASKS = 64  # group_size * rollout_batch_size


class Status:
    """What a rollout tells the scheduler of its tasks; half of them are done from the start."""

    def __init__(self, rank: int) -> None:
        self.groups = [SimpleNamespace(name=f"{rank}.{n}", num_aborted=1) for n in range(2)]
        self.done: list[str] = []
        self.left = asyncio.Event()
        self.num_seq = self.num_seq_group = TASKS // ROLLOUTS
        self.num_seq_returned = self.num_seq_group_done = 2

    @property
    def num_seq_running(self) -> int:
        return len(self.groups)

    @property
    def num_seq_group_running(self) -> int:
        """RLinf reads this again and again while it waits for the end of the groups: one ends each time."""
        if self.groups:
            self.done.append(self.groups.pop(0).name)
        return len(self.groups)

    def get_aborted_seq_groups(self) -> list[Any]:
        return self.aborted

    def notify(self) -> None:
        self.left.set()

    def add_task(self, group: Any, task: Any) -> None:
        self.groups.append(group)
        self.num_seq += 1


class Rollout(Worker):
    async def run(self) -> list[str]:
        self.status_manager = Status(self._rank)
        channel = self.connect_channel(get_scheduler_channel("rollout", self._rank))
        scheduler = RolloutScalingScheduler(self._rank, channel, self)
        serving = asyncio.create_task(scheduler.main_loop())
        await self.status_manager.left.wait()
        await scheduler.report_offloaded()
        serving.cancel()
        return sorted(self.status_manager.done)

    async def abort_generation(self) -> None:
        self.status_manager.aborted, self.status_manager.groups = self.status_manager.groups, []

    async def _async_generate_group(self, group: Any) -> None:
        await asyncio.sleep(0)


class Actor(Worker):
    def run(self) -> list[Any]:
        channel = self.connect_channel(get_scheduler_channel("actor", 0))
        requests, responses = get_scheduler_request_queue(), get_scheduler_response_queue()
        told = [channel.get(key=requests)]
        for _ in range(MINIBATCHES):
            channel.put(None, key=responses)
            told.append(channel.get(key=requests))
        return told


def main() -> None:
    cluster = Cluster(num_nodes=1)
    placement = SimpleNamespace(
        components=["rollout", "actor"], _components=["rollout", "actor"], _cluster_num_gpus=8,
        rollout_dp_size=ROLLOUTS, rollout_world_size=4, actor_dp_size=1, actor_world_size=1,
    )  # fmt: skip
    here = NodePlacementStrategy([0])
    rollouts = Rollout.create_group().launch(
        cluster, name="rollouts", placement_strategy=NodePlacementStrategy([0] * 4)
    )
    actor = Actor.create_group().launch(cluster, name="actor", placement_strategy=here)
    ran = rollouts.run(), actor.run()  # they connect to channels that the scheduler makes later, as in RLinf
    scheduler = SchedulerWorker.create_group(OmegaConf.create(CONF), placement).launch(
        cluster, name="DynamicScheduler", placement_strategy=here
    )
    works = scheduler.schedule(), *ran
    _, done, told = [work.wait() for work in works]
    print(json.dumps({"rollouts": done, "actor": told[0]}))


if __name__ == "__main__":
    main()
