"""The workers of one node: started through templates, watched by pidfd, ended with every process that they started.

agentd.session calls `Workers` on the loop's thread; nothing here may block. A worker's life: `start` plans the worker
and asks its template to fork it; the template sends Forked, and agentd opens a pidfd; the template sends WorkerUp once
the worker listens, and Exited at its end. If the template has ended or does not answer, agentd kills what the worker
left (agentd.sweep) and asks the keeper for the exit status.

House rules:
* Each worker given to `start` ends in exactly one WorkerExited, which `_end` reports, or `_refuse` if the start
  fails before the worker is in the table.
* WorkerExited is reported when no process of the worker is left, since a process that runs on may move a robot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agentd import launch_plan
from agentd.device_locks import DeviceLocks
from agentd.figures import FigureCollector
from agentd.health import HealthMonitor, HealthTimes
from agentd.launch_plan import LaunchPlan, Site
from agentd.log_reader import LogReader
from agentd.log_retention import LogRetention
from agentd.logs import LogForwarder, Position
from agentd.node_checks import NodeChecks
from agentd.run_dir import OrderLedger
from agentd.starts import Starts
from agentd.state_events import Report
from agentd.sweep import Sweep, remove_sockets
from agentd.template_start import OrderedTemplate, TemplateStarter
from agentd.templates import MAX_IDLE, SurvivingTemplate, TemplatePool, TemplateProcess
from agentd.traces import TraceFiles
from agentd.worker_process import WorkerProcess, running
from agentd.worker_questions import WorkerQuestions
from rlinf_actors import procfs
from rlinf_actors.cgroups.worker_cgroup import leftovers
from rlinf_actors.compat import timeout
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.wire import template_protocol, worker_questions
from rlinf_actors.wire.agent_messages import LeaseEnded, StartWorkers, WorkerExited, WorkerReady
from rlinf_actors.wire.endings import REASON_CHARS, cut, ending, orderly
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.values import ExitReport, RunningWorker, WorkerSpec

log = logging.getLogger(__name__)

EARLIER_ENDED = "its agentd ended; robot workers do not go on without one"
TEMPLATE_END_S = 6.0  # seconds that a template may take to end: it waits up to 5 s for the processes that it kills
TEMPLATE_SILENT_S = 5.0  # seconds after the end of a worker's process in which the template must send Exited
FORKS = 2
"""Most orders to fork that a template has not carried out yet: one that it works on, and the next. A fork takes up to
25 ms, and a renewal of a robot's lease must not wait behind a launch of 100 workers. The rest waits in agentd, where a
stop removes it.
"""


class Workers:
    """All workers of this agentd: starts them through templates, watches them, and ends them. Loop thread only.

    Args:
        report: called with each message for the head: WorkerReady, WorkerExited, LeaseEnded, WorkersHealth, LogLines.
        ledger: the head's orders on disk, from adoption.take_inventory; None to begin an empty ledger.
        logs_deaths: False if the head runs in this process, since the head then logs the deaths of workers.
        starter: orders templates; None to make one for *site*.
        ordered: a template that *starter* has ordered already; None if there is none.

    Raises:
        ProcessLookupError: the driver that owns this agentd has ended already.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        report: Callable[[Report], None],
        *,
        ledger: OrderLedger | None = None,
        health: HealthTimes | None = None,
        logs_deaths: bool = True,
        starter: TemplateStarter | None = None,
        ordered: OrderedTemplate | None = None,
    ) -> None:
        self._loop, self._site, self._report = loop, site, report
        self._workers: dict[str, WorkerProcess] = {}
        self._ledger = ledger or OrderLedger(site.run_dir / "l" if site.keep_s is not None else None)
        self._remembering: dict[str, TemplateProcess] = {}  # templates, by ended workers that the head may not know
        self._lease = (0.0, 0.0)
        self._closing, self._logs_deaths, self._sweeps = False, logs_deaths, 0
        self._ended: list[WorkerProcess] = []  # whose sockets are still there
        self._changed = asyncio.Event()
        self._starter = starter or TemplateStarter.of_site(loop, site)
        self._keeper = self._starter.keeper
        self._devices = DeviceLocks(loop, site.resources, self._ledger.owners)
        self._logs = LogForwarder(loop, site.rules.node, report, self._on_logs_read)
        self._health = HealthMonitor(loop, report, health or HealthTimes())
        self.questions = WorkerQuestions(loop, self._workers, self._health.why_silent, self._devices.say_holders)
        self.log_reader = LogReader(loop, site, self._workers)
        self.log_retention = LogRetention(loop, site, self._workers, self._logs)
        self.figures = FigureCollector(loop, self._workers, self.questions, site)
        self.traces = TraceFiles(loop, site.run_dir, self._workers, self.questions)
        self._templates = TemplatePool(loop, self._starter, self._on_packet, self._on_template_end, ordered)
        self.checks = NodeChecks(loop, site, self._workers, self._templates, self.log_reader)
        self._starts = Starts(
            loop, site, self._templates, self._ledger, self._logs, self._workers, self._begin, self._refuse
        )
        procfs.set_subreaper()  # what a killed keeper leaves behind comes to us
        with contextlib.suppress(OSError):  # ahead of need; where it cannot be started, the first launch says why
            self._keeper.begin()

    # --- what the session asks for ---

    def prestart(self, preload: Sequence[str] = ()) -> None:
        """Start a template of agentd's own interpreter, one for each of a few users, before a worker needs one. The
        template imports the modules *preload*. Raise OSError if the keeper cannot be reached.
        """
        for site in [launch_plan.site_of(self._site, user) for user in self._site.users.first(MAX_IDLE)]:
            env = site.environment()
            self._templates.get(launch_plan.template_key(site.rules.own, env, preload, site.user_name), env)

    def start(self, order: StartWorkers) -> None:
        """Start the workers of a head's order. WorkerReady is reported when a worker listens, and WorkerExited when it
        has ended or cannot be started.
        """
        if self._closing:
            for spec in order.workers:
                self._refuse(spec, f"{self._starts.failed(spec)}: its agentd is shutting down")
        else:
            self._starts.add(order)

    def admit(self, rules: LaunchRules) -> None:
        """Let those launch here whom *rules* name, from now on."""
        self._starts.admit = rules

    def record_owner(self, order: StartWorkers) -> None:
        """Write to disk that the running workers in *order* now belong to the order's owner, so that the next agentd
        knows the new owner.
        """
        try:
            self._ledger.write(order)
        except OSError as error:
            text = "%s cannot be written to (%s): the next agentd ends group %r with the client that launched it"
            log.error(text, self._site.run_dir, error.strerror, order.workers[0].group)

    def stop(self, ids: Sequence[str], grace_s: float, reason: str = "") -> None:
        """Send SIGTERM to the process groups of the workers *ids*, and SIGKILL after *grace_s* seconds. Unknown ids are
        ignored.

        A robot worker does not get SIGTERM but loses its lease, and has at least ROBOT_END_S to make its robots safe.
        *reason* is for people; it is "" if the workers' owner asked for the stop.
        """
        for spec in self._starts.remove(ids):
            self._report(WorkerExited(spec.id, ExitReport("stopped", reason=reason, oom="no")))
        for worker in [self._workers[id] for id in ids if id in self._workers]:
            if not worker.stopping:
                worker.stopping, worker.reason = True, reason
            if not worker.asked:
                self._end(worker, ExitReport("stopped"))
            else:
                worker.stop(self._loop, grace_s, reason)

    def renew(self, until: float, lease_s: float) -> None:
        """Extend the lease of all robot workers, also of those that start later, to *until* (time of the loop)."""
        self._lease = (until, lease_s)
        for template in {one.template for one in self._workers.values() if one.has_robots and one.asked}:
            template.renew(until, lease_s)

    def credit_logs(self, chars: int, owner: str) -> None:
        """Allow more workers' output to be sent to the job *owner*: lines with a total cost (line_cost) of *chars*."""
        self._logs.credit(chars, owner)

    def flush_logs(self, owner: str, wait_s: float) -> None:
        """Send the unread output of the ending job *owner* in *wait_s* seconds. Report how many lines were not sent."""
        self._logs.flush(owner, wait_s)

    def acknowledged(self, ids: Sequence[str]) -> None:
        """Drop the exit reports of the workers *ids*, which the head has acknowledged, also in their templates and on
        disk.
        """
        self._ledger.acknowledged(ids)
        for id in ids:
            template = self._remembering.pop(id, None)
            if template is not None:
                template.send(template_protocol.Settled([id]))
        self._trim()

    def registered(self, keep_s: float, packet: template_protocol.NodeRegistered) -> None:
        """Send workers' output again, because the head has registered this node. Tell the workers so by *packet*, and
        the templates to wait *keep_s* seconds for the next agentd after this one's end.
        """
        self._templates.registered(keep_s, packet)
        self._logs.resume()

    def adopt(self, templates: Sequence[SurvivingTemplate], known: Mapping[str, RunningWorker]) -> list[RunningWorker]:
        """Take over the running templates of an earlier agentd and their workers. Call this before all other methods.

        *known* has the workers of these templates by id, from the head's orders on disk. Return the running workers,
        and the ended workers whose exit reports the head may not have.
        """
        self._logs.pause()
        adopted: list[RunningWorker] = []
        waiting: list[tuple[template_protocol.SurvivingWorker, TemplateProcess]] = []
        for found in templates:
            template = self._templates.adopt(found)
            site = launch_plan.site_of(self._site, found.user)
            for stray in found.strays:
                template.send(template_protocol.Watching(stray.id))
                if stray.exit is not None:
                    template.send(template_protocol.Settled([stray.id]))
            for one in found.workers:
                adopted.append(running(known[one.id], one))
                spec, out, err = adopted[-1].spec, one.out_path, one.err_path
                worker = WorkerProcess(spec, LaunchPlan(template.key, {}, out, err), template, site, asked=True)
                if spec.forward_logs:
                    at = (one.out_read, one.err_read)
                    name = f"{spec.group}:{spec.rank}"
                    self._logs.add(spec.id, name, spec.namespace, out, err, at, spec.keep_logs, found.user)
                    self._logs.grew([spec.id])
                if one.exit is not None:
                    self._remembering[one.id] = template
                    self._logs.finish(one.id)
                    continue
                if worker.has_robots:
                    worker.stopping, worker.reason = True, EARLIER_ENDED
                self._workers[one.id] = worker
                self.traces.started(spec, found.user)
                self._on_forked(template, template_protocol.Forked(one.id, one.pid))
                if one.up is not None:
                    self._workers[one.id].up = True
                    self._health.worker_up(one.id, template, one.pid)
                if one.request:
                    waiting.append((one, template))
        for one, template in sorted(waiting, key=lambda pair: (not pair[0].granted, pair[0].asked_at)):
            packet = template_protocol.LockDevices(one.id, one.request)
            self._devices.handle(self._workers[one.id].spec, packet, template.send)  # a second grant does no harm
        for user in (None, *self._site.users.all()):
            directory = self._site.place.run_dir if user is None else user.run_dir
            remove_sockets(directory, lambda id: id not in self._workers, user)
            self._templates.refresh(user.name if user is not None else "")
        self.traces.adopted(self._site.users.all())
        self._trim()
        return adopted

    def abandon(self) -> None:
        """Leave all workers, templates and the keeper to the next agentd. Templates that have not finished their
        imports end.
        """
        self._closing = True
        for worker in self._workers.values():
            worker.release(self._loop)
        for template in list(self._templates.running):
            template.abandon()
        self._keeper.abandon()
        self.traces.release()
        self._release()

    async def close(self, grace_s: float, reason: str = "") -> None:
        """End all workers as `stop` does, then all templates, then the keeper that agentd started. If this is
        cancelled, the templates are killed.
        """
        self._closing = True
        try:
            self.stop([*self._starts.ids(), *self._workers], grace_s, reason)
            report_s = max((worker.report_s for worker in self._workers.values()), default=0.0)
            most_s = max(grace_s, template_protocol.ROBOT_GONE_S) + TEMPLATE_SILENT_S + report_s
            await self._until(lambda: not self._workers, most_s)
            self._templates.shut_down()
            await self._until(lambda: not self._templates.running, TEMPLATE_END_S)
        finally:
            for template in self._templates.running:
                template.kill()
        await self._until(lambda: not self._templates.running and not self._sweeps, TEMPLATE_END_S)
        await self._keeper.close()
        self._logs.end()
        self.traces.close()
        self._ledger.close()
        self._site.users.close()
        self._release()

    def _release(self) -> None:
        self._remove_sockets()
        parts = (self._starts, self._health, self.questions, self.figures, self._logs, self.log_reader)
        for closing in (*parts, self.log_retention, self.checks):
            closing.close()
        self._starter.close()

    async def _until(self, fact: Callable[[], bool], timeout_s: float) -> None:
        """Wait until *fact* returns True, for at most *timeout_s*. It is called again each time `_changed` is set."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            async with timeout(timeout_s):
                while not fact():
                    self._changed.clear()
                    await self._changed.wait()

    # --- start ---

    def _begin(self, worker: WorkerProcess) -> None:
        self._workers[worker.spec.id] = worker
        worker.template.waiting.append(worker.spec.id)
        self._order_forks(worker.template)

    def _order_forks(self, template: TemplateProcess) -> None:
        while template.ready and template.waiting and len(template.forking) < FORKS:
            worker = self._workers.get(template.waiting.popleft())
            if worker is not None:  # not stopped while it waited
                self._ask(worker)

    def _ask(self, worker: WorkerProcess) -> None:
        worker.asked = True
        try:
            worker.template.send(worker.order(self.traces.of_new_worker(worker.spec, worker.user), *self._lease))
        except OSError as error:
            self._end(worker, ExitReport("start_failed", reason=f"its environment or cgroup cannot be set up: {error}"))
        else:
            worker.template.forking.add(worker.spec.id)

    def _forked(self, template: TemplateProcess, id: str) -> None:
        template.forking.discard(id)
        self._order_forks(template)

    def _refuse(self, spec: WorkerSpec, reason: str, by_rule: bool = False) -> None:
        exit = cut(ExitReport("start_failed", reason=reason))
        if spec.id in self._workers:
            self._end(self._workers[spec.id], exit)
        else:
            self._loop.call_soon(self._report, WorkerExited(spec.id, exit, by_rule))  # not before start() has returned

    # --- what templates say ---

    def _on_packet(self, template: TemplateProcess, packet: template_protocol.ToAgent) -> None:
        if isinstance(packet, template_protocol.TemplateReady):
            if template.ready:
                return  # said before
            template.ready = True
            self._keeper.ready(template.pid)
            template.installed, template.paths = packet.installed, tuple(packet.paths)
            if not packet.forks:
                text = "%s: workers are started afresh instead of forked: %s"
                log.warning(text, template.key.interpreter, packet.why)
            self._order_forks(template)
        elif isinstance(packet, template_protocol.TemplateFailed):
            template.failure = packet.text[:REASON_CHARS]
            self._templates.retire(template)
        elif isinstance(packet, template_protocol.LogsGrew):
            grown = [id for id in packet.ids if self._template_of(id) is template]
            self._logs.grew(grown)
            self.log_reader.grew(grown)
        elif isinstance(packet, template_protocol.LeaseLost):
            if (worker := self._worker_of(template, packet.id)) is not None:
                worker.has_obeyed()
                self._report(LeaseEnded(packet.id, packet.text[:REASON_CHARS]))
        elif isinstance(packet, template_protocol.Renewed):
            template.renewed(packet.until)
        elif isinstance(packet, template_protocol.Pulses):
            self._health.answered(template, packet)
        elif isinstance(packet, worker_questions.WorkerAnswered):
            self.questions.answered(template, packet)
        elif isinstance(packet, template_protocol.Forked):
            self._on_forked(template, packet)
            self._forked(template, packet.id)
        elif isinstance(packet, template_protocol.LogsLost):
            if self._template_of(packet.id) is template:
                self._logs.lost(packet.id, packet.text)
        elif isinstance(packet, template_protocol.Exited):
            self._forked(template, packet.id)  # a fork that failed
            if (worker := self._worker_of(template, packet.id)) is not None:
                self._end(worker, packet.exit)
            elif self._remembering.get(packet.id) is not template:  # a stray
                template.send(template_protocol.Settled([packet.id]))
        elif isinstance(packet, template_protocol.WorkerUp):
            worker = self._worker_of(template, packet.id)
            if worker is not None and not worker.up:  # else the head was told before
                worker.up = True
                self._report(WorkerReady(packet.id, worker.pid, packet.endpoint, packet.port, packet.master_port))
                self._health.worker_up(packet.id, template, worker.pid)
                self.traces.worker_up(worker)
        elif isinstance(packet, (template_protocol.LockDevices, template_protocol.UnlockDevices)) and (
            worker := self._worker_of(template, packet.id)
        ):
            self._devices.handle(worker.spec, packet, template.send)

    def _worker_of(self, template: TemplateProcess, id: str) -> WorkerProcess | None:
        """Return the worker *id* if it runs and comes from *template*, else None: no other has a say about it."""
        worker = self._workers.get(id)
        return worker if worker is not None and worker.template is template else None

    def _template_of(self, id: str) -> TemplateProcess | None:
        """Return the template of a worker that runs, or whose exit report the head may not have."""
        worker = self._workers.get(id)
        return worker.template if worker is not None else self._remembering.get(id)

    def _on_forked(self, template: TemplateProcess, packet: template_protocol.Forked, is_retry: bool = False) -> None:
        if template.gone:
            return  # since the retry was scheduled: its end ends the worker, whose pid may be another process's
        worker = self._worker_of(template, packet.id)
        if worker is not None:
            try:
                pidfd = procfs.pidfd_of(packet.pid)  # the template does not reap it before we have this
            except ProcessLookupError:  # the template has ended: its end ends the worker too
                return
            except OSError as error:  # no descriptor is left: as if the template said it later
                if not is_retry:
                    log.warning("cannot watch worker %s yet: %s", packet.id, explain(error))
                self._loop.call_later(AGAIN_S, self._on_forked, template, packet, True)
                return
            if worker.user is not None and procfs.user_of(packet.pid) != worker.user.uid:
                if not procfs.has_ended(pidfd):  # agentd would signal it with rights that the template's user lacks
                    why = f"it says that worker {packet.id} is process {packet.pid}, which is another user's"
                    template.distrust(why)
                os.close(pidfd)
                return
            worker.watch(self._loop, packet.pid, pidfd)
            self._loop.add_reader(pidfd, self._on_worker_end, worker)
            if worker.stopping and not worker.has_robots:
                worker.signal(signal.SIGTERM)
            worker.kill_if_due(self._loop)
        template.send(template_protocol.Watching(packet.id))

    def _on_template_end(self, template: TemplateProcess) -> None:
        self._health.template_ended(template)
        workers = self._of(template)
        self._remembering = {id: one for id, one in self._remembering.items() if one is not template}
        when = "ended before it forked this worker" if template.ready else "ended before it was ready"
        where = f"interpreter {template.key.interpreter} on node {self._site.rules.node}"
        reason = template.failure or f"{where} {when}: {template.last_words()}"
        if template.failure and not workers:
            log.warning("%s", template.failure)  # of a template that was started ahead of need
        for worker in [worker for worker in workers if not worker.asked]:
            self._end(worker, ExitReport("start_failed", reason=reason))
        started = [worker for worker in workers if worker.asked]
        if started:
            log.error("template %d ended (%s); its workers end with it", template.pid, template.last_words())
            robots = [worker for worker in started if worker.has_robots]
            for worker in robots:  # their watchdogs have noticed, end them, and run stop_hardware
                self._report(LeaseEnded(worker.spec.id, reason[:REASON_CHARS]))
            self._sweep([worker for worker in started if worker not in robots])
            self._loop.call_later(template_protocol.ROBOT_GONE_S, self._sweep, robots)
        self._changed.set()

    def _of(self, template: TemplateProcess) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.template is template]

    def _on_logs_read(self, id: str, out: Position, err: Position, to_end: bool) -> None:
        template = self._workers[id].template if id in self._workers else self._remembering.get(id)
        if template is not None:
            template.send(template_protocol.Read(id, out, err, to_end))

    # --- ends ---

    def _on_worker_end(self, worker: WorkerProcess) -> None:
        self._loop.remove_reader(worker.pidfd)
        if worker.template.gone:
            self._sweep([worker] if not worker.has_robots else [])  # ROBOT_GONE_S after its template's end
        else:  # the template says within moments how it ended, unless it is stopped or stuck
            worker.silence_timer = self._loop.call_later(TEMPLATE_SILENT_S + worker.report_s, self._sweep, [worker])

    def _sweep(self, workers: list[WorkerProcess]) -> None:
        """Kill these workers and all processes that they started, because their template has ended or is silent. Then
        report the workers' ends.
        """
        workers = [worker for worker in workers if not worker.swept]
        if not workers:
            return
        for worker in workers:
            worker.swept = True
        self._sweeps += 1
        pids = {worker.pid: worker.started() for worker in workers if worker.pid}

        def swept(statuses: dict[int, int], left: bool) -> None:
            unknown = [one.pid for one in workers if one.pid and one.pid not in statuses and one.template.gone]
            self._keeper.when_ended(unknown, lambda more: self._end_swept(workers, {**statuses, **more}, left))

        Sweep(self._loop, [worker.spec.id for worker in workers], pids, swept, (os.getpid(), self._keeper.pid))

    def _end_swept(self, workers: list[WorkerProcess], statuses: dict[int, int], left: bool) -> None:
        self._sweeps -= 1
        for cgroup in leftovers(self._site.rules.cgroups):
            cgroup.remove()  # of the template that has ended
        for worker in workers:
            self._end(worker, worker.ended_with_template(statuses.get(worker.pid), left))
        self._changed.set()

    def _end(self, worker: WorkerProcess, exit: ExitReport) -> None:
        """Forget the worker and report its WorkerExited. `_refuse` reports a worker that is not in the table yet."""
        spec = worker.spec
        if self._workers.pop(spec.id, None) is None:
            return
        worker.release(self._loop)
        worker.end_cgroup()
        if not worker.template.gone:
            self._remembering[spec.id] = worker.template
        self.traces.ended(spec)
        for part in (self._devices, self._health, self.questions, self.log_reader):
            part.worker_ended(spec.id)
        if not self._ended:
            self._loop.call_soon(self._remove_sockets)
        self._ended.append(worker)
        if worker.stopping:
            exit = msgspec.structs.replace(exit, oom="no", **worker.why(exit))
        elif self._logs_deaths and not orderly(spec.group, exit):
            name = f"worker {spec.group}:{spec.rank} of job {spec.namespace!r}"
            log.warning("%s (process %d) %s", name, worker.pid, ending(exit))
        self._logs.finish(spec.id)
        self._report(WorkerExited(spec.id, cut(exit)))
        self._trim()
        self._changed.set()

    def _remove_sockets(self) -> None:
        """Remove the sockets of the workers that ended in this turn of the loop: a directory may have many."""
        ended, self._ended = self._ended, []
        for run_dir, user in {worker.site.place.run_dir: worker.user for worker in ended}.items():
            ids = {worker.spec.id for worker in ended}
            remove_sockets(run_dir, ids.__contains__, user)

    def _trim(self) -> None:
        busy = {worker.template for worker in self._workers.values()}
        self._templates.trim(busy | set(self._remembering.values()))
