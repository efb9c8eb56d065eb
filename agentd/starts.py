"""The starts of workers that the head has ordered: who may start them, as which user, and one after another.

An order may have 10,000 workers, and each may take milliseconds, because files are looked up in directories that its
driver chose. So they are started in short turns of the loop, which has other work in between: above all the beats on
which robots depend. Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from agentd import launch_plan
from agentd.launch_plan import Site
from agentd.logs import LogForwarder
from agentd.run_dir import OrderLedger
from agentd.templates import TemplatePool
from agentd.worker_process import WorkerProcess
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.exhaustion import explain
from rlinf_actors.net.daemon import SLICE_S
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.values import WorkerSpec

log = logging.getLogger(__name__)


class _Order(msgspec.Struct):
    """The workers of an order that are not started yet, and what all of them get."""

    workers: deque[WorkerSpec]
    env: Mapping[str, str]
    site: Site
    begun: bool = False


class Starts:
    """Starts the workers of each order, for about SLICE_S in each turn of the loop. Orders take turns.

    Args:
        known: the workers of this agentd, by id.
        begin: called with each worker that is to be forked.
        refuse: called with a worker that is not started, the reason, and True if a rule of the node says so.

    Attributes:
        admit: who may launch here; changes with the configuration.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        templates: TemplatePool,
        ledger: OrderLedger,
        logs: LogForwarder,
        known: Collection[str],
        begin: Callable[[WorkerProcess], None],
        refuse: Callable[[WorkerSpec, str, bool], None],
    ) -> None:
        self.admit = LaunchRules()
        self._loop = loop
        self._site = site
        self._templates = templates
        self._ledger = ledger
        self._logs = logs
        self._known = known
        self._begin = begin
        self._refuse = refuse
        self._orders = deque[_Order]()
        self._waiting: dict[str, WorkerSpec] = {}
        self._turn: asyncio.Handle | None = None

    def add(self, order: StartWorkers) -> None:
        """Start the workers of an order, or refuse them. If no other worker waits, the first ones are started now."""
        node = self._site.rules.node
        refused = launch_plan.refused(order, self.admit, node)
        for spec in order.workers:
            if spec.id in refused:
                self._refuse(spec, refused[spec.id], True)
        workers = [spec for spec in order.workers if spec.id not in refused]
        if not workers:
            return
        try:
            site = launch_plan.site_of(self._site, self._site.users.of_driver(order.driver))
            self._ledger.write(replace(order, workers=workers))
        except ValueError as error:
            log.warning("workers of group %s are not started: %s", workers[0].group, error)
            self._refuse_all(workers, f"node {node} starts none of them: {error}")
            return
        except OSError as error:
            self._refuse_all(workers, f"node {node} cannot write to {self._site.run_dir}: {error.strerror}")
            return
        self._orders.append(_Order(deque(workers), site.environment(), site))
        self._waiting.update((spec.id, spec) for spec in workers)
        if self._turn is None:
            self._go_on()

    def remove(self, ids: Iterable[str]) -> list[WorkerSpec]:
        """Do not start these workers. Return those of them that were waiting."""
        return [spec for id in ids if (spec := self._waiting.pop(id, None)) is not None]

    def ids(self) -> list[str]:
        """Return the ids of the workers that wait."""
        return list(self._waiting)

    def close(self) -> None:
        """Start no more workers."""
        self._orders.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def failed(self, spec: WorkerSpec) -> str:
        return f"{spec.group}:{spec.rank} cannot be started on node {self._site.rules.node}"

    def _go_on(self) -> None:
        until = time.perf_counter() + SLICE_S
        self._turn = self._loop.call_soon(self._go_on) if self._orders else None  # for orders of this turn too
        while self._orders and time.perf_counter() < until:
            order = self._orders.popleft()
            if not order.begun:
                order.begun = True
                self._templates.refresh(order.site.user_name)
            spec = order.workers.popleft()
            if order.workers:
                self._orders.append(order)
            if self._waiting.pop(spec.id, None) is not None:
                self._start(spec, order.env, order.site)

    def _start(self, spec: WorkerSpec, env: Mapping[str, str], site: Site) -> None:
        if spec.id in self._known:
            log.error("worker %s was to be started twice; the second request is dropped", spec.id)
            return
        try:
            self._begin(self._plan(spec, env, site))
        except WorkerStartError as error:
            self._refuse(spec, str(error), False)
        except Exception as error:  # a bug; it costs this worker alone
            log.exception("internal error: %s:%d cannot be started", spec.group, spec.rank)
            what = f"{type(error).__name__}: {error}"
            self._refuse(spec, f"{self.failed(spec)}: internal error of its agentd ({what}); its log has more", False)

    def _plan(self, spec: WorkerSpec, env: Mapping[str, str], site: Site) -> WorkerProcess:
        where, user = self.failed(spec), site.rules.user
        plan = launch_plan.plan(spec, env, site.rules)
        try:
            template = self._templates.get(plan.key, env)
        except OSError as error:
            raise WorkerStartError(f"{where}: {plan.key.interpreter}: {explain(error)}") from None
        launch_plan.make_directories(plan, where, user)
        if spec.forward_logs:
            name, out_path, err_path = f"{spec.group}:{spec.rank}", plan.out_path, plan.err_path
            self._logs.add(spec.id, name, spec.namespace, out_path, err_path, keep=spec.keep_logs, user=user)
        return WorkerProcess(spec, plan, template, site)

    def _refuse_all(self, workers: Sequence[WorkerSpec], reason: str) -> None:
        for spec in workers:
            self._refuse(spec, reason, False)
