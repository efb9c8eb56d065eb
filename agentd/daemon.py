"""One agentd from its start to its end: probe, head, session, children, signals, owner.

How this agentd is, for those who wait for it: the service manager, and the driver that started it.

The process that owns this agentd: a driver, whose end is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentd.config import Config, load, named, own_key, take_over
from agentd.run_dir import inherited
from rlinf_actors import procfs
from rlinf_actors.errors import ConfigError, ProtocolMismatchError, RlinfActorsError
from rlinf_actors.net.daemon import on_stop_signals
from rlinf_actors.net.host import endpoint_of, pid_start, split_address
from rlinf_actors.net.loop import Tasks
from rlinf_actors.settings import Unit
from rlinf_actors.systemd.service_manager import Manager

if TYPE_CHECKING:
    from agentd.adoption import Survivors
    from agentd.node_report import Described, Looker
    from agentd.run_dir import RunDir
    from agentd.session import Session
    from agentd.state_events import Report
    from agentd.workers import Workers
    from rlinf_actors.hardware.probe_report import ProbeReport
    from rlinf_actors.head.server import HeadServer
    from rlinf_actors.net.zmq_network import ZmqNetwork
    from rlinf_actors.security.keyfile import KeyFile
    from rlinf_actors.wire.values import NodeReport


class Standing:
    """Tells both. Loop thread only.

    Args:
        manager: the service manager; one without an address where a driver owns this process.
        ready_fd: inherited pipe to the driver, which gets one line, once; -1 without.
    """

    def __init__(self, manager: Manager, ready_fd: int) -> None:
        self._manager = manager
        self._ready_fd = ready_fd
        self._hardware = ""
        self._text = "starting"
        self._ends = False

    def has(self, hardware: str) -> None:
        """What this node has, for people; said with everything that follows."""
        self._hardware = hardware

    def up(self, text: str) -> None:
        """The head was tried. For the service manager we are up then: it may be down when this machine boots."""
        if not self._ends:
            self._text = f"{text}; {self._hardware}"
            self._manager.ready(self._text)

    def registered(self, head: str, node_id: str) -> None:
        """The head took this node: the driver may come."""
        self._tell_driver({"head": head, "node_id": node_id})

    def reloading(self) -> None:
        """The configuration is read again."""
        self._manager.reloading("reading the configuration again")

    def reloaded(self, trouble: str = "") -> None:
        """That is over, also if nothing came of it."""
        self._manager.reloaded(f"{trouble}; {self._text}" if trouble else self._text)

    def ending(self, text: str) -> None:
        """It ends. Twice is fine."""
        self._ends = True
        self._manager.stopping(text)

    def failed(self, code: int, text: str) -> None:
        """It ends because of an error; a driver that was told already is told nothing more."""
        self._manager.status(text)
        self._tell_driver({"error": text, "code": code})

    def _tell_driver(self, line: Mapping[str, object]) -> None:
        if self._ready_fd < 0:
            return
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(self._ready_fd, json.dumps(line).encode() + b"\n")
        os.close(self._ready_fd)
        self._ready_fd = -1


log = logging.getLogger(__name__)

OK, FOR_GOOD = 0, 3


class Daemon:
    """The process. `run` once, on the main thread.

    Args:
        config: what to do.
        arguments: what it was made of; read again on SIGHUP.
    """

    def __init__(self, config: Config, arguments: Mapping[str, object]) -> None:
        self._config = config
        self._arguments = arguments
        unit = Unit() if config.embedded else Unit.load()  # a driver's unit is none of ours
        self._unit_keeper = unit.keeper
        self._manager = Manager(unit.notify_socket, unit.watchdog_s)
        self.standing = Standing(self._manager, config.ready_fd)
        self._environ = dict(os.environ)
        self._started_with = inherited(self._environ)
        self._run_dir: RunDir | None = None
        self._session: Session | None = None
        self._keeper: Workers | None = None
        self._tasks = Tasks()
        self._prestarting: asyncio.Task[None] | None = None
        self._node: Callable[[Config], NodeReport] | None = None
        self._head_endpoint = ""
        self._key: KeyFile | None = None
        self._node_id = ""
        self._stopping = asyncio.Event()
        self._orphaned = False
        self._ended = ""
        self._handing_over = False
        self._described_env: dict[str, str] = {}

    async def run(self) -> int:
        """Serve until the end; returns the exit code.

        Raises:
            ConfigError: something is configured that cannot be.
            OSError: an address is in use, a directory cannot be made.
        """
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            if self._config.owner_pid is not None:
                watch(self._config.owner_pid, self._config.owner_start, self._owner_ended, stack)
            watchdog = self._manager.watch(loop)
            if watchdog is not None:
                stack.callback(watchdog.close)
            stack.callback(self._tasks.cancel)
            probing = self._tasks.start(self._probe(), "probing the hardware", expected=Exception)
            await asyncio.sleep(0)  # its processes start now; what follows loads modules meanwhile
            run_dir = self._open_run_dir(stack)
            on_stop_signals(loop, self._stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            loop.add_signal_handler(signal.SIGUSR1, self._hand_over)
            network = self._open_network(stack)
            head = self._start_head(network, run_dir, stack)
            stopped = self._tasks.start(self._stopping.wait(), "waiting for the end")
            await asyncio.wait((probing, stopped), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # a signal that came in this turn is acted on in the next, see above
            if self._stopping.is_set():  # not stopped.done(): that task is one turn of the loop behind the signal
                if not self._handing_over and not self._config.embedded:
                    await self._take_inventory(run_dir, False)
                return OK
            return await self._serve(network, run_dir, head, *probing.result())

    # --- setting up ---

    def _open_run_dir(self, stack: contextlib.AsyncExitStack) -> str:
        from agentd.run_dir import RunDir
        from rlinf_actors import procfs

        procfs.set_subreaper()  # what a killed template leaves behind comes to us
        self._run_dir = directory = RunDir.open(self._config.run_dir, os.environ)
        stack.callback(self._close_run_dir, directory)
        directory.begin()
        return directory.path

    def _close_run_dir(self, directory: RunDir) -> None:
        self._run_dir = None
        directory.close()
        if self._orphaned:  # else its driver keeps the logs if something failed, and removes it
            from rlinf_actors.kept_logs import keep
            from rlinf_actors.settings import Settings

            parent = Settings.load().kept_logs
            if self._config.embedded and parent is not None:
                with contextlib.suppress(OSError):  # the driver is gone: there is no one to report it to
                    keep(directory.path, parent)
            shutil.rmtree(directory.path, ignore_errors=True)

    def _open_network(self, stack: contextlib.AsyncExitStack) -> ZmqNetwork:
        from rlinf_actors.net import fault_injection
        from rlinf_actors.net.socket_security import Security
        from rlinf_actors.net.zmq_network import ZmqNetwork
        from rlinf_actors.settings import Settings

        settings = Settings.load()
        fault_injection.load(settings.faults)
        self._key = own_key(self._config, settings)
        network = ZmqNetwork(asyncio.get_running_loop(), Security.of(self._key, self._config.insecure))
        stack.callback(network.close)
        return network

    def _start_head(self, network: ZmqNetwork, run_dir: str, stack: contextlib.AsyncExitStack) -> HeadServer | None:
        """Listen if the head is ours; sets the endpoint of the head in any case."""
        config = self._config
        if not config.head:
            assert config.connect is not None
            given = config.connect.startswith(("ipc://", "tcp://"))
            self._head_endpoint = config.connect if given else endpoint_of(config.connect, "--connect")
            self._leave_record("node", [self._head_endpoint], stack)
            return None
        from rlinf_actors.head.commands import Timing
        from rlinf_actors.head.server import HeadServer
        from rlinf_actors.head.store import HeadStore, own_keys
        from rlinf_actors.settings import Settings
        from rlinf_actors.wire.template_protocol import ROBOT_END_S

        timing = Timing(
            beat_s=config.beat_s,
            lease_s=config.lease_s,
            robot_lease_s=min(config.robot_lease_s, config.lease_s),
            # a private head is never a restarted one: nobody but its driver knows it
            robot_settle_s=0.0 if config.embedded else min(config.robot_lease_s, config.lease_s) + ROBOT_END_S,
            head_grace_s=config.head_grace_s,
            rank_hold_s=max(config.lease_s, config.head_grace_s),
        )
        store = None if config.embedded else HeadStore(config.state_dir or run_dir)
        keys = own_keys(self._key, Settings.load())
        head = HeadServer(
            network, timing=timing, embedded=config.embedded, store=store, own=keys, on_end=self._end_cluster
        )
        stack.callback(self._close_head, head)
        endpoints = [f"ipc://{run_dir}/head"]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{run_dir}/head")  # of one that was killed; the directory's lock is ours
        if config.listen is not None:
            endpoints.append(endpoint_of(config.listen, "--listen"))
        bound = head.start(endpoints)
        self._head_endpoint = bound[0]
        self._leave_record("private" if config.embedded else "head", bound, stack)
        return head

    def _leave_record(self, kind: str, endpoints: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        """Have `rlinf-actors`, and an emergency stop above all, find this head, or the head that this node joins."""
        from rlinf_actors.net import head_records
        from rlinf_actors.settings import Settings

        config = self._config
        pid = config.owner_pid if config.embedded and config.owner_pid is not None else os.getpid()
        record = head_records.HeadRecord(
            kind,
            pid,
            time.time(),
            list(endpoints),
            head_records.script_of(pid),
            self._key.path if self._key is not None else "",
            self._key.server if self._key is not None else "",
            config.insecure,
        )
        unit = Unit() if config.embedded else Unit.load()
        stack.callback(head_records.publish(record, Settings.load(), unit.run_dir))

    async def _probe(self) -> tuple[ProbeReport, Described | None]:
        from agentd.node_report import read_described, without_devices

        if self._config.described is not None:
            return without_devices(), read_described(self._config.described)
        from rlinf_actors.hardware.probe import run_probe

        return await run_probe(timeout_s=self._config.probe_timeout_s, env=self._environment()), None

    # --- serving ---

    async def _serve(
        self,
        network: ZmqNetwork,
        run_dir: str,
        head: HeadServer | None,
        probe: ProbeReport,
        described: Described | None,
    ) -> int:
        from agentd import node_report
        from agentd.node_state import Policy
        from agentd.session import Session

        config = self._config
        listen = split_address(config.listen, "--listen")[0] if config.listen else ""
        remote = self._head_endpoint.startswith("tcp://")
        ip = node_report.address(config, listen, split_address(self._head_endpoint, "--connect")[0] if remote else "")
        self._node_id = node_report.node_id(config, run_dir)
        self._node = lambda config: node_report.report(
            named(config, self._key), probe, described, ip, self._node_id, self._started_with
        )
        report = self._node(config)
        self.standing.has(node_report.summary(report))
        self._described_env = dict(described.env_vars) if described is not None else {}
        for fault in report.faults:
            log.warning("hardware: %s", fault)
        if self._keeps and head is None:
            await self._ask_before_ending(network, run_dir)
        survivors = None if config.embedded else await self._take_inventory(run_dir, self._keeps)
        if self._handing_over:
            return OK
        self._session = Session(
            network,
            self._head_endpoint,
            report,
            is_head=head is not None,
            keeps=self._keeps,
            query_hardware=self._looker(run_dir, report, described is not None).look,
            policy=Policy(config.head_grace_s, config.stop_grace_s),
            on_registered=lambda: self._registered(head),
            on_status=self.standing.up,
        )
        self._session.attach(self._children(run_dir, report, self._session.report, survivors))
        if survivors is not None and self._keeper is not None:
            self._session.adopt(self._keeper.adopt(survivors), survivors.lost, survivors.since)
        if self._stopping.is_set():
            asyncio.get_running_loop().call_soon(self._stop, "stopped while it was starting")
        end = await self._session.run()
        if self._handing_over and self._keeper is not None:
            self._keeper.abandon()
        self.standing.ending(end.text)
        if end.code != OK:
            if self._keeper is not None:
                await self._keeper.close(0.0, end.text)  # refused: no agentd comes for them
            log.error("%s", end.text)
            self.standing.failed(end.code, end.text)
        return FOR_GOOD if self._ended and not config.embedded and end.code == OK else end.code

    def _looker(self, run_dir: str, report: NodeReport, described: bool) -> Looker:
        from agentd.launch_plan import Rules, allowed_interpreters
        from agentd.node_report import Looker

        rules = Rules(report.hostname, "", allowed=allowed_interpreters(self._config, report))
        return Looker(rules, f"{run_dir}/pkg", self._environment, described=described)

    @property
    def _keeps(self) -> bool:
        """Whether workers may go on without this process: a private cluster's agentd is never started again."""
        return self._config.keep and not self._config.embedded

    async def _ask_before_ending(self, network: ZmqNetwork, run_dir: str) -> None:
        """Find out whether the head serves this agentd, if taking stock would end workers of another version.

        Raises:
            ProtocolMismatchError: it does not. The workers go on as without an agentd: for one of their own version.
        """
        from agentd.adoption import unspoken
        from agentd.session import why_not_served

        if not unspoken(run_dir):
            return
        refused = await why_not_served(network, self._head_endpoint)
        if refused:
            raise ProtocolMismatchError(f"{refused}. Workers of the version before go on for a lease: none was ended")

    async def _take_inventory(self, run_dir: str, keep: bool) -> Survivors:
        from agentd.adoption import take_inventory

        return await take_inventory(run_dir, keep)

    def _children(
        self, run_dir: str, report: NodeReport, reported: Callable[[Report], None], survivors: Survivors | None
    ) -> Workers:
        from agentd.health import HealthTimes
        from agentd.launch_plan import site
        from agentd.workers import Workers

        config = self._config
        where = site(
            config,
            run_dir,
            report,
            self._environment,
            head=self._head_endpoint,
            head_key=self._key.server if self._key is not None else "",
            keeps=self._keeps,
            keeper=self._unit_keeper,
        )
        ledger = survivors.ledger if survivors is not None else None
        times = HealthTimes(config.probe_s, config.unresponsive_s, config.long_call_s)
        self._keeper = Workers(
            asyncio.get_running_loop(),
            where,
            reported,
            ledger=ledger,
            health=times,
            says_deaths=not config.head,  # the head says them in this very log
        )
        return self._keeper

    def _environment(self) -> dict[str, str]:
        """What this node gives its workers: what agentd was started with, and what is configured."""
        return {**self._started_with, **self._described_env, **self._config.env}

    def _registered(self, head: HeadServer | None) -> None:
        where = ", ".join(head.endpoints) if head is not None else self._head_endpoint
        log.info("node %s is registered; head: %s", self._node_id, where)
        self.standing.up(f"registered; head: {where}")
        self.standing.registered(head.endpoints[-1] if head is not None else self._head_endpoint, self._node_id)
        if self._config.prestart is not None and self._keeper is not None and self._prestarting is None:
            prestart = self._keeper.prestart(self._config.prestart)
            self._prestarting = self._tasks.start(prestart, "starting a template ahead", expected=Exception)
            self._prestarting.add_done_callback(_log_failure)

    # --- the end, and changes ---

    def _close_head(self, head: HeadServer) -> None:
        """Drivers and agents wait for a head that was not stopped for good."""
        if self._config.embedded:
            head.close("the cluster was stopped")
        else:
            head.close(self._ended or "the head is being restarted", restarting=not self._ended)

    def _end_cluster(self, reason: str) -> None:
        """The head was told to end for good; its groups have ended."""
        self._ended = reason
        self._stop(reason)

    def _owner_ended(self) -> None:
        self._orphaned = True
        self._stop("the driver ended")

    def _stop(self, reason: str) -> None:
        if self._handing_over:  # `systemctl restart` sends SIGTERM after SIGUSR1
            return
        self._stopping.set()
        if self._run_dir is not None and not self._config.embedded:
            self._run_dir.stop_asked()
        self.standing.ending(f"stopping: {reason}")
        if self._session is not None:
            self._session.stop(reason, 0.0 if self._orphaned else None)

    def _hand_over(self) -> None:
        """SIGUSR1: end, and leave the workers to the next agentd."""
        if not self._keeps:
            why = "it belongs to a driver" if self._config.embedded else "workers.keep is false"
            log.error("SIGUSR1 would end this agentd and keep its workers, which cannot be: %s", why)
            return
        self._handing_over = True
        self._stopping.set()
        self.standing.ending("handing over: workers go on for the next agentd")
        log.info("handing over: workers without robots go on for the next agentd")
        if self._session is not None:
            self._session.hand_over("SIGUSR1")

    def _reload(self) -> None:
        """SIGHUP: read the configuration again; what needs a restart is named and stays."""
        self.standing.reloading()
        try:
            changes = take_over(self._config, load(self._arguments, self._environ))
        except ConfigError as error:
            log.error("the configuration stays as it was: %s", error)
            self.standing.reloaded(f"the configuration stays as it was: {error}")
            return
        needed = f"a restart is needed for: {', '.join(changes.restart)}" if changes.restart else ""
        if needed:
            log.warning("%s", needed)
        self._config = changes.config
        if self._session is not None and self._node is not None:
            self._session.describe(self._node(self._config), self._config.stop_grace_s)
        log.info("configuration read again; taken over: %s", ", ".join(changes.applied) or "nothing")
        self.standing.reloaded(needed)


def _log_failure(task: asyncio.Task[None]) -> None:
    """A template that cannot be started ahead of need is tried again by the first launch, which reports it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no template was started ahead: %s", error)


def watch(pid: int, started: int, ended: Callable[[], None], stack: contextlib.AsyncExitStack) -> None:
    """Call *ended* once, from the running loop, when the process ends; not after *stack* is closed.

    Args:
        pid: its.
        started: when it began, in clock ticks since boot, so that nobody is mistaken for it; 0 if unknown.
        ended: see above.
        stack: ends the watch.

    Raises:
        RlinfActorsError: it is gone already.
    """
    loop = asyncio.get_running_loop()
    try:
        owner = procfs.pidfd_of(pid)
    except ProcessLookupError:
        raise RlinfActorsError(f"the owner, process {pid}, is gone already") from None
    stack.callback(os.close, owner)
    if started not in (0, pid_start(pid)):
        raise RlinfActorsError(f"the owner, process {pid}, is gone already; its pid is another's now")

    def gone() -> None:
        loop.remove_reader(owner)
        ended()

    loop.add_reader(owner, gone)
    stack.callback(loop.remove_reader, owner)
