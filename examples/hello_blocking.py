"""Run the greeters of hello.py from a plain script, without an event loop."""

from __future__ import annotations

import os

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Greeter(Worker):
    """Has no ``async def``, so calls run one at a time on the main thread of the worker."""

    def __init__(self, greeting: str) -> None:
        super().__init__()
        self._greeting = greeting

    def greet(self, name: str) -> str:
        return f"{self._greeting}, {name}! I am rank {self._rank} of {self._world_size}, process {os.getpid()}"

    def refuse(self) -> None:
        raise ValueError(f"rank {self._rank} would rather not")


def main() -> None:
    cluster = Cluster(num_nodes=1)
    group = Greeter.create_group("Hello").launch(cluster, NodePlacementStrategy([0, 0, 0, 0]), name="greeters")
    for line in group.greet("world").wait():
        print(line)
    try:
        group.refuse().wait()
    except ValueError as error:
        print("a worker's ValueError, caught here:", str(error).splitlines()[0])
    print("and the group lives on:", group.execute_on(3).greet("again").wait()[0])


if __name__ == "__main__":
    main()
