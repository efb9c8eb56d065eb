"""Step eight CartPoles in four workers. Needs gymnasium: pip install gymnasium.

The same seeds in Gymnasium's own SyncVectorEnv give the same observations and rewards.
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from worker_vector_env import WorkerVectorEnv

from rlinf_actors import Cluster, NodePlacementStrategy


def cart_pole() -> gymnasium.Env[np.ndarray, int]:
    return gymnasium.make("CartPole-v1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    with Cluster(num_nodes=1) as cluster:
        placement = NodePlacementStrategy([0] * given.workers)
        envs = WorkerVectorEnv([cart_pole] * 8, cluster, placement)
        here = SyncVectorEnv([cart_pole] * 8)
        envs.action_space.seed(0)
        observations, _ = envs.reset(seed=0)
        same = np.array_equal(observations, here.reset(seed=0)[0])
        ended = 0
        for _ in range(given.steps):
            actions = envs.action_space.sample()
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            expected, expected_rewards, *_ = here.step(actions)
            same = same and np.array_equal(observations, expected) and np.array_equal(rewards, expected_rewards)
            ended += int((terminated | truncated).sum())
        envs.close()
        print(f"{envs}: {given.steps} steps in {given.workers} workers, {ended} episodes ended")
        print(f"the same as SyncVectorEnv: {same}")


if __name__ == "__main__":
    main()
