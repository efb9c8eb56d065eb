"""One agentd process from start to end: hardware probe, head, session, workers, signals, owner.

`Daemon.run` runs on the main thread, in net.daemon's `run_daemon`. It starts the processes of the hardware probe first
and loads most modules while these run, so imports are inside functions here. Then it opens the run directory and the
network, starts the head if the configuration says so, inventories what an earlier agentd left, and runs the session
with the head until a signal, a refusal by the head, or the end of the driver that owns this agentd. SIGTERM ends the
workers; SIGUSR1 leaves those without robots to the next agentd; SIGHUP reads the configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentd.config import (
    default_log_dir,
    head_timing,
    inherited_environment,
    launch_rules,
    load,
    named,
    notify_of,
    own_key,
    reload,
)
from agentd.config_fields import Config
from agentd.owner import watch_owner, watch_stdin
from agentd.status_reporter import StatusReporter
from rlinf_actors import procfs
from rlinf_actors.errors import ConfigError
from rlinf_actors.exit_codes import STOPPED, SUCCESS
from rlinf_actors.net.daemon import on_stop_signals
from rlinf_actors.net.host import endpoint_of, split_address
from rlinf_actors.net.loop import Tasks
from rlinf_actors.settings import Settings, Unit
from rlinf_actors.systemd.service_manager import Manager

if TYPE_CHECKING:
    from agentd.adoption import Survivors
    from agentd.node_report import Described
    from agentd.run_dir import RunDir
    from agentd.session import Session
    from agentd.template_start import OrderedTemplate, TemplateStarter
    from agentd.users import Users
    from agentd.workers import Workers
    from rlinf_actors.hardware.probe_report import ProbeReport
    from rlinf_actors.head.server import HeadServer
    from rlinf_actors.net.zmq_network import ZmqNetwork
    from rlinf_actors.security.keyfile import KeyFile
    from rlinf_actors.wire.values import NodeReport

log = logging.getLogger(__name__)


class Daemon:
    """One agentd process. Call `run` once, on the main thread. *arguments* are the options of the command line; SIGHUP
    loads the configuration with them again.
    """

    def __init__(self, config: Config, arguments: Mapping[str, object]) -> None:
        self._config = config
        self._arguments = arguments
        self._unit = Unit() if config.embedded else Unit.load()  # an embedded agentd is in its driver's unit
        self._manager = Manager(self._unit.notify_socket, self._unit.watchdog_s)
        self.status = StatusReporter(self._manager, config.ready_fd)
        self._environ = dict(os.environ)
        self._inherited = inherited_environment(self._environ)
        self._described_env: dict[str, str] = {}
        self._keeps = config.keep and not config.embedded  # the agentd of a private cluster is never started again
        self._key: KeyFile | None = None
        self._head_endpoint = self._head_of_workers = ""  # the latter is one that workers of other users reach too
        self._node_id = ""
        self._node_report: Callable[[Config], NodeReport] | None = None
        self._run_dir: RunDir | None = None
        self._session: Session | None = None
        self._workers: Workers | None = None
        self._tasks = Tasks()
        self._prestarted = False
        self._first_template: tuple[TemplateStarter, OrderedTemplate] | None = None  # until the workers have it
        self._stopping = asyncio.Event()
        self._handing_over = False
        self._orphaned = False
        self._cluster_ended = ""  # why, if the head was told to end for good
        self._stopped_by = ""  # why this agentd ends, "" for SIGUSR1

    async def run(self) -> int:
        """Run agentd until a signal, its owner or the head ends it. Return the exit code.

        Raises:
            ConfigError: the configuration cannot work on this machine.
            OSError: an address is in use, or a directory cannot be made.
        """
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            if self._config.owner_pid is not None:
                watch_owner(self._config.owner_pid, self._config.owner_start, self._owner_ended, stack)
            if self._config.of_run or self._config.owner_pid is not None:
                watch_stdin(self._owner_ended, stack)
            watchdog = self._manager.watch(loop)
            if watchdog is not None:
                stack.callback(watchdog.close)
            stack.callback(self._tasks.cancel)
            probing = self._tasks.start(self._probe(), "probing the hardware", expected=Exception)
            await asyncio.sleep(0)  # its processes start now; the imports below run meanwhile
            run_dir = self._open_run_dir(stack)
            if self._keeps:
                from agentd.adoption import refuse_other_protocols

                refuse_other_protocols(run_dir)
            on_stop_signals(loop, self._stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            loop.add_signal_handler(signal.SIGUSR1, self._hand_over)
            self._order_template(run_dir, stack)
            network = self._open_network(stack)
            head = self._start_head(network, run_dir, stack)
            finding = self._tasks.start(self._find_facts(probing), "finding hardware and head", expected=Exception)
            stopped = self._tasks.start(self._stopping.wait(), "waiting for the end")
            await asyncio.wait((finding, stopped), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # a signal that came in this turn is acted on in the next: see on_stop_signals
            if self._stopping.is_set():  # not stopped.done(): that task is one turn of the loop behind the signal
                if not self._handing_over and not self._config.embedded:
                    from agentd.adoption import take_inventory

                    await take_inventory(run_dir, keep=False)
                return SUCCESS
            return await self._serve(network, run_dir, head, *finding.result())

    # --- start ---

    def _open_run_dir(self, stack: contextlib.AsyncExitStack) -> str:
        from agentd.run_dir import RunDir

        procfs.set_subreaper()  # orphans of a killed template become our children
        self._run_dir = directory = RunDir.open(self._config.run_dir, os.environ)
        stack.callback(self._close_run_dir, directory)
        directory.begin()
        return directory.path

    def _close_run_dir(self, directory: RunDir) -> None:
        self._run_dir = None
        if not self._handing_over and not self._config.embedded:
            directory.remove_if_unused()  # before the lock is free: the next agentd makes a new one
        directory.close()
        # a living driver keeps the logs after a failure, and removes the directory itself
        if self._orphaned or self._config.of_run:
            from rlinf_actors.kept_logs import keep

            parent = Settings.load().kept_logs
            if self._config.embedded and parent is not None:
                with contextlib.suppress(OSError):  # no driver is left to report it to
                    keep(directory.path, parent, "its driver has ended, and left it")
            shutil.rmtree(directory.path, ignore_errors=True)

    def _order_template(self, run_dir: str, stack: contextlib.AsyncExitStack) -> None:
        """Start the first template of a private cluster now, so that it imports its modules while this agentd starts.

        Other agentds start theirs when they are registered (`_registered`): one of an earlier agentd may still run.
        """
        config = self._config
        if not config.embedded or config.prestart is None:
            return
        from agentd.template_start import order_first

        self._first_template = order_first(config, run_dir, self._environment())
        if self._first_template is not None:
            self._prestarted = True
            stack.push_async_callback(self._end_template)

    async def _end_template(self) -> None:
        if self._first_template is not None:  # agentd was stopped before its workers' pool took it
            starter, ordered = self._first_template
            await starter.abort(ordered)

    def _open_network(self, stack: contextlib.AsyncExitStack) -> ZmqNetwork:
        from rlinf_actors.net import fault_injection
        from rlinf_actors.net.socket_security import Security
        from rlinf_actors.net.zmq_network import ZmqNetwork

        settings = Settings.load()
        fault_injection.load(settings.faults)
        self._key = own_key(self._config, settings)
        if self._config.key_fd >= 0:
            os.close(self._config.key_fd)
        network = ZmqNetwork(asyncio.get_running_loop(), Security.of(self._key, self._config.insecure))
        stack.callback(network.close)
        return network

    def _start_head(self, network: ZmqNetwork, run_dir: str, stack: contextlib.AsyncExitStack) -> HeadServer | None:
        """Set the endpoint at which this agentd reaches the head. If the configuration says that the head runs in this
        process, start the head and return it; otherwise return None.
        """
        config = self._config
        if not config.head:
            assert config.connect is not None
            given = config.connect.startswith(("ipc://", "tcp://"))
            self._head_endpoint = config.connect if given else endpoint_of(config.connect, "--connect")
            self._head_of_workers = self._head_endpoint
            self._publish_record("node", [self._head_endpoint], stack)
            return None
        from agentd.run_dir import default_run_dir
        from rlinf_actors.head import state_place
        from rlinf_actors.head.server import HeadServer
        from rlinf_actors.head.shell_files import open_files
        from rlinf_actors.head.store import own_keys

        usual = run_dir == os.path.abspath(default_run_dir(os.environ))
        state_dir = None
        if not config.embedded:
            chosen = config.state_dir
            state_dir = state_place.named(chosen) if chosen else state_place.of_agentd(run_dir, usual, os.environ)
        files = open_files(state_dir, notify_of(config), os.environ)
        head = HeadServer(
            network,
            timing=head_timing(config),
            embedded=config.embedded,
            store=files.store,
            events=files.events,
            hooks=files.hooks,
            audit=files.audit,
            own=own_keys(self._key, Settings.load()),
            on_end=self._end_cluster,
        )
        stack.callback(self._close_head, head)
        endpoints = [f"ipc://{run_dir}/head"]
        Path(run_dir, "head").unlink(missing_ok=True)  # of a killed head; the directory's lock is ours
        if config.listen is not None:
            endpoints.append(endpoint_of(config.listen, "--listen"))
        bound = head.start(endpoints)
        self._head_endpoint, self._head_of_workers = bound[0], bound[-1]
        self._publish_record("private" if config.embedded else "head", bound, stack)
        return head

    def _close_head(self, head: HeadServer) -> None:
        ended = "the cluster was stopped" if self._config.embedded else self._cluster_ended
        reason = ended or f"the head was stopped ({self._stopped_by or 'SIGUSR1'})"
        head.close(reason, restarting=not ended)  # then drivers and agents wait for the next head

    def _publish_record(self, kind: str, endpoints: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        """Write a record on this machine, by which `rlinf-actors estop` and other commands find the head at
        *endpoints*. *kind* is "head", "private" (the head of a private cluster) or "node" (an agentd whose head is
        elsewhere). The record is removed when *stack* closes.
        """
        from rlinf_actors.net import head_records

        config, key = self._config, self._key
        pid = config.owner_pid if config.embedded and config.owner_pid is not None else os.getpid()
        record = head_records.HeadRecord(
            kind,
            pid,
            time.time(),
            list(endpoints),
            head_records.script_of(pid),
            key.path if key is not None else "",
            key.server if key is not None else "",
            config.insecure,
        )
        stack.callback(head_records.publish(record, Settings.load(), self._unit.run_dir))

    async def _probe(self) -> tuple[ProbeReport, Described | None]:
        from agentd.node_report import read_described, without_devices

        if self._config.described is not None:
            return without_devices(), read_described(self._config.described)
        from rlinf_actors.hardware.probe import run_probe

        return await run_probe(timeout_s=self._config.probe_timeout_s, env=self._environment()), None

    async def _find_facts(
        self, probing: asyncio.Task[tuple[ProbeReport, Described | None]]
    ) -> tuple[ProbeReport, Described | None, str]:
        """Return what *probing* finds, and the address of the head's machine; "" if the head is in this process.

        The name of that machine is looked up beside the loop, which has to hear of SIGTERM meanwhile.
        """
        host = ""
        if self._head_endpoint.startswith("tcp://"):
            host, port = split_address(self._head_endpoint, "--connect")
            if not self._config.ip:
                from agentd import node_report
                from rlinf_actors.net import host_names

                try:
                    host = str((await host_names.resolve(host, port))[0][4][0])
                except OSError as error:
                    raise node_report.no_route(host, error) from None
        return (*await probing, host)

    # --- serving ---

    async def _serve(
        self,
        network: ZmqNetwork,
        run_dir: str,
        head: HeadServer | None,
        probe: ProbeReport,
        described: Described | None,
        head_host: str,
    ) -> int:
        from agentd import node_report
        from agentd.adoption import take_inventory
        from agentd.launch_plan import Rules, allowed_interpreters
        from agentd.node_state import Policy
        from agentd.session import Session
        from agentd.users import Users
        from rlinf_actors.security import keyfile

        config = self._config
        listen = split_address(config.listen, "--listen")[0] if config.listen else ""
        ip = node_report.address(config, listen, head_host)
        self._node_id = node_report.node_id(config, run_dir, self._key.node if self._key is not None else "")
        self._node_report = lambda config: node_report.report(
            named(config, self._key), probe, described, ip, self._node_id, self._inherited
        )
        report = self._node_report(config)
        self.status.hardware = node_report.summary(report)
        self._described_env = dict(described.env_vars) if described is not None else {}
        for fault in report.faults:
            log.warning("hardware: %s", fault)
        log_dir = config.log_dir or default_log_dir(config, run_dir, os.environ)
        users = Users(config, run_dir, log_dir, in_unit=bool(self._unit.keeper))
        survivors = None if config.embedded else await take_inventory(run_dir, self._keeps, users)
        if self._handing_over:
            return SUCCESS
        rules = Rules(report.hostname, "", allowed=allowed_interpreters(config, report, self._environment()))
        queries = node_report.HardwareQueries(
            rules,
            f"{run_dir}/pkg",
            self._environment,
            described=described is not None,
            users=users,
            admit=lambda: launch_rules(self._config),
        )
        session = Session(
            network,
            self._head_endpoint,
            report,
            is_head=head is not None,
            keeps=self._keeps,
            user=keyfile.user(),
            secret=self._run_dir.secret() if self._run_dir is not None and not config.embedded else "",
            query_hardware=queries.query,
            policy=Policy(config.head_grace_s, config.stop_grace_s),
            on_registered=lambda: self._registered(head),
            on_status=self.status.ready,
        )
        workers = self._make_workers(run_dir, report, session, survivors, users)
        session.attach(workers)
        if survivors is not None:
            adopted = workers.adopt(survivors.templates, survivors.workers)
            session.adopt(adopted, survivors.lost, survivors.since)
        self._session, self._workers = session, workers
        if self._stopping.is_set():
            asyncio.get_running_loop().call_soon(self._stop, "stopped while it was starting")
        gc.freeze()  # what was made until now lives as long as this process
        gc.enable()
        end = await session.run()
        if self._handing_over:
            workers.abandon()
        self.status.ending(end.text)
        if end.code != SUCCESS:
            await workers.close(0.0, end.text)  # the head refused this node: no agentd comes for them
            log.error("%s", end.text)
            self.status.failed(end.code, end.text)
        return STOPPED if self._cluster_ended and not config.embedded and end.code == SUCCESS else end.code

    def _make_workers(
        self, run_dir: str, report: NodeReport, session: Session, survivors: Survivors | None, users: Users
    ) -> Workers:
        from agentd.health import HealthTimes
        from agentd.launch_plan import make_site
        from agentd.log_retention import Limits
        from agentd.workers import Workers

        config = self._config
        site = make_site(
            config,
            run_dir,
            report,
            self._environment,
            head=self._head_of_workers if users.is_used else self._head_endpoint,
            head_key=self._key.server if self._key is not None else "",
            keeps=self._keeps,
            keeper=self._unit.keeper,
            users=users,
        )
        (starter, ordered), self._first_template = self._first_template or (None, None), None
        workers = Workers(
            asyncio.get_running_loop(),
            site,
            session.report,
            ledger=survivors.ledger if survivors is not None else None,
            health=HealthTimes(config.probe_s, config.unresponsive_s, config.long_call_s),
            logs_deaths=not config.head,  # the head logs them here too
            starter=starter,
            ordered=ordered,
        )
        workers.admit(launch_rules(config))
        workers.log_retention.begin(Limits.of(config))
        return workers

    def _environment(self) -> dict[str, str]:
        return {**self._inherited, **self._described_env, **self._config.env}

    def _registered(self, head: HeadServer | None) -> None:
        where = ", ".join(head.endpoints) if head is not None else self._head_endpoint
        log.info("node %s is registered; head: %s", self._node_id, where)
        self.status.ready(f"registered; head: {where}")
        self.status.registered(head.endpoints[-1] if head is not None else self._head_endpoint, self._node_id)
        if self._config.prestart is not None and self._workers is not None and not self._prestarted:
            self._prestarted = True
            try:
                self._workers.prestart(self._config.prestart)
            except OSError as error:  # the first launch tries again, and reports it
                log.warning("no template was started ahead of need: %s", error)

    # --- signals ---

    def _stop(self, reason: str) -> None:
        if self._handing_over:  # `systemctl restart` sends SIGTERM after SIGUSR1
            return
        self._stopping.set()
        self._stopped_by = self._stopped_by or reason
        if self._run_dir is not None and not self._config.embedded:
            self._run_dir.mark_stopping()
        self.status.ending(f"stopping: {reason}")
        if self._session is not None:
            self._session.stop(reason, 0.0 if self._orphaned else None)

    def _end_cluster(self, reason: str) -> None:
        self._cluster_ended = reason
        self._stop(reason)

    def _owner_ended(self) -> None:
        self._orphaned = True
        self._stop("its `rlinf-actors run` ended" if self._config.of_run else "the driver ended")

    def _hand_over(self) -> None:
        """Handle SIGUSR1: end agentd, and leave its workers without robots running for the next agentd. If the workers
        cannot outlive this agentd, only log an error.
        """
        if not self._keeps:
            why = "it belongs to a driver" if self._config.embedded else "workers.keep is false"
            log.error("SIGUSR1 cannot end this agentd and keep its workers: %s", why)
            return
        self._handing_over = True
        self._stopping.set()
        self.status.ending("handing over: workers go on for the next agentd")
        log.info("handing over: workers without robots go on for the next agentd")
        if self._session is not None:
            self._session.hand_over("SIGUSR1")

    def _reload(self) -> None:
        """Handle SIGHUP: read the configuration again, apply the changes that can be applied now, and log those that
        need a restart.
        """
        self.status.reloading()
        try:
            changes = reload(self._config, load(self._arguments, self._environ))
        except ConfigError as error:
            log.error("the configuration stays as it was: %s", error)
            self.status.reloaded(f"the configuration stays as it was: {error}")
            return
        needed = f"a restart is needed for: {', '.join(changes.restart)}" if changes.restart else ""
        if needed:
            log.warning("%s", needed)
        self._config = changes.config
        if self._workers is not None:
            from agentd.log_retention import Limits

            self._workers.admit(launch_rules(self._config))
            self._workers.log_retention.change(Limits.of(self._config))
        if self._session is not None and self._node_report is not None:
            self._session.describe(self._node_report(self._config), self._config.stop_grace_s)
        log.info("configuration read again; taken over: %s", ", ".join(changes.applied) or "nothing")
        self.status.reloaded(needed)
