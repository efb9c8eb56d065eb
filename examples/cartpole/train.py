"""Train a policy to balance a pole: workers play, one learns, and one is killed on the way. Needs numpy.

    python examples/cartpole/train.py              # on this machine
    python examples/cartpole/train.py --nodes 3    # on three nodes, all of them on this machine
    rlinf-actors run --hosts a,b -- python examples/cartpole/train.py    # on two machines

In each round the learner broadcasts its weights. The rollout workers take seeds from one channel, play a batch of
episodes for each seed, and put it into another channel. If a worker dies, the channel gives the seed that this worker
had taken to another worker. So nothing is lost, and the returns are the same with --no-kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
from cartpole import LONGEST, Batch, Floats, improved, play
from screen import Screen

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, RestartPolicy, Worker, WorkerDiedError
from rlinf_actors.testing import LocalCluster

SEEDS = 12
"""Batches of 16 episodes in one round."""


class Rollout(Worker):
    def load(self) -> int:
        """Receive the learner's weights. Return this process's number."""
        self.weights: Floats = self.broadcast(groups=members(self._world_size))
        return os.getpid()

    def play(self, round: int, seeds: Channel, batches: Channel, fatal: int) -> None:
        """Play a batch for each seed, until the round is over. The first worker that takes *fatal* kills itself."""
        while True:
            take = seeds.take(round)
            with take as seed:  # until the block ends, the channel gives the seed to another worker if this one dies
                if seed is None:
                    return
                if seed == fatal and take.deliveries == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = play(self.weights, (round, seed))
                batches.put((seed, batch, self.get_name() if take.deliveries > 1 else None), key=round)


class Learner(Worker):
    def __init__(self, rollouts: int) -> None:
        super().__init__()
        self.rollouts, self.weights = rollouts, np.zeros(4)

    def publish(self) -> None:
        """Send the weights to all rollout workers."""
        self.broadcast(self.weights, groups=members(self.rollouts))

    def learn(self, round: int, batches: Channel) -> tuple[float, list[str]]:
        """Take the batches of a round and improve the weights.

        Returns:
            The mean return, and the names of the workers that played a batch which another worker had taken first.
        """
        played: dict[int, Batch] = {}  # a batch that arrives twice counts once
        instead: list[str] = []
        while len(played) < SEEDS:
            seed, played[seed], name = batches.get(round)
            if name is not None:
                instead.append(name)
        ordered = [played[seed] for seed in range(SEEDS)]
        self.weights = improved(self.weights, ordered)
        return float(np.mean([batch.returns for batch in ordered])), instead


def members(rollouts: int) -> list[tuple[str, object]]:
    """Return the members of a broadcast, which all of them name."""
    return [("learner", 0), ("rollout", list(range(rollouts)))]


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster]:
    """Start *nodes* nodes on this machine. With 0, use the cluster of RLINF_HEAD, else a private one of one node."""
    if nodes:
        with LocalCluster(nodes) as local, local.cluster() as cluster:
            yield cluster
    else:
        with Cluster() as cluster:
            yield cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=0, help="start so many nodes on this machine")
    parser.add_argument("--workers", type=int, default=3, help="that play; at least 2")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--no-kill", action="store_true", help="kill no worker")
    given = parser.parse_args()
    if given.workers < 2:
        parser.error("--workers must be at least 2: one of them is killed")
    start, screen = time.monotonic(), Screen(given.rounds, LONGEST)
    with cluster_of(given.nodes) as cluster:
        places = NodePlacementStrategy([rank % cluster.num_nodes for rank in range(given.workers)])
        restart = RestartPolicy.on_failure(backoff_s=0.1)
        rollouts = Rollout.create_group().launch(cluster, places, name="rollout", restart=restart)
        learner = Learner.create_group(given.workers).launch(cluster, NodePlacementStrategy([0]), name="learner")
        seeds, batches = Channel.create("seeds"), Channel.create("batches")
        screen.note(f"nodes: {cluster.num_nodes}, workers that play: {given.workers}, workers that learn: 1")
        died = -1
        for round in range(given.rounds):
            loading = rollouts.load()
            learner.publish().wait()
            processes = loading.wait()
            if died >= 0:
                screen.note(f"rollout:{died} is back as process {processes[died]}, and has the newest weights")
                died = -1
            fatal = SEEDS // 2 if round == given.rounds // 2 and not given.no_kill else -1
            playing = rollouts.play(round, seeds, batches, fatal)
            for seed in range(SEEDS):
                seeds.put(seed, key=round)
            [(mean, instead)] = learner.learn(round, batches).wait()
            for _ in range(given.workers):
                seeds.put(None, key=round)
            try:
                playing.wait()
            except WorkerDiedError as end:
                died = end.rank
                by = ", ".join(instead)
                screen.note(f"{end.worker} was killed by signal {end.signal}; {by} played its batch", mark=True)
            screen.show(mean)
        screen.note(f"{given.rounds} rounds in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
