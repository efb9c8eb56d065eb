"""The workers of embodied_workers.py that go on while the others do, as RLinf's asynchronous runners want them.

The rollout uses the weights of a given version, and the actor trains on the trajectories of a given epoch, however far
each of them is.
"""

import asyncio
import contextlib
import queue
import threading
from typing import Any

import torch
import torch.distributed
from embodied_workers import ACTION, Actor, Env, Rollout, Trajectory, noise, policy
from rlinf.scheduler import Channel, Worker


class AsyncActor(Actor):
    """Receives trajectories in a thread while it trains."""

    should_stop = False

    def init_worker(self) -> None:
        super().init_worker()
        self.received: queue.Queue[Trajectory] = queue.Queue()
        self.kept: list[Trajectory] = []

    async def recv_rollout_trajectories(self, input_channel: Channel) -> None:
        self.thread = threading.Thread(target=self._receive, args=(input_channel,), daemon=True)
        self.thread.start()

    def _receive(self, channel: Channel) -> None:
        while not self.should_stop:
            self.received.put(channel.get())

    async def _wait_for_batch(self) -> None:
        """Wait until all ranks together have every trajectory of the next version."""
        while True:
            while not self.received.empty():
                self.kept.append(self.received.get())
            ready = torch.tensor(sum(each.source[0] == self.version for each in self.kept))
            torch.distributed.all_reduce(ready)
            if int(ready) == self._share() * self._world_size:
                break
            await asyncio.sleep(0.001)
        self.batch = [each for each in self.kept if each.source[0] == self.version]
        self.kept = [each for each in self.kept if each.source[0] != self.version]
        self._sort_batch()

    @Worker.timer("construct_rollout_batch")
    async def construct_rollout_batch(self) -> dict[str, float]:
        await self._wait_for_batch()
        ages = torch.cat([each.versions.flatten() for each in self.batch]).double()
        return {"staleness": self.version - ages.mean().item()}

    @Worker.timer("run_training")
    async def run_training(self) -> dict[str, float]:
        if self.cfg.algorithm.loss_type == "decoupled_actor_critic":
            return self._train()
        await self._wait_for_batch()
        rewards = self.compute_advantages_and_returns()
        return {**self._train(), **rewards}

    async def stop(self) -> None:
        self.should_stop = True


class AsyncRollout(Rollout):
    """Predicts until it is stopped; a rollout of epoch n uses the weights of version n - 1, wherever the actor is."""

    def init_worker(self) -> None:
        super().init_worker()
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.arrived = asyncio.Event()
        self.task: Any = None

    def weights_arrived(self) -> None:
        self.kept[self.version] = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.arrived.set()

    @Worker.timer("rollout/generate")
    async def generate(self, input_channel: Channel, output_channel: Channel, metric_channel: Channel) -> None:
        self.task = asyncio.create_task(self._generate(input_channel, output_channel, metric_channel))
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def _generate(self, source: Channel, target: Channel, metrics: Channel) -> None:
        epoch = 0
        while True:
            wanted = max(epoch - int(self.cfg.algorithm.staleness_threshold), 0)
            while wanted not in self.kept:
                self.arrived.clear()
                await self.arrived.wait()
            self.used = wanted
            self.behaviour = policy(seed=-1)
            self.behaviour.load_state_dict(self.kept[wanted])
            self.kept = {version: each for version, each in self.kept.items() if version >= wanted}
            await self.generate_one_epoch(source, target)
            times = {f"time/rollout/{tag}": each for tag, each in self.pop_execution_times().items()}
            metrics.put({"rank": self._rank, "time": times}, async_op=True)
            epoch += 1

    def predict(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            means = self.behaviour(seen["states"])
        self.predicted += len(means)
        actions = means + 0.3 * noise(seen["ids"], int(seen["time"][0]), ACTION)
        return {"actions": actions, "versions": torch.full((len(means),), self.used)}

    def stop(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()


class AsyncEnv(Env):
    """Steps its environments until it is stopped."""

    task: Any = None

    @Worker.timer("interact")
    async def interact(
        self,
        input_channel: Channel,
        rollout_channel: Channel,
        reward_channel: Channel | None,
        actor_channel: Channel | None,
        metric_channel: Channel,
    ) -> None:
        channels = (input_channel, rollout_channel, reward_channel, actor_channel)
        self.task = asyncio.create_task(self._interact(*channels, metrics=metric_channel))
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def _interact(self, *channels: Channel | None, metrics: Channel) -> None:
        while True:
            found = await self.interact_once(*channels, yields=True)
            times = {f"time/env/{tag}": each for tag, each in self.pop_execution_times().items()}
            results = {f"env/{key}": each for key, each in found.items()}
            metrics.put({"rank": self._rank, "env": results, "time": times}, async_op=True)

    async def stop(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()
