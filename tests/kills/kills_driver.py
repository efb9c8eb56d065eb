"""A driver with calls and streams always under way. Usage (by kills_scene): kills_driver.py HEAD.

Its stdout: a line with the pids of its workers, their templates and children; a line each time that many more calls
were answered, and for each wait that failed; at the end, which a line on its stdin asks for, one with its Outcomes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from kills_workers import Loaded

from rlinf_actors import Cluster, NodePlacementStrategy, RlinfActorsError, WorkerDiedError

NAMESPACE, GROUP = "kills", "loaded"
RANKS = 2
CALLERS = 2
"""Concurrent calls of each rank, besides a stream."""
PROGRESS = 50
"""Answered calls between two lines of output."""


@dataclass
class Outcome:
    """The calls of one rank: the number made, the number answered, and the error of each failed wait."""

    made: int = 0
    answered: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    executed: int = -1
    doubled: int = 0

    def failed(self, error: RlinfActorsError) -> None:
        """Record the error of a failed wait."""
        say("failed")
        name = type(error).__name__
        if isinstance(error, WorkerDiedError):
            name += f" {error.signal}"
        self.failures[name] = self.failures.get(name, 0) + 1
        self.texts.append(str(error))


class Load:
    """The calls and streams, until they fail or `finish` is set."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.finish = asyncio.Event()
        self.outcomes = [Outcome() for _ in range(RANKS)]
        self._numbers = itertools.count()
        self._answered = Counter[int]()

    async def run(self) -> None:
        """Run all of them until each has ended and `finish` is set, because the scene writes to stdin until then."""
        callers = [self._call(rank) for rank in range(RANKS) for _ in range(CALLERS)]
        await asyncio.gather(*callers, *(self._stream(rank) for rank in range(RANKS)), self.finish.wait())
        for rank, outcome in enumerate(self.outcomes):
            if not outcome.failures:
                (told,) = await self.group.execute_on(rank).executed()
                outcome.executed, outcome.doubled = told

    async def _call(self, rank: int) -> None:
        outcome = self.outcomes[rank]
        while not self.finish.is_set():
            number = next(self._numbers)
            outcome.made += 1
            try:
                (answer,) = await self.group.execute_on(rank).step(number)
            except RlinfActorsError as error:
                outcome.failed(error)
                return
            assert answer == number
            outcome.answered += 1
            if sum(one.answered for one in self.outcomes) % PROGRESS == 0:
                say("progress")

    async def _stream(self, rank: int) -> None:
        try:
            async for _, number in self.group.execute_on(rank).ticks():
                if self.finish.is_set():
                    return
                if number % PROGRESS == 0:
                    await asyncio.sleep(0)
        except RlinfActorsError as error:
            self.outcomes[rank].failed(error)


def say(what: Any) -> None:
    """Print a line for the scene, unless the scene was killed."""
    print(json.dumps(what), flush=True)


async def main() -> None:
    """Connect, launch, load, end."""
    async with Cluster.connect(3, head=sys.argv[1], namespace=NAMESPACE) as cluster:
        group: Any = await Loaded.create_group().launch(cluster, NodePlacementStrategy([1] * RANKS), name=GROUP)
        say(await group.about())
        load = Load(group)
        asyncio.get_running_loop().add_reader(0, _on_stdin, load.finish)
        await load.run()
        say([asdict(outcome) for outcome in load.outcomes])


def _on_stdin(finish: asyncio.Event) -> None:
    os.read(0, 100)
    asyncio.get_running_loop().remove_reader(0)
    finish.set()


if __name__ == "__main__":
    asyncio.run(main())
