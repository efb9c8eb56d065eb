"""The session of one agentd with its head: connection, timers and tasks around agentd's pure state (node_state).

The session passes events to the state: messages of the head, reports of workers, deadlines, ends of watched client
processes. It carries out the commands that the state returns. The daemon runs it on the event loop. Code here must not
block and must not decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agentd import node_state as s
from agentd import state_events as e
from agentd.worker_table import fitted
from rlinf_actors import procfs, version
from rlinf_actors.errors import ClusterTimeoutError, ProtocolError, RlinfActorsError
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.net import holders
from rlinf_actors.net.daemon import CoreShell
from rlinf_actors.net.link import Network, Reachability, secret_identity
from rlinf_actors.net.loop import Tasks
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.wire.agent_messages import (
    AgentHello,
    FlushLogs,
    HardwareFound,
    LookForHardware,
    StartWorkers,
    StopLooking,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
)
from rlinf_actors.wire.check_values import CheckQuestion
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.figure_values import FigureQuestion
from rlinf_actors.wire.launch_rules import Launcher
from rlinf_actors.wire.log_values import LogQuestion
from rlinf_actors.wire.node_questions import AgentAnswered, AskAgent, NodeAnswer
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.stack_values import StackQuestion
from rlinf_actors.wire.template_protocol import NodeRegistered
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSwitch
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion, NodeReport, RunningWorker

if TYPE_CHECKING:
    from agentd.workers import Workers

log = logging.getLogger(__name__)


class Session:
    """One agentd's session with the head: registers this node, sends beats, and carries out the head's orders. Loop
    thread only.

    Call `attach` first, then `adopt` if an earlier agentd left workers, then `run`.

    Args:
        report: description of this node for the head.
        is_head: True if the head runs in this process.
        keeps: True if workers outlive this agentd. They then wait for the next agentd of this node, for head_grace_s if
            *is_head*, otherwise for the node's lease, after which the head counts the node as lost.
        user: the user as whom this agentd runs.
        secret: the secret of its run directory, "" for none.
        query_hardware: enumerates hardware for a client of a driver; cancelled when that client no longer waits.
        on_registered: called each time the head has registered this node.
        on_status: called with a line for people when the session's state changes.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        report: NodeReport,
        *,
        is_head: bool = False,
        keeps: bool = False,
        user: str = "",
        secret: str = "",
        query_hardware: Callable[[HardwareQuestion, Launcher], Awaitable[HardwareAnswer]] | None = None,
        policy: s.Policy | None = None,
        on_registered: Callable[[], None] = lambda: None,
        on_status: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._network = network
        self._endpoint = endpoint
        self._report = report
        self._is_head = is_head
        self._keeps = keeps
        self._user = user
        self._secret = secret
        self._query_hardware = query_hardware
        self._on_registered = on_registered
        self._on_status = on_status
        self._workers: Workers
        self._state = s.AgentState(lambda: uuid.uuid4().hex, random.random, policy or s.Policy())
        self._shell = CoreShell[e.Event, e.Command](
            self._loop, "agentd", self._state.handle, self._state.next_deadline, self._carry_out,
            tick=e.Tick(), stalled=e.Stalled,
        )  # fmt: skip
        self._client: ControlClient | None = None
        self.identity = b""  # of the present connection, at the head
        self._hello: asyncio.Task[None] | None = None
        self._was_registered = False
        self._lost: dict[str, str] = {}
        self._queries: dict[str, asyncio.Task[None]] = {}
        self._traces = deque[tuple[TraceQuestion, Callable[[NodeAnswer], None]]]()
        self._trace_turn: asyncio.Handle | None = None  # of the next answer
        self._watched: dict[str, int] = {}  # pidfds of client processes, by incarnation
        self._watch_retries: dict[str, asyncio.TimerHandle] = {}
        self._tasks = Tasks(self._loop)
        self._done: asyncio.Future[e.EndAgent] = self._loop.create_future()

    def attach(self, workers: Workers) -> None:
        """Set *workers*, which starts and stops the workers of this node on orders of the session, and which calls
        `report` with messages for the head.
        """
        self._workers = workers

    def adopt(self, workers: list[RunningWorker], lost: dict[str, str], since: float) -> None:
        """Enter the workers of an earlier agentd into the session's state. Call this before `run`, with what
        `Workers.adopt` returned.

        Args:
            workers: running workers, and ended workers whose exit reports the head may not have.
            lost: for each worker that was ended instead, its id and the reason; the first hello reports them.
            since: when the last registered agentd of this node ended, in seconds of the loop's clock; 0 if unknown.
        """
        self._lost = lost
        self._shell.handle(e.WorkersAdopted(workers, since))

    async def run(self) -> e.EndAgent:
        """Register this node with the head and serve the head until agentd must end. Return agentd's exit code and the
        reason.

        Cancelling closes the session and leaves the workers running.
        """
        try:
            self._shell.handle(e.StartSession())
            return await self._done
        finally:
            self._close()

    def report(self, report: e.Report) -> None:
        self._shell.handle(e.WorkersReported(report))

    def stop(self, reason: str, grace_s: float | None = None) -> None:
        """End all workers, say goodbye to the head, and let `run` return. A second call can shorten the grace.

        *grace_s* is the time between SIGTERM and SIGKILL; None stands for `Policy.stop_grace_s`.
        """
        self._shell.handle(e.StopAgent(reason, grace_s))

    def hand_over(self, reason: str) -> None:
        """Let `run` return without a message to the head. The workers run on for the next agentd."""
        self._shell.handle(e.HandOver(reason))

    def describe(self, report: NodeReport, stop_grace_s: float) -> None:
        """Set a new description of this node, and the grace of the next stop. A hello tells the head at once."""
        changed, self._report = report != self._report, report
        if changed:
            self._shell.handle(e.NodeDescribed())
        self._state.policy.stop_grace_s = stop_grace_s

    # --- commands ---

    def _carry_out(self, command: e.Command) -> None:
        workers = self._workers
        if isinstance(command, e.SendNotice):
            self._notify(command.body)
        elif isinstance(command, e.SayHello):
            if self._hello is not None:
                self._hello.cancel()  # of an incarnation that is over: its failure must not count for this one
            self._hello = self._spawn(self._say_hello(command), "hello")
        elif isinstance(command, StartWorkers):
            workers.start(command)
        elif isinstance(command, e.RecordOwner):
            workers.record_owner(command.order)
        elif isinstance(command, StopWorkers):
            workers.stop(command.ids, command.grace_s, command.reason)
        elif isinstance(command, e.RenewLeases):
            workers.renew(command.until, command.lease_s)
        elif isinstance(command, e.EndsAcknowledged):
            workers.acknowledged(command.ids)
        elif isinstance(command, e.CloseWorkers):
            self._spawn(self._close_workers(command), "close workers")
        elif isinstance(command, e.CreditLogs):
            workers.credit_logs(command.chars, command.owner)
        elif isinstance(command, FlushLogs):
            workers.flush_logs(command.owner, command.wait_s)
        elif isinstance(command, Watch):
            if command.incarnation not in self._watched and command.incarnation not in self._watch_retries:
                self._watch(command)
        elif isinstance(command, Unwatch):
            self._unwatch(command.incarnation)
        elif isinstance(command, LookForHardware):
            self._start_query(command)
        elif isinstance(command, AskAgent):
            self._answer(command)
        elif isinstance(command, StopLooking):
            if command.id in self._queries:
                self._queries[command.id].cancel()
            else:
                workers.log_reader.cancel(command.id)
        elif isinstance(command, e.CheckHead):
            self._spawn(self._check_head(command.timeout_s), "check the head's machine")
        elif isinstance(command, e.LogStatus):
            level = logging.ERROR if command.urgent else logging.WARNING if command.warns else logging.INFO
            log.log(level, "%s", command.text)
            self._on_status(command.text)
        elif isinstance(command, e.Registration):
            workers.acknowledged(list(self._lost))
            self._lost, self._was_registered = {}, True
            keep_s = self._state.policy.head_grace_s if self._is_head else command.lease_s
            workers.registered(keep_s, NodeRegistered(command.epoch, command.again))
            self._on_registered()
        elif not self._done.done():
            self._done.set_result(command)
            self._shell.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.start(work, name, expected=Exception)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._done.done():
            self._done.set_exception(error)
            self._shell.close()

    async def _say_hello(self, command: e.SayHello) -> None:
        if command.delay_s:
            await asyncio.sleep(command.delay_s)
        if command.anew and self._client is not None:
            self._client.close()
            self._client = None
        if self._client is None:
            # Each connection has its own. The one before it may come to the head after it, if both are made while the
            # head starts. With an equal identity it would take the place of this one, which libzmq then reads no more.
            self.identity = secret_identity(f"agent:{command.incarnation}")
            try:
                self._client = ControlClient(
                    self._network,
                    self._endpoint,
                    self.identity,
                    lambda body: self._shell.handle(e.HeadNotice(body)),
                    lambda: self._shell.handle(e.ConnectionLost()),
                    explains=not self._was_registered,
                )
            except OSError as error:
                if not command.anew:
                    raise  # at the start of agentd, where a person sees it at once
                # later a lack of descriptors counts as an absent head: workers depend on this process
                text = f"no connection to the head at {self._endpoint} can be made: {error.strerror or error}"
                self._hello = None
                self._shell.handle(e.HelloFailed(ClusterTimeoutError(text)))
                return
        workers, shortened = fitted(self._state.listed_workers())
        if shortened:
            text = "workers of %s are described to the head without their long environments, and are not restarted"
            log.warning(text, ", ".join(map(repr, shortened)))
        hello = AgentHello(
            PROTOCOL,
            version.VERSION,
            command.incarnation,
            self._report,
            self._is_head,
            workers,
            self._keeps,
            self._lost,
            list(self._watched),
            self._user,
            self._secret,
            os.getpid(),
            holders.program_of(os.getpid()),
        )
        event: e.Event
        try:
            waiting = lambda text: self._shell.handle(e.HelloWaits(text))  # noqa: E731
            answer = await self._client.request(hello, command.timeout_s, on_waiting=waiting)
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"the head answered a hello with {type(answer).__name__}")
            event = e.Welcomed(answer)
        except RlinfActorsError as error:
            event = e.HelloFailed(error)
        self._hello = None
        self._shell.handle(event)

    async def _close_workers(self, command: e.CloseWorkers) -> None:
        await self._workers.close(command.grace_s, command.reason)
        self._shell.handle(e.WorkersClosed())

    async def _check_head(self, timeout_s: float) -> None:
        reachability = await self._network.check_reachability(self._endpoint, timeout_s)
        stands = self._client is not None and self._client.stands()
        self._shell.handle(e.HeadChecked(reachability is not Reachability.SILENT, stands))

    def _send_trace(self) -> None:
        """Answer one TraceQuestion in each turn of the loop. A job may ask thousands at once, and what the head says
        after them, above all its answers to beats, must not wait for all of them.
        """
        self._trace_turn = None
        if self._traces:
            asked, send = self._traces.popleft()
            send(self._workers.traces.answer(asked, self._state.clock.samples()))
            self._trace_turn = self._loop.call_soon(self._send_trace)

    def _notify(self, body: Body) -> None:
        if self._client is not None:
            self._client.notify(body)

    def _answer(self, order: AskAgent) -> None:
        """Have the part of agentd that knows it answer a question of the head."""
        workers, asked = self._workers, order.question

        def send(answer: NodeAnswer) -> None:
            self._notify(AgentAnswered(order.id, answer))

        if isinstance(asked, LogQuestion):
            workers.log_reader.ask(order.id, asked, send)
        elif isinstance(asked, StackQuestion):
            workers.questions.ask_stacks(asked, send)
        elif isinstance(asked, FigureQuestion):
            workers.figures.ask(asked, send)
        elif isinstance(asked, CheckQuestion):
            workers.checks.ask(asked, send)
        elif isinstance(asked, TraceSwitch):
            workers.traces.switch(asked, send)
        elif isinstance(asked, TraceQuestion):
            self._traces.append((asked, send))
            if self._trace_turn is None:
                self._send_trace()
        else:
            workers.questions.ask_debugger(asked, send)

    # --- hardware queries ---

    def _start_query(self, command: LookForHardware) -> None:
        if command.id in self._queries:  # the head repeats it over a new connection
            return
        query = self._queries[command.id] = self._spawn(self._query(command), f"query {command.question.type}")
        # not in the task itself: a task that is cancelled before its first step runs none of its code
        query.add_done_callback(lambda _: self._queries.pop(command.id, None))

    async def _query(self, command: LookForHardware) -> None:
        try:
            if self._query_hardware is None:
                raise RuntimeError("no hardware can be queried here")
            answer = await self._query_hardware(command.question, command.launcher)
        except Exception as error:  # agentd's state is as before, and the client can be told
            log.exception("the query for %s hardware failed", command.question.type)
            text = f"its agentd cannot look for it ({type(error).__name__}: {error}); its log has more"
            answer = HardwareAnswer(kind="failed", text=text)
        self._shell.handle(e.HardwareAnswered(HardwareFound(command.id, answer)))

    # --- watched client processes ---

    def _watch(self, watch: Watch) -> None:
        """Begin to watch a client process, as the head ordered, by a pidfd. If no file descriptor is free, try again
        after AGAIN_S.
        """
        is_retry = self._watch_retries.pop(watch.incarnation, None) is not None
        fd = -1
        try:
            fd = procfs.open_pidfd(watch.pid, watch.pid_start)
            if fd >= 0:
                self._loop.add_reader(fd, self._process_ended, watch.incarnation)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if not is_retry:
                log.warning("cannot watch process %d of a client yet: %s", watch.pid, explain(error))
            self._watch_retries[watch.incarnation] = self._loop.call_later(AGAIN_S, self._watch, watch)
            return
        if fd < 0:
            self._loop.call_soon(self._process_ended, watch.incarnation)
            return
        self._watched[watch.incarnation] = fd
        if is_retry:
            log.info("process %d of a client is watched now", watch.pid)

    def _process_ended(self, incarnation: str) -> None:
        self._unwatch(incarnation)
        self._shell.handle(e.ProcessEnded(incarnation))

    def _unwatch(self, incarnation: str) -> None:
        if incarnation in self._watch_retries:
            self._watch_retries.pop(incarnation).cancel()
        fd = self._watched.pop(incarnation, -1)
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _close(self) -> None:
        self._shell.close()
        self._traces.clear()
        for incarnation in [*self._watched, *self._watch_retries]:
            self._unwatch(incarnation)
        self._tasks.cancel()
        if self._client is not None:
            self._client.close(linger_ms=200)
