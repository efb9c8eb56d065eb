"""A whole cluster in one loop: head, agents' sessions, drivers' sessions and workers' servers over the memory network.

Stand-ins: a worker's process (its server is real) and a driver's glue (its session and its groups are real). Time is
virtual: it advances when the loop is idle, so that a minute takes as long as its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from chaos_driver import LIMIT_S, Driver
from chaos_invariants import SCENE
from chaos_net import HEAD
from chaos_nodes import Agent, Keeper
from chaos_record import Line
from head_status import status_of

from rlinf_actors.head.commands import Timing
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.store import HeadStore
from rlinf_actors.testing import faults
from rlinf_actors.wire.values import ExitReport
from tests.memory_network import MemoryNetwork

TIMING = Timing(beat_s=0.2, lease_s=2.0, rank_hold_s=2.0, orphan_grace_s=0.2)
KILLED = ExitReport("signalled", None, 9)


class _Store(HeadStore):
    """Write on the loop, so that virtual time does not advance meanwhile."""

    def write(self, changes: Any, done: Callable[[bool], None]) -> None:
        self._asked.extend(changes)
        asyncio.get_running_loop().call_soon(done, self._write())


class World:
    """The whole cluster, and its faults.

    Args:
        seed: the seed of all random choices.
        folder: what the head remembers is there.
        nodes: how many there are.
    """

    def __init__(self, seed: int, folder: str, nodes: int = 3) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = random.Random(seed)
        self.nodes = nodes
        self._folder = folder
        self.numbers = itertools.count(1)
        self.records: defaultdict[str, list[Line]] = defaultdict(list)
        self.network = MemoryNetwork(self.loop)
        self.network.drop = self._lost
        self.cut: set[Any] = set()
        self.over = False
        self._everybody: list[Any] = []
        self.head: HeadServer | None = self._start_head()
        self.agents: list[Agent | None] = [self._start(Agent(self, rank, Keeper(self))) for rank in range(nodes)]
        self.drivers = [self._start(Driver(self, lasting)) for lasting in (False, True, False)]

    def _start_head(self) -> HeadServer:
        head = HeadServer(self.network, timing=TIMING, store=_Store(self._folder))  # type: ignore[arg-type]
        head.start([HEAD])
        return head

    def _start(self, who: Any) -> Any:
        self._everybody.append(who)
        return who

    def _lost(self, identity: bytes, header: bytes) -> bool:
        return any(who.owns(identity) for who in self.cut)

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_later(self.rng.uniform(0, 0.1), function, *args)

    def write(self, who: str, what: str, /, **more: Any) -> None:
        self.records[who].append(Line(self.loop.time(), what, more))

    # --- faults ---

    @contextlib.contextmanager
    def noise(self) -> Iterator[None]:
        """Delay and duplicate control messages and calls. None is lost, since open connections lose no messages."""
        seed = self.rng.randrange(1 << 30)
        with contextlib.ExitStack() as stack:
            noises: list[tuple[str, faults.Action, Any, float]] = [
                # connections repeat nothing: an agent does not look whether it was told before to start what has ended
                ("rpc.notice", faults.duplicate(), lambda kind: kind != "StartWorkers", 0.05),
                ("rpc.request", faults.duplicate(), "*", 0.05),
                ("rpc.reply", faults.duplicate(), "*", 0.05),
                ("transport.send", faults.duplicate(), "ipc:///w/*", 0.05),
                ("transport.receive", faults.delay(0.3), "*", 0.01),
            ]
            for point, action, where, chance in noises:
                stack.enter_context(faults.inject(point, action, where, chance=chance, seed=seed))
            yield

    def strike(self) -> None:
        """Apply one fault."""
        kind = self.rng.choice(("worker", "worker", "worker", "agentd", "head", "driver", "cut"))
        # as long as TCP would keep what was sent, nothing is lost: a cut outlasts the lease
        away = self.rng.uniform(0.05, 1.5) + (TIMING.lease_s + 1.0 if kind == "cut" else 0.0)
        if kind == "head" and self.head is not None:
            self.head.close()
            self.head = None
            self.loop.call_later(away, self._return_head)
        elif kind == "driver":
            place = self.rng.randrange(len(self.drivers))
            self.drivers[place].kill()
            self.drivers[place] = self._start(Driver(self, place == 1))
        else:
            agent = self.rng.choice(self.agents)
            if agent is None or agent in self.cut:
                return
            if kind == "worker" and agent.keeper.workers:
                agent.keeper.end(self.rng.choice(sorted(agent.keeper.workers)), KILLED)
            elif kind == "agentd":
                agent.kill()
                self.agents[agent.rank] = None
                self.loop.call_later(away, self._return_agent, agent.rank, agent.keeper)
            elif kind == "cut":
                self.cut.add(agent)
                self.loop.call_later(away, self._heal, agent)
        name = "cut agentd" if kind == "cut" else f"kill {kind}"
        self.write(SCENE, "fault", kind=name, pid=0, seconds=away)

    def _return_head(self) -> None:
        self.head = self._start_head()

    def _return_agent(self, rank: int, keeper: Keeper) -> None:
        self.agents[rank] = self._start(Agent(self, rank, keeper))

    def _heal(self, agent: Agent) -> None:
        if agent in self.agents:
            self.cut.discard(agent)

    # --- the end ---

    async def end(self) -> None:
        """End all drivers in good order and record remaining workers."""
        self.over = True
        await asyncio.wait([driver.task for driver in self.drivers])
        await asyncio.sleep(LIMIT_S)
        for agent in filter(None, self.agents):
            for worker in agent.keeper.workers:
                self.write(SCENE, "wrong", text=f"worker {worker} is left on node {agent.rank}")
        if self.head is not None:
            head = self.head._coordinator
            status = status_of(head, head.now)
            for group in status.groups:
                self.write(SCENE, "wrong", text=f"the head still has group {group.name} of {group.namespace}")
            if len(status.nodes) != self.nodes or len(status.clients) > 0:
                self.write(SCENE, "wrong", text=f"the head has {status.nodes} and {status.clients}")
        for who in self._everybody:
            who.task.cancel()
        await asyncio.gather(*(who.task for who in self._everybody), return_exceptions=True)
        if self.head is not None:
            self.head.close()
        self.network.close()
