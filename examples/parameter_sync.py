"""A trainer sends its parameters to rollout workers. Usage: python examples/parameter_sync.py [--rollouts 4].

Every member calls `broadcast` with the same groups. The trainer writes the state_dict into shared memory once for all
rollout workers of its node. Other nodes receive it along a tree.
"""

from __future__ import annotations

import argparse
import time

import torch  # since the driver imports torch, the template does too, and workers start at once
from torch import nn

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def members(rollouts: int) -> list[tuple[str, object]]:
    return [("trainer", 0), ("rollouts", list(range(rollouts)))]


class Trainer(Worker):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._model = network(width)

    def step(self) -> float:
        """Change the parameters, in place of a training step. Return their checksum."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        return checksum(self._model)

    def publish(self, rollouts: int) -> int:
        """Broadcast the parameters, and return their size in bytes. They may change once broadcast() has returned."""
        state = self._model.state_dict()
        self.broadcast(state, groups=members(rollouts))
        return sum(tensor.nbytes for tensor in state.values())


class Rollout(Worker):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._model = network(width)

    def receive(self) -> None:
        """Receive the trainer's parameters."""
        self._state = self.broadcast(groups=members(self._world_size))

    def load(self) -> float:
        """Load the received parameters, and return their checksum."""
        self._model.load_state_dict(self._state)
        del self._state  # frees the trainer's shared memory
        return checksum(self._model)


def checksum(model: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rollouts", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--width", type=int, default=2048)
    given = arguments.parse_args()
    cluster = Cluster(num_nodes=1)
    trainer = Trainer.create_group(given.width).launch(cluster, NodePlacementStrategy([0]), name="trainer")
    rollouts = Rollout.create_group(given.width).launch(
        cluster, NodePlacementStrategy([0] * given.rollouts), name="rollouts"
    )
    trainer.wait_ready()
    rollouts.wait_ready()
    for n in range(given.rounds):
        wanted = trainer.step().wait()[0]
        start = time.perf_counter()
        receiving = rollouts.receive()
        size = trainer.publish(given.rollouts).wait()[0]
        receiving.wait()
        seconds = time.perf_counter() - start
        same = all(abs(got - wanted) < 1e-6 for got in rollouts.load().wait())
        total = size * given.rollouts
        print(
            f"round {n}: {size / 2**20:.0f} MiB to {given.rollouts} workers in {seconds * 1e3:.0f} ms, "
            f"{total / seconds / 1e9:.2f} GB/s in all, the same everywhere: {same}"
        )


if __name__ == "__main__":
    main()
