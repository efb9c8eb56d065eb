"""Sensors send readings, and a planner answers. Usage: python examples/point_to_point.py [--mib 64].

Messages from one worker to another arrive in order. `send` and `recv` block the calling thread. With ``async_op=True``
they return an AsyncWork at once, which you can await, or wait for.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


@dataclass(frozen=True)
class Reading:
    step: int
    image: npt.NDArray[np.uint8]


class Sensor(Worker):
    def stream(self, steps: int, mib: int) -> list[str]:
        """Send all readings, as fast as the send window permits, then return the answers."""
        image = np.full(mib << 20, self._rank, np.uint8)
        answers = [self.recv("planner", 0, async_op=True) for _ in range(steps)]
        for step in range(steps):
            self.send(Reading(step, image), "planner", 0)
        return [answer.wait() for answer in answers]

    def ping(self, count: int) -> float:
        """Return the round-trip time of a small object, in microseconds."""
        start = time.perf_counter()
        for n in range(count):
            self.send({"n": n}, "planner", 0)
            assert self.recv("planner", 0) == {"n": n}
        return (time.perf_counter() - start) / count * 1e6


class Planner(Worker):
    """A class with ``async def``. Many receives can wait at the same time on one thread."""

    async def plan(self, sensors: int, steps: int) -> float:
        """Answer every reading. Return the received GB/s."""
        start, received = time.perf_counter(), 0
        for step in range(steps):
            for rank in range(sensors):
                reading = await self.recv("sensors", rank, async_op=True)
                assert (reading.step, int(reading.image[-1])) == (step, rank)
                received += reading.image.nbytes
                await self.send(f"step {step}: sensor {rank} seen", "sensors", rank, async_op=True)
        return received / (time.perf_counter() - start) / 1e9

    async def echo(self, count: int) -> None:
        for _ in range(count):
            await self.send(await self.recv("sensors", 0, async_op=True), "sensors", 0, async_op=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=16, help="size of a reading")
    arguments.add_argument("--steps", type=int, default=10)
    given = arguments.parse_args()
    cluster = Cluster(num_nodes=1)
    sensors = Sensor.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="sensors")
    planner = Planner.create_group().launch(cluster, NodePlacementStrategy([0]), name="planner")

    planning = planner.plan(2, given.steps)
    for rank, answers in enumerate(sensors.stream(given.steps, given.mib).wait()):
        print(f"sensor {rank} got {len(answers)} answers, the last: {answers[-1]}")
    print(f"readings of {given.mib} MiB: {planning.wait()[0]:.2f} GB/s received")

    echoing = planner.echo(500)
    print(f"a small object there and back: {sensors.execute_on(0).ping(500).wait()[0]:.0f} us")
    echoing.wait()


if __name__ == "__main__":
    main()
