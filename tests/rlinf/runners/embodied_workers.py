"""Actor, rollout, env and reward workers of a toy task, with the interfaces that RLinf's embodied runners call.

A point is to be pushed to the origin: states have four numbers, actions two. The policy is linear, its noise depends on
the environment and the step alone, and the actor adds up trajectories in the order of their environments. So the digits
do not depend on which process does what, nor when.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from omegaconf import DictConfig
from rlinf.hybrid_engines.weight_syncer import WeightSyncer
from rlinf.scheduler import Channel, Cluster, Worker
from rlinf.utils.placement import HybridComponentPlacement

torch.set_num_threads(1)
STATE, ACTION = 4, 2


def policy(seed: int) -> torch.nn.Linear:
    model = torch.nn.Linear(STATE, ACTION, dtype=torch.float64)
    values = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=values, dtype=torch.float64) * 0.1)
    return model


def noise(ids: torch.Tensor, time: int, size: int) -> torch.Tensor:
    """Return numbers between -1 and 1 that depend on the environments and the time alone."""
    phase = ids.to(torch.float64).unsqueeze(1) * 12.9898 + time * 78.233 + torch.arange(size, dtype=torch.float64)
    return torch.frac(torch.sin(phase) * 437.5853) * 2 % 2 - 1


@dataclass
class Trajectory:
    """What one stage of one env worker saw in one rollout: each tensor is [time, environment, ...]."""

    source: tuple[int, int, int]  # version, env rank, stage
    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    versions: torch.Tensor


class Placed(Worker):
    """What all four have in common: the configuration and where the other groups are."""

    def __init__(self, cfg: DictConfig) -> None:
        Worker.__init__(self)
        self.cfg = cfg
        self.placement = HybridComponentPlacement(cfg, Cluster())
        self.stages = int(cfg.rollout.pipeline_stage_num)
        self.stage_size = int(cfg.env.train.total_num_envs) // self.stages

    def set_global_step(self, step: int) -> None:
        self.global_step = step


class Actor(Placed):
    """Trains by the policy gradient, its ranks as one torch process group."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        torch.distributed.init_process_group("gloo", rank=self._rank, world_size=self._world_size)
        self.version = 0
        self.weight_syncer = WeightSyncer.create(cfg.weight_syncer)
        self.rollout_ranks = list(range(self.placement.get_world_size("rollout")))
        self.batch: list[Trajectory] = []

    def init_worker(self) -> None:
        self.model = policy(int(self.cfg.actor.seed))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=float(self.cfg.actor.lr))

    @Worker.timer("actor/sync_model_to_rollout")
    async def sync_model_to_rollout(self) -> None:
        group, rollout = self._group_name, self.cfg.rollout.group_name
        options = self.weight_syncer.comm_options

        async def send(bucket: Any) -> None:
            if self._rank == 0:
                groups = [(group, 0), (rollout, self.rollout_ranks)]
                await self.broadcast(bucket, groups, src=(group, 0), async_op=True, options=options).async_wait()

        async def receive() -> Any:
            return await self.recv(rollout, 0, async_op=True, options=options).async_wait()

        weights = self.model.state_dict()
        if not self.weight_syncer.sender_initialized():
            await self.weight_syncer.init_sender(
                state_dict=weights,
                send=send,
                recv=receive,
                param_names_need_sync=list(weights),
                is_sender=self._rank == 0,
            )
        await self.weight_syncer.sync(weights, send, version=self.version)

    def _share(self) -> int:
        return self.placement.get_world_size("env") * self.stages // self._world_size

    @Worker.timer("actor/recv_traj")
    async def recv_rollout_trajectories(self, input_channel: Channel) -> None:
        self.batch = [await input_channel.get(async_op=True).async_wait() for _ in range(self._share())]
        self._sort_batch()

    def _sort_batch(self) -> None:
        """Share the trajectories of all ranks out by source, as a queue gives them to any rank."""
        shares: list[Any] = [None] * self._world_size
        torch.distributed.all_gather_object(shares, self.batch)
        whole = sorted((each for share in shares for each in share), key=lambda each: each.source)
        self.batch = whole[self._rank :: self._world_size]

    @Worker.timer("actor/compute_adv")
    def compute_advantages_and_returns(self) -> dict[str, float]:
        rewards = torch.cat([each.rewards for each in self.batch], dim=1)
        self.returns = torch.flip(torch.cumsum(torch.flip(rewards, [0]), 0), [0])
        sums = torch.stack([self.returns.sum(), self.returns.square().sum(), torch.tensor(float(rewards.numel()))])
        torch.distributed.all_reduce(sums)
        mean = sums[0] / sums[2]
        self.advantages = (self.returns - mean) / (sums[1] / sums[2] - mean.square()).sqrt()
        return {"rewards": rewards.mean().item(), "returns_mean": mean.item(), "returns_max": self._highest()}

    def _highest(self) -> float:
        highest = self.returns.max()
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        return highest.item()

    @Worker.timer("run_training")
    def run_training(self, input_channel: Channel | None = None) -> dict[str, float]:
        return self._train()

    def _train(self) -> dict[str, float]:
        states = torch.cat([each.states for each in self.batch], dim=1)
        actions = torch.cat([each.actions for each in self.batch], dim=1)
        for _ in range(int(self.cfg.algorithm.update_epoch)):
            loss = ((self.model(states) - actions).square().sum(-1) * self.advantages).mean()
            self.optimizer.zero_grad()
            loss.backward()
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self._world_size
            self.optimizer.step()
        torch.distributed.barrier()
        self.version += 1
        norm = torch.cat([each.grad.flatten() for each in self.model.parameters()]).norm()
        return {"loss": loss.item(), "grad_norm": norm.item(), "version": self.version}

    def save_checkpoint(self, path: str, step: int) -> None:
        if self._rank == 0:
            torch.save({"step": step, "model": self.model.state_dict()}, f"{path}/model.pt")

    def weights(self) -> list[float]:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()]).tolist()


class Rollout(Placed):
    """Predicts actions for batches of environments, wherever they are."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.weight_syncer = WeightSyncer.create(cfg.weight_syncer)
        self.ranks = list(range(self._world_size))
        self.version = -1
        self.predicted = 0

    def init_worker(self) -> None:
        self.model = policy(seed=-1)

    @Worker.timer("sync_model_from_actor")
    async def sync_model_from_actor(self) -> None:
        actor, options = self.cfg.actor.group_name, self.weight_syncer.comm_options

        async def receive() -> Any:
            groups = [(actor, 0), (self._group_name, self.ranks)]
            return await self.broadcast(None, groups, src=(actor, 0), async_op=True, options=options).async_wait()

        async def send(request: Any) -> None:
            if self._rank == 0:
                for rank in range(self.placement.get_world_size("actor")):
                    await self.send(request, actor, rank, async_op=True, options=options).async_wait()

        if not self.weight_syncer.receiver_initialized():
            await self.weight_syncer.init_receiver(state_dict=self.model.state_dict(), recv=receive, send=send)
        self.version = await self.weight_syncer.apply(self.model, receive)
        self.weights_arrived()

    def weights_arrived(self) -> None:
        """Hook of the asynchronous worker."""

    @Worker.timer("predict")
    def predict(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            means = self.model(seen["states"])
        self.predicted += len(means)
        actions = means + 0.3 * noise(seen["ids"], int(seen["time"][0]), ACTION)
        return {"actions": actions, "versions": torch.full((len(means),), self.version)}

    async def answer(self, source: Channel, target: Channel, mode: str, size: int, stage: int) -> None:
        env = self.cfg.env.group_name
        seen = await self.recv_from(
            env, source, tag=f"{mode}_rollout_results", route_key=stage, batch_size=size, async_op=True
        ).async_wait()
        self.send_to(
            env,
            target,
            self.predict(seen),
            tag=f"{mode}_rollout_results",
            route_key=stage,
            batch_size=size,
            async_op=True,
        )

    async def generate_one_epoch(self, source: Channel, target: Channel) -> None:
        for _ in range(int(self.cfg.env.train.steps)):
            for stage in range(self.stages):
                await self.answer(source, target, "train", self.stage_size, stage)

    @Worker.timer("rollout/generate")
    async def generate(self, input_channel: Channel, output_channel: Channel) -> None:
        for _ in range(int(self.cfg.env.train.rollout_epoch)):
            await self.generate_one_epoch(input_channel, output_channel)

    @Worker.timer("evaluate")
    async def evaluate(self, input_channel: Channel, output_channel: Channel) -> None:
        for _ in range(int(self.cfg.env.eval.steps)):
            await self.answer(input_channel, output_channel, "eval", int(self.cfg.env.eval.total_num_envs), 0)

    def state(self) -> dict[str, Any]:
        weights = torch.cat([each.detach().flatten() for each in self.model.parameters()]).tolist()
        return {"version": self.version, "predicted": self.predicted, "weights": weights}


class Env(Placed):
    """Steps its share of the environments of each stage."""

    def init_worker(self) -> None:
        self.epoch = 0
        self.size = self.stage_size // self._world_size
        self.totals = {"episodes": 0, "return": 0.0}

    def bootstrap(self, size: int, stage: int, epoch: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(size) + size * (self._rank + self._world_size * stage)
        return {"ids": ids, "states": noise(ids, 1000 + epoch, STATE), "time": torch.zeros(size)}

    def ask(self, channel: Channel, seen: dict[str, torch.Tensor], mode: str, stage: int) -> None:
        self.send_to(self.cfg.rollout.group_name, channel, seen, mode=mode, tag="rollout_results", route_key=stage)

    def hear(self, channel: Channel, mode: str, size: int, stage: int, async_op: bool = False) -> Any:
        tag = f"{mode}_rollout_results"
        group = self.cfg.rollout.group_name
        return self.recv_from(group, channel, tag=tag, route_key=stage, batch_size=size, async_op=async_op)

    def step(self, seen: dict[str, torch.Tensor], actions: torch.Tensor) -> dict[str, torch.Tensor]:
        states = seen["states"] * 0.95
        states = torch.cat([states[:, :ACTION] + 0.1 * actions, states[:, ACTION:] + 0.05 * actions], dim=1)
        return {**seen, "states": states, "time": seen["time"] + 1}

    async def reward(
        self, seen: dict[str, torch.Tensor], to: Channel | None, back: Channel, last: bool, yields: bool
    ) -> torch.Tensor:
        rewards = -seen["states"].square().sum(1)
        if to is None:
            return rewards
        group, tag, flags = self.cfg.reward.group_name, "train_reward_obs", torch.full((len(rewards),), last)
        self.send_to(group, to, {"states": seen["states"], "last_run": flags}, tag=tag)
        if yields:  # as hear(): a rank that waits for the ranks that have stopped hears stop() too
            scores = await self.recv_from(group, back, tag=tag, batch_size=self.stage_size, async_op=True).async_wait()
        else:
            scores = self.recv_from(group, back, tag=tag, batch_size=self.stage_size)
        return rewards + scores[:, 0]

    @Worker.timer("run_interact_once")
    async def interact_once(
        self, source: Channel, rollout: Channel, reward: Channel | None, actor: Channel | None, yields: bool
    ) -> dict[str, torch.Tensor]:
        returns = []
        steps, epochs = int(self.cfg.env.train.steps), int(self.cfg.env.train.rollout_epoch)
        for epoch in range(epochs):
            seen = [self.bootstrap(self.size, stage, self.epoch) for stage in range(self.stages)]
            told: list[list[Any]] = [[] for _ in range(self.stages)]
            for stage in range(self.stages):
                self.ask(rollout, seen[stage], "train", stage)
            for step in range(steps):
                for stage in range(self.stages):
                    if yields:  # so that stop() is heard
                        heard = await self.hear(source, "train", self.stage_size, stage, async_op=True).async_wait()
                    else:
                        heard = self.hear(source, "train", self.stage_size, stage)
                    after = self.step(seen[stage], heard["actions"])
                    last = epoch == epochs - 1 and step == steps - 1
                    scores = await self.reward(after, reward, source, last, yields)
                    told[stage].append((seen[stage]["states"], heard["actions"], scores, heard["versions"]))
                    seen[stage] = after
                    if step < steps - 1:
                        self.ask(rollout, after, "train", stage)
            for stage in range(self.stages):
                parts = [torch.stack(each) for each in zip(*told[stage], strict=True)]
                returns.append(parts[2].sum(0))
                if actor is not None:
                    source_of = (self.epoch, self._rank, stage)
                    actor.put(Trajectory(source_of, *parts), async_op=True)
            self.epoch += 1
        whole = torch.cat(returns)
        self.totals["episodes"] += len(whole)
        self.totals["return"] += whole.sum().item()
        return {"return": whole, "success": (whole > -5).float()}

    @Worker.timer("interact")
    async def interact(
        self,
        input_channel: Channel,
        rollout_channel: Channel,
        reward_channel: Channel | None,
        actor_channel: Channel | None = None,
    ) -> dict[str, torch.Tensor]:
        return await self.interact_once(input_channel, rollout_channel, reward_channel, actor_channel, yields=False)

    @Worker.timer("evaluate")
    def evaluate(self, input_channel: Channel, rollout_channel: Channel) -> dict[str, torch.Tensor]:
        total = int(self.cfg.env.eval.total_num_envs)
        seen, rewards = self.bootstrap(total // self._world_size, 0, epoch=-1), []
        for _ in range(int(self.cfg.env.eval.steps)):
            self.ask(rollout_channel, seen, "eval", 0)
            seen = self.step(seen, self.hear(input_channel, "eval", total, 0)["actions"])
            rewards.append(-seen["states"].square().sum(1))
        return {"return": torch.stack(rewards).sum(0)}

    def state(self) -> dict[str, Any]:
        return {**self.totals, "epoch": self.epoch}


class Reward(Placed):
    """Scores states with a fixed model."""

    def init_worker(self) -> None:
        self.share = self.stage_size // self._world_size
        self.scored = 0
        self._task: Any = None

    @Worker.timer("compute_reward")
    def score(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        self.scored += len(seen["states"])
        return (seen["states"].abs().sum(1, keepdim=True) * -0.1).contiguous()

    async def serve_one(self, source: Channel, target: Channel) -> int:
        env, tag = self.cfg.env.group_name, "train_reward_obs"
        seen = await self.recv_from(env, source, tag=tag, async_op=True, batch_size=self.stage_size).async_wait()
        self.send_to(env, target, self.score(seen), tag=tag, async_op=True)
        return int(seen["last_run"].sum())

    @Worker.timer("compute_rewards")
    async def compute_rewards(self, input_channel: Channel, output_channel: Channel) -> None:
        ended = 0
        while ended < self.share * self.stages:
            ended += await self.serve_one(input_channel, output_channel)

    async def serve(self, source: Channel, target: Channel) -> None:
        while True:
            await self.serve_one(source, target)

    async def compute_rewards_async(self, input_channel: Channel, output_channel: Channel) -> None:
        self._task = asyncio.create_task(self.serve(input_channel, output_channel))
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def state(self) -> dict[str, int]:
        return {"scored": self.scored}
