"""Rollout workers -> batched inference -> trainer, over channels.

The toy environment is a point on a line. An action moves the point, and the reward is larger the closer the point is
to 0, so the best policy is ``action = -1 * position``. Each rollout worker sends observations, and waits for actions
under its own key. The weight of a trajectory is its length, so the trainer's batches have about the same number of
steps, whatever the length of the episodes.

    python rollout_pipeline.py --workers 4 --episodes 200
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from rlinf_actors import Channel, ChannelClosedError, Cluster, NodePlacementStrategy, Worker

STEPS = 16
NOISE = 0.3


class Rollout(Worker):
    def run(self, observations: Channel, actions: Channel, trajectories: Channel, episodes: int) -> int:
        for _ in range(episodes):
            position, trajectory = random.uniform(-1, 1), []
            for _ in range(STEPS):
                observations.put((self._rank, position), async_op=True)
                action, noise = actions.get(key=self._rank)
                reward = -((position + action) ** 2)
                trajectory.append((position, noise, reward))
                position = random.uniform(-1, 1)
            trajectories.put(trajectory, weight=len(trajectory))
        return episodes * STEPS


class Inference(Worker):
    """Answers all waiting observations as one batch. Ends when the channel is closed."""

    def serve(self, observations: Channel, actions: Channel, policy: Channel) -> tuple[int, int]:
        gain, answered, batches = 0.0, 0, 0
        while True:
            try:
                batch = [observations.get()]
            except ChannelClosedError:
                return answered, batches
            batch += observations.get_batch(0)  # all waiting observations: each has weight 0
            gain = self._latest(policy, gain)
            for rank, position in batch:
                noise = random.gauss(0, NOISE)
                actions.put((-gain * position + noise, noise), key=rank, async_op=True)
            answered, batches = answered + len(batch), batches + 1

    def _latest(self, policy: Channel, gain: float) -> float:
        while True:
            try:
                gain = policy.get_nowait()
            except asyncio.QueueEmpty:
                return gain


class Trainer(Worker):
    def train(self, trajectories: Channel, policy: Channel, batch_steps: int) -> tuple[int, int, float]:
        gain, steps, updates = 0.0, 0, 0
        while True:
            try:
                batch = trajectories.get_batch(batch_steps)
            except ChannelClosedError:
                return steps, updates, gain
            samples = [step for trajectory in batch for step in trajectory]
            mean = sum(reward for _, _, reward in samples) / len(samples)
            slope = sum((reward - mean) * noise * -position for position, noise, reward in samples) / len(samples)
            gain += 3.0 * slope / NOISE**2
            policy.put(gain)
            steps, updates = steps + len(samples), updates + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=200, help="of each rollout worker")
    parser.add_argument("--batch", type=int, default=320, help="steps in one update; at least one episode's 16")
    options = parser.parse_args()
    if options.batch < STEPS:
        parser.error(f"--batch must be at least {STEPS}: a heavier trajectory would never be taken")

    cluster = Cluster(num_nodes=1)
    observations, actions = Channel.create("observations"), Channel.create("actions")
    trajectories = Channel.create("trajectories", maxsize=64)  # a slower trainer makes rollouts wait
    policy = Channel.create("policy")
    one, many = NodePlacementStrategy([0]), NodePlacementStrategy([0] * options.workers)
    inference = Inference.create_group().launch(cluster, one, name="inference")
    trainer = Trainer.create_group().launch(cluster, one, name="trainer")
    rollout = Rollout.create_group().launch(cluster, many, name="rollout").wait_ready()

    served = inference.serve(observations, actions, policy)
    trained = trainer.train(trajectories, policy, options.batch)
    start = time.perf_counter()
    steps = sum(rollout.run(observations, actions, trajectories, options.episodes).wait())
    seconds = time.perf_counter() - start
    observations.close()  # the workers take the remaining items; then their loops end
    trajectories.close()
    [(answered, batches)] = served.wait()
    [(seen, updates, gain)] = trained.wait()

    episodes = options.workers * options.episodes
    print(f"{options.workers} rollout workers, {episodes} episodes, {steps} steps in {seconds:.2f} s")
    print(f"inference answered {answered} observations in {batches} batches")
    print(f"trainer saw {seen} steps in {updates} updates; the policy's gain is {gain:.2f} (the best is 1)")
    print(f"throughput: {steps / seconds:.0f} steps/s")


if __name__ == "__main__":
    main()
