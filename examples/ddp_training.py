"""Data-parallel training of a small model. Usage: python examples/ddp_training.py [--workers 4] [--steps 20].

A group's workers have the environment variables that ``init_process_group`` reads (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so programs for torch run unchanged. On GPUs, write "nccl" and place the group on accelerators.
"""

from __future__ import annotations

import argparse
import asyncio

import torch  # since the driver imports torch, the template does too, and workers start at once
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Trainer(Worker):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        distributed.init_process_group("gloo")
        torch.manual_seed(self._rank)  # DDP copies rank 0's parameters to all ranks
        network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self._model = DistributedDataParallel(network)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=learning_rate)
        self._data = torch.Generator().manual_seed(1000 + self._rank)  # each rank has its own data

    def train(self, steps: int) -> list[float]:
        """Fit x * y. Return the loss on this rank's data after each step."""
        losses = []
        for _ in range(steps):
            inputs = torch.rand(256, 2, generator=self._data) * 2 - 1
            wanted = inputs.prod(dim=1, keepdim=True)
            loss = nn.functional.mse_loss(self._model(inputs), wanted)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # gradients are averaged over all ranks here
            self._optimizer.step()
            losses.append(loss.item())
        return losses

    def checksum(self) -> float:
        """Return a checksum of the parameters, which is equal on all ranks."""
        return sum(parameter.double().sum().item() for parameter in self._model.parameters())

    def finish(self) -> None:
        distributed.destroy_process_group()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="a round; there are five rounds")
    options = parser.parse_args()

    async with Cluster.connect(num_nodes=1) as cluster:
        launcher = Trainer.create_group(learning_rate=0.02)
        async with launcher.launch(cluster, NodePlacementStrategy([0] * options.workers), name="trainers") as trainers:
            for number in range(5):
                losses = await trainers.train(options.steps)
                mean = sum(rank[-1] for rank in losses) / len(losses)
                print(f"round {number + 1}: mean loss of {len(losses)} ranks {mean:.5f}")
            checksums = await trainers.checksum()
            print("all ranks have the same model:", len(set(checksums)) == 1)
            await trainers.finish()


if __name__ == "__main__":
    asyncio.run(main())
