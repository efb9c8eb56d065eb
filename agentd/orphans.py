"""Workers whose template has ended before them, or does not say how they ended: they end, with all that is theirs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

from agentd.child import Child
from agentd.keeping import Keeping
from agentd.sweep import Sweep
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cgroups.worker import leftovers
from rlinf_actors.wire.spawn import ROBOT_END_S
from rlinf_actors.wire.values import ExitReport

TEMPLATE_SILENT_S = 5.0
"""How long after a worker's end its template may take to say how it ended."""


class Orphans:
    """Ends what templates left behind. Loop thread only.

    Args:
        loop: the agent's.
        cgroups: where workers' cgroups are made.
        keeping: says how those ended whose template was gone.
        on_end: called with each of them, and how it ended.
        on_done: called when there may be no more.

    Attributes:
        sweeps: how many go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cgroups: Roots,
        keeping: Keeping,
        on_end: Callable[[Child, ExitReport], None],
        on_done: Callable[[], None],
    ) -> None:
        self.sweeps = 0
        self._loop = loop
        self._cgroups = cgroups
        self._keeping = keeping
        self._on_end = on_end
        self._on_done = on_done

    def ended(self, worker: Child) -> None:
        """A worker has ended; its template says how within moments, unless that one is stopped or stuck."""
        if worker.template.gone:
            self._sweep([worker])
            return
        # What it started may still be at work on a robot or an accelerator: it goes before the end is told.
        worker.silence_timer = self._loop.call_later(TEMPLATE_SILENT_S, self._sweep, [worker])

    def left(self, workers: list[Child]) -> None:
        """Their template has ended. Those with robots were told by their sockets to it, and make them safe."""
        robots = [worker for worker in workers if worker.has_robots and not worker.ended]
        self._sweep([worker for worker in workers if worker not in robots])
        self._loop.call_later(ROBOT_END_S, self._sweep, robots)

    def _sweep(self, workers: list[Child]) -> None:
        """Kill what is left of them, and themselves."""
        workers = [worker for worker in workers if not worker.swept]
        if not workers:
            return
        for worker in workers:
            worker.swept = True
        self.sweeps += 1
        pids = {worker.pid: worker.started() for worker in workers if worker.pid}
        done = partial(self._on_swept, workers)
        reapers = (os.getpid(), self._keeping.pid)
        Sweep(self._loop, [worker.spec.id for worker in workers], pids, done, reapers)

    def _on_swept(self, workers: list[Child], statuses: dict[int, int]) -> None:
        """Nothing of these workers is left. Ask how they ended: the keeper reaped them."""
        unknown = [one.pid for one in workers if one.pid and one.pid not in statuses and one.template.gone]
        self._keeping.when_ended(unknown, lambda more: self._tell(workers, {**statuses, **more}))

    def _tell(self, workers: list[Child], statuses: dict[int, int]) -> None:
        self.sweeps -= 1
        for left in leftovers(self._cgroups):
            left.remove()  # of the template that is gone
        for worker in workers:
            self._on_end(worker, worker.ended_with_template(statuses.get(worker.pid)))
        self._on_done()
