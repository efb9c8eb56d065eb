"""The workers of one node: started through templates, watched by pidfd, ended with all that is theirs.

House rules: every worker that `start` was given ends in exactly one WorkerExited, through `_end`;
everything runs on the loop's thread.

A worker from its spec to a template that was asked to start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from agentd import launch_plan, worker_process
from agentd.adoption import Survivors, running
from agentd.device_locks import DeviceLocks
from agentd.health import HealthTimes, HealthWatch
from agentd.keeper_client import KeeperClient
from agentd.launch_plan import Site
from agentd.logs import Logs, Position
from agentd.run_dir import OrderLedger
from agentd.state_events import Report
from agentd.templates import Template, TemplatePool
from agentd.worker_process import Orphans, WorkerProcess
from rlinf_actors import procfs
from rlinf_actors.compat import timeout
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.values import ExitReport, RunningWorker, WorkerSpec, ending, orderly


class Starter:
    """Starts workers through templates. Loop thread only.

    Args:
        site: where they run.
        templates: of this agent.
        logs: read the files of workers whose output is passed on.
    """

    def __init__(self, site: Site, templates: TemplatePool, logs: Logs) -> None:
        self._site = site
        self._templates = templates
        self._logs = logs
        self._lease = (0.0, 0.0)

    def prestart(self, preload: Sequence[str]) -> None:
        """Start the template of agentd's own interpreter.

        Raises:
            OSError: it cannot be started.
        """
        env = self._site.environment()
        self._templates.get(launch_plan.template_key(self._site.rules.own, env, preload), env)

    def prepare(self, spec: WorkerSpec, env: Mapping[str, str]) -> WorkerProcess:
        """Plan a worker, and find or start its template; `ask` that once it is ready.

        Args:
            spec: of the worker.
            env: the node's environment.

        Raises:
            WorkerStartError: it cannot be started here, and why.
        """
        where = f"{spec.group}:{spec.rank} cannot be started on node {self._site.node}"
        plan = launch_plan.plan(spec, env, self._site.rules)
        try:
            template = self._templates.get(plan.key, env)
        except OSError as error:
            raise WorkerStartError(f"{where}: {plan.key.interpreter}: {explain(error)}") from None
        directory = os.path.dirname(plan.out_path)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            text = f"its log directory {directory} cannot be used ({error.strerror}): choose another"
            raise WorkerStartError(f"{where}: {text}") from None
        if spec.forward_logs:
            self._logs.add(spec.id, f"{spec.group}:{spec.rank}", spec.namespace, plan.out_path, plan.err_path)
        return WorkerProcess(spec, plan, template)

    def ask(self, worker: WorkerProcess) -> None:
        """Have its template start it.

        Raises:
            OSError: its environment cannot be passed on.
        """
        worker.asked = True
        place = self._site.place(worker.plan.out_path, worker.plan.err_path, *self._lease)
        worker.template.send(template_protocol.Fork(worker.spec, place, worker.plan.env))

    def adopt(self, spec: WorkerSpec, kept: template_protocol.SurvivingWorker, template: Template) -> WorkerProcess:
        """One that *template* started for an earlier agentd; its output is read on."""
        if spec.forward_logs:
            at = (kept.out_read, kept.err_read)
            self._logs.add(spec.id, f"{spec.group}:{spec.rank}", spec.namespace, kept.out_path, kept.err_path, at)
            self._logs.grew([spec.id])
        return WorkerProcess(
            spec, launch_plan.Plan(template.key, {}, kept.out_path, kept.err_path), template, asked=True
        )

    def renew(self, until: float, lease_s: float) -> None:
        """New robot workers may go on until that time of the loop, and then as long as such a lease."""
        self._lease = (until, lease_s)


log = logging.getLogger(__name__)

EARLIER_ENDED = "its agentd ended; robot workers do not go on without one"
TEMPLATE_END_S = 6.0
"""How long a template may take to end; it gives what it kills 5 s."""


class UnacknowledgedEnds:
    """Workers from their order until the head knows of their end. Loop thread only.

    Args:
        ledger: what was asked for; a next agentd reads it.
    """

    def __init__(self, ledger: OrderLedger) -> None:
        self._ledger = ledger
        self._ended: dict[str, Template] = {}

    def ordered(self, order: StartWorkers) -> None:
        """Workers are about to be started.

        Raises:
            OSError: that cannot be written down.
        """
        self._ledger.write(order)

    def ended(self, id: str, template: Template) -> None:
        """A worker has ended; its template remembers how, for a next agentd, until that is settled."""
        if not template.gone:
            self._ended[id] = template

    def has(self, id: str) -> bool:
        """Whether this worker has ended, the head may not know it, and its template does."""
        return id in self._ended

    @property
    def templates(self) -> set[Template]:
        """Those that remember an end that the head may not know."""
        return set(self._ended.values())

    def template(self, id: str) -> Template | None:
        """Who remembers how this worker ended; None if it has not, or that is settled, or nobody does."""
        return self._ended.get(id)

    def acknowledged(self, ids: Iterable[str]) -> None:
        """The head knows how these workers ended."""
        self._ledger.acknowledged(ids)
        for id in ids:
            template = self._ended.pop(id, None)
            if template is not None:
                template.send(template_protocol.Settled([id]))

    def template_gone(self, template: Template) -> None:
        """A template has ended, and remembers nothing."""
        self._ended = {id: one for id, one in self._ended.items() if one is not template}

    def close(self) -> None:
        """Everything has ended, and nothing stays on disk."""
        self._ledger.close()


class Workers:
    """All workers of this agent. Loop thread only.

    Args:
        loop: the agent's.
        site: where they run.
        report: takes WorkerReady, WorkerExited, WorkersHealth and LogLines (whose owner is the namespace).
        ledger: what earlier agentds in the site's run directory were asked for; see adoption.take_inventory.
        health: when workers are asked whether they answer.

    Raises:
        ProcessLookupError: the owner is gone already.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        report: Callable[[Report], None],
        *,
        ledger: OrderLedger | None = None,
        health: HealthTimes | None = None,
        says_deaths: bool = True,
    ) -> None:
        self._loop = loop
        self._site = site
        self._report = report
        self._workers: dict[str, WorkerProcess] = {}
        self._unacknowledged = UnacknowledgedEnds(
            ledger or OrderLedger(site.run_dir / "l" if site.keep_s is not None else None)
        )
        self._closing = False
        self._says_deaths = says_deaths
        self._changed = asyncio.Event()
        self._keeping = KeeperClient(loop, site.run_dir, site.keep_s is not None, site.keeper)
        self._orphans = Orphans(loop, site.rules.cgroups, self._keeping, self._end, self._changed.set)
        self._devices = DeviceLocks(loop, site.resources)
        self._logs = Logs(loop, site.node, report, self._on_logs_read)
        self._health = HealthWatch(loop, report, health or HealthTimes())
        self._owner = procfs.pidfd_of(site.owner_pid) if site.owner_pid is not None else -1
        self._templates = TemplatePool(loop, site, self._keeping, self._owner, self._on_packet, self._on_template_end)
        self._starter = Starter(site, self._templates, self._logs)
        procfs.set_subreaper()  # what a killed keeper leaves behind comes to us
        with contextlib.suppress(OSError):  # it runs before it is needed; where it cannot, the first launch says why
            self._keeping.begin()

    # --- what the session asks for ---

    async def prestart(self, preload: Sequence[str] = ()) -> None:
        """Start the template of agentd's own interpreter ahead of the first launch. Does not wait for it.

        Raises:
            OSError: it cannot be started.
        """
        self._starter.prestart(preload)

    def start(self, order: StartWorkers) -> None:
        """Start workers. Each one's fate follows through *report*: WorkerReady, then or instead one WorkerExited."""
        env = self._site.environment()
        self._templates.refresh()
        try:
            self._unacknowledged.ordered(order)
        except OSError as error:
            for spec in order.workers:
                self._refuse(spec, f"node {self._site.node} cannot write to {self._site.run_dir}: {error.strerror}")
            return
        for spec in order.workers:
            try:
                self._start(spec, env)
            except WorkerStartError as error:
                self._refuse(spec, str(error))
            except Exception as error:  # a bug of ours; it costs this worker alone, and nobody waits for it
                log.exception("internal error: %s:%d cannot be started", spec.group, spec.rank)
                self._failed_inside(spec, error)

    def record_owner(self, order: StartWorkers) -> None:
        """Write down, for a next agentd, that workers which run already have this order's owner."""
        try:
            self._unacknowledged.ordered(order)
        except OSError as error:
            log.error(
                "%s cannot be written to (%s): the next agentd here will end group %r with the client that launched it",
                self._site.run_dir, error.strerror, order.workers[0].group,
            )  # fmt: skip

    def stop(self, ids: Sequence[str], grace_s: float, reason: str = "") -> None:
        """SIGTERM to the workers' process groups, SIGKILL after *grace_s* seconds. Unknown ids are ignored.

        Robot workers lose their lease instead, and always have the time that making a robot safe may take. *reason*
        is for people, "" where their owner wanted it.
        """
        for worker in [self._workers[id] for id in ids if id in self._workers]:
            if not worker.stopping:
                worker.stopping, worker.reason = True, reason
            if not worker.asked:
                self._end(worker, ExitReport("stopped"))
            else:
                worker.stop(self._loop, grace_s, reason)

    def renew(self, until: float, lease_s: float) -> None:
        """Robot workers may go on until that time of the loop, and new ones begin with such a lease."""
        self._starter.renew(until, lease_s)
        for template in {id(w.template): w.template for w in self._workers.values() if w.has_robots}.values():
            template.send(template_protocol.Renew(until))

    def credit_logs(self, chars: int, owner: str) -> None:
        """The owner (LogLines.owner) has shown lines of that cost: it may be sent as many more."""
        self._logs.credit(chars, owner)

    def flush_logs(self, owner: str, wait_s: float) -> None:
        """The owner ends: pass on what its workers wrote, for so many seconds, then say what was left out."""
        self._logs.flush(owner, wait_s)

    def acknowledged(self, ids: Sequence[str]) -> None:
        """The head knows how these workers ended."""
        self._unacknowledged.acknowledged(ids)
        self._trim()

    def registered(self, keep_s: float) -> None:
        """The head has taken this node; templates wait *keep_s* seconds for another agentd if this one ends."""
        self._templates.registered(keep_s)
        self._logs.go_on()

    def adopt(self, survivors: Survivors) -> list[RunningWorker]:
        """Take over what an earlier agentd left. Before anything else; what follows comes through *report*.

        Returns:
            All its workers: those that go on, and the ends that the head may not know.
        """
        self._logs.hold()
        taken: list[RunningWorker] = []
        asking: list[tuple[template_protocol.SurvivingWorker, Template]] = []
        for found in survivors.templates:
            template = self._templates.adopt(found.record, found.process, found.inventory)
            for kept in found.strays:  # nobody waits for their ends
                template.send(template_protocol.Watching(kept.id))
                if kept.exit is not None:
                    template.send(template_protocol.Settled([kept.id]))
            for kept in found.workers:
                known = survivors.workers[kept.id]
                taken.append(running(known, kept))
                worker = self._starter.adopt(known.spec, kept, template)
                if kept.exit is not None:
                    self._unacknowledged.ended(kept.id, template)
                    self._logs.finish(kept.id)
                else:
                    self._take(worker, kept)
                    asking += [(kept, template)] * bool(kept.request)
        for kept, template in sorted(asking, key=lambda one: (not one[0].granted, one[0].asked_at)):
            packet = template_protocol.LockDevices(kept.id, kept.request)
            self._devices.said(self._workers[kept.id].spec, packet, template.send)  # who has it is told again: no harm
        for path in (self._site.run_dir / "w").iterdir():
            if path.name.partition("_")[0] not in self._workers:  # behind a "_": of a worker's children
                path.unlink(missing_ok=True)
        self._templates.refresh()
        self._trim()
        return taken

    def _take(self, worker: WorkerProcess, kept: template_protocol.SurvivingWorker) -> None:
        worker.stopping, worker.reason = worker.has_robots, EARLIER_ENDED if worker.has_robots else ""
        self._workers[kept.id] = worker
        self._on_forked(worker.template, template_protocol.Forked(kept.id, kept.pid))
        if kept.up is not None:
            self._health.up(kept.id, worker.template)

    def abandon(self) -> None:
        """Let go of everything: another agentd takes it over. Nothing is ended but templates that are not ready."""
        self._closing = True
        for worker in self._workers.values():
            worker.release(self._loop)
        for template in list(self._templates.running):
            template.abandon()
        self._keeping.abandon()
        self._let_go()

    async def close(self, grace_s: float, reason: str = "") -> None:
        """End all workers as `stop` does, then all templates; nothing remains.

        When cancelled, the templates are killed, and their workers by the kernel.
        """
        self._closing = True
        try:
            self.stop(list(self._workers), grace_s, reason)
            await self._until(
                lambda: not self._workers,
                max(grace_s, template_protocol.ROBOT_END_S) + worker_process.TEMPLATE_SILENT_S,
            )
            self._templates.shut_down()
            await self._until(lambda: not self._templates.running, TEMPLATE_END_S)
        finally:
            for template in self._templates.running:
                template.kill()
        await self._until(lambda: not self._templates.running and not self._orphans.sweeps, TEMPLATE_END_S)
        await self._keeping.close()
        self._logs.end()
        self._unacknowledged.close()
        self._let_go()

    def _let_go(self) -> None:
        self._health.close()
        self._logs.close()
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    async def _until(self, fact: Callable[[], bool], patience_s: float) -> None:
        """Wait for *fact*, which only changes with `_changed`; gives up after *patience_s*."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            async with timeout(patience_s):
                while not fact():
                    self._changed.clear()
                    await self._changed.wait()

    # --- starting ---

    def _start(self, spec: WorkerSpec, node_env: Mapping[str, str]) -> None:
        if self._closing:
            name = f"{spec.group}:{spec.rank}"
            raise WorkerStartError(f"{name} cannot be started on node {self._site.node}: its agentd is shutting down")
        if spec.id in self._workers:
            log.error("worker %s was to be started twice; the second request is dropped", spec.id)
            return
        worker = self._workers[spec.id] = self._starter.prepare(spec, node_env)
        if worker.template.ready:
            self._ask(worker)

    def _ask(self, worker: WorkerProcess) -> None:
        try:
            self._starter.ask(worker)
        except OSError as error:
            self._end(worker, ExitReport("start_failed", reason=f"its environment cannot be passed on: {error}"))

    def _failed_inside(self, spec: WorkerSpec, error: Exception) -> None:
        """A fault of ours while this worker was taken on: it has not started."""
        reason = (
            f"{spec.group}:{spec.rank} cannot be started on node {self._site.node}: internal error of its agentd "
            f"({type(error).__name__}: {error}); its log has more"
        )
        if spec.id in self._workers:
            self._end(self._workers[spec.id], ExitReport("start_failed", reason=reason))
        else:
            self._refuse(spec, reason)

    def _refuse(self, spec: WorkerSpec, reason: str) -> None:
        exit = ExitReport("start_failed", reason=reason)
        self._loop.call_soon(self._report, WorkerExited(spec.id, exit))  # not before start() has returned

    # --- what templates say ---

    def _on_packet(self, template: Template, packet: template_protocol.ToAgent) -> None:
        if isinstance(packet, template_protocol.TemplateReady):
            template.ready = True
            self._keeping.ready(template.pid)
            template.installed, template.paths = packet.installed, tuple(packet.paths)
            if not packet.forks:
                log.warning(
                    "%s: workers are started afresh instead of forked: %s", template.key.interpreter, packet.why
                )
            for worker in self._of(template):
                self._ask(worker)
        elif isinstance(packet, template_protocol.TemplateFailed):
            template.failure = packet.text
            self._templates.retire(template)
        elif isinstance(packet, template_protocol.LogsGrew):
            self._logs.grew(packet.ids)
        elif isinstance(packet, template_protocol.Pulses):
            self._health.said(template, packet)
        elif isinstance(packet, template_protocol.Forked):
            self._on_forked(template, packet)
        elif isinstance(packet, template_protocol.LogsLost):
            self._logs.lost(packet.id, packet.text)
        elif isinstance(
            packet,
            (
                template_protocol.WorkerUp,
                template_protocol.Exited,
                template_protocol.LockDevices,
                template_protocol.UnlockDevices,
            ),
        ):
            known = self._workers.get(packet.id)
            if known is None:
                log.debug("template %d speaks of worker %s, which has ended", template.pid, packet.id)
                if isinstance(packet, template_protocol.Exited) and not self._unacknowledged.has(
                    packet.id
                ):  # a stray: see `adopt`
                    template.send(template_protocol.Settled([packet.id]))
            elif isinstance(packet, template_protocol.WorkerUp):
                self._report(WorkerReady(packet.id, known.pid, packet.endpoint, packet.port, packet.master_port))
                self._health.up(packet.id, template)
            elif isinstance(packet, template_protocol.Exited):
                self._end(known, packet.exit)
            else:
                self._devices.said(known.spec, packet, template.send)

    def _on_forked(self, template: Template, packet: template_protocol.Forked, again: bool = False) -> None:
        if template.gone:
            return  # while this waited for a descriptor: its end tells of the worker's, whose pid may be another's
        worker = self._workers.get(packet.id)
        if worker is not None:
            worker.pid = packet.pid
            try:
                worker.pidfd = procfs.pidfd_of(packet.pid)  # the template keeps even a dead one until we have this
            except ProcessLookupError:  # unless it has ended itself, and is no child of ours: its end tells of both
                return
            except OSError as error:  # no descriptor is left: as if the template had said it later
                if not again:
                    log.warning("worker %s is watched once that can be done: %s", packet.id, explain(error))
                self._loop.call_later(AGAIN_S, self._on_forked, template, packet, True)
                return
            self._loop.add_reader(worker.pidfd, self._on_worker_end, worker)
            if worker.stopping and not worker.has_robots:
                worker.signal(signal.SIGTERM)
            worker.kill_if_due(self._loop)
        template.send(template_protocol.Watching(packet.id))

    def _on_worker_end(self, worker: WorkerProcess) -> None:
        self._loop.remove_reader(worker.pidfd)
        self._orphans.ended(worker)

    def _on_template_end(self, template: Template) -> None:
        self._health.template_gone(template)
        workers = self._of(template)
        self._unacknowledged.template_gone(template)
        reason = template.failure or (
            f"interpreter {template.key.interpreter} on node {self._site.node} ended before it was ready: "
            f"{template.last_words()}"
        )
        if template.failure and not workers:
            log.warning("%s", template.failure)  # started ahead of the first launch
        for worker in [w for w in workers if not w.asked]:
            self._end(worker, ExitReport("start_failed", reason=reason))
        started = [w for w in workers if w.asked]
        if started:
            log.error("template %d ended (%s); its workers end with it", template.pid, template.last_words())
            self._orphans.left(started)
        self._changed.set()

    def _of(self, template: Template) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.template is template]

    def _on_logs_read(self, id: str, out: Position, err: Position, to_end: bool) -> None:
        template = self._workers[id].template if id in self._workers else self._unacknowledged.template(id)
        if template is not None:
            template.send(template_protocol.Read(id, out, err, to_end))

    # --- ends ---

    def _end(self, worker: WorkerProcess, exit: ExitReport) -> None:
        """The one place where a worker's life ends."""
        if self._workers.pop(worker.spec.id, None) is None:
            return
        worker.release(self._loop)
        self._unacknowledged.ended(worker.spec.id, worker.template)
        self._devices.gone(worker.spec.id)
        self._health.gone(worker.spec.id)
        sockets = self._site.run_dir / "w"
        for name in os.listdir(sockets):
            if name.partition("_")[0] == worker.spec.id:  # its own, and behind a "_" those of its children
                (sockets / name).unlink(missing_ok=True)
        if worker.stopping:
            exit = msgspec.structs.replace(exit, oom="no", **worker.why(exit))
        elif self._says_deaths and not orderly(worker.spec.group, exit):
            name = f"worker {worker.spec.group}:{worker.spec.rank} of namespace {worker.spec.namespace!r}"
            log.warning("%s (process %d) %s", name, worker.pid, ending(exit))
        self._logs.finish(worker.spec.id)
        self._report(WorkerExited(worker.spec.id, exit))
        self._trim()
        self._changed.set()

    def _trim(self) -> None:
        self._templates.trim({worker.template for worker in self._workers.values()} | self._unacknowledged.templates)
