"""The shell around agentd's state: the connection to the head, timers, pidfds, and the children."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from agentd import node_state as s
from agentd import state_events as e
from rlinf_actors import procfs, version
from rlinf_actors.errors import ClusterTimeoutError, ProtocolError, RlinfActorsError
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.net.failure_detection import HELLO_TIMEOUT_S, STALL_S
from rlinf_actors.net.link import Network, Reachability, secret_identity
from rlinf_actors.net.loop import Tasks
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.wire.agent_messages import AgentHello, HardwareFound, StartWorkers, Welcome
from rlinf_actors.wire.client_messages import GetStatus, Status
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL, agreed, spoken, what_to_upgrade
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion, NodeReport, RunningWorker

log = logging.getLogger(__name__)


class WorkerKeeper(Protocol):
    """What the session needs of agentd.workers.Children."""

    def start(self, order: StartWorkers) -> None:
        """See Children."""

    def note_owner(self, order: StartWorkers) -> None:
        """See Children."""

    def stop(self, ids: Sequence[str], grace_s: float, reason: str = "") -> None:
        """See Children."""

    def renew(self, until: float, lease_s: float) -> None:
        """See Children."""

    def flush_output(self, owner: str, wait_s: float) -> None:
        """See Children."""

    def log_credit(self, chars: int, owner: str) -> None:
        """See Children."""

    def settled(self, ids: Sequence[str]) -> None:
        """See Children."""

    def registered(self, keep_s: float) -> None:
        """See Children."""

    async def close(self, grace_s: float, reason: str = "") -> None:
        """See Children."""


async def why_not_served(network: Network, endpoint: str) -> str:
    """Return why the head would refuse an agentd of this version, "" if it would not, or does not answer in time."""
    client = ControlClient(network, endpoint, secret_identity("agent:asks"), lambda body: None, lambda: None)
    try:
        status = await client.request(GetStatus(""), HELLO_TIMEOUT_S)
    except RlinfActorsError as error:
        log.warning("the head was not asked whether it serves this version: %s", error)
        return ""
    finally:
        client.close()
    if not isinstance(status, Status) or agreed(status.oldest, status.protocol):
        return ""
    theirs, ours = spoken(status.oldest, status.protocol), spoken(OLDEST, PROTOCOL)
    return (
        f"this agentd is rlinf-actors {version.VERSION} ({ours}), the head at {endpoint} is {status.version} "
        f"({theirs}): {what_to_upgrade(status.oldest, 'the head first', 'this agentd')}"
    )


async def _nothing_to_look_with(question: HardwareQuestion) -> HardwareAnswer:
    return HardwareAnswer(kind="failed", text="this agent cannot look for hardware")


class Session:
    """One agent's session with the head. Loop thread only.

    Args:
        network: what to connect with.
        endpoint: the head's.
        report: the node.
        children: makes the keeper of workers, given where they report.
        is_head: whether the head runs in this process.
        keeps: whether workers go on for another agentd when this process is gone: for a lease, since the head tells
            their owners then that the node is lost; for head_grace_s where the head is gone with us.
        look: finds out what hardware of a type this node has; cancelled when nobody waits any more.
        policy: times.
        on_registered: called each time the head has taken this node.
        on_status: called with a line for people.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        report: NodeReport,
        children: Callable[[Callable[[e.Report], None]], WorkerKeeper],
        *,
        is_head: bool = False,
        keeps: bool = False,
        look: Callable[[HardwareQuestion], Awaitable[HardwareAnswer]] = _nothing_to_look_with,
        policy: s.Policy | None = None,
        on_registered: Callable[[str], None] = lambda epoch: None,
        on_status: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._network = network
        self._endpoint = endpoint
        self._report = report
        self._is_head = is_head
        self._keeps = keeps
        self._lost: dict[str, str] = {}
        self._was_registered = False
        self._look_for = look
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._on_registered = on_registered
        self._on_status = on_status
        self._state = s.AgentState(lambda: uuid.uuid4().hex, random.random, policy or s.Policy())
        self._children = children(self._reported)
        self._client: ControlClient | None = None
        self.identity = b""  # how the head knows this incarnation's connections
        self._greeting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._tasks = Tasks(self._loop)
        self._watched: dict[str, int] = {}
        self._not_yet: dict[str, asyncio.TimerHandle] = {}  # processes that are to be watched: the next try
        self._done: asyncio.Future[e.Exit] = self._loop.create_future()

    async def run(self) -> e.Exit:
        """Serve until told to stop or refused; everything is closed then.

        Cancelling closes what is the session's own, not the children: `drain` is for that.
        """
        try:
            self._handle(e.Start())
            return await self._done
        finally:
            self._close()

    def drain(self, reason: str, grace_s: float | None = None) -> None:
        """Stop all workers, say goodbye, and end `run`. Twice is fine; *grace_s* may hurry it.

        Args:
            reason: for people.
            grace_s: seconds between SIGTERM and SIGKILL, None for the policy's.
        """
        self._handle(e.Drain(reason, grace_s))

    def adopt(self, workers: list[RunningWorker], lost: dict[str, str], since: float) -> None:
        """What an earlier agentd left is ours. Before `run`.

        Args:
            workers: as Children.adopt gave them.
            lost: ids of those that had to be ended, and why.
            since: when the head last had a registered agentd here, by the loop's clock; 0 if nobody knows.
        """
        self._lost = lost
        self._handle(e.Adopted(workers, since))

    def hand_over(self, reason: str) -> None:
        """End `run` without a word to the head: workers go on for another agentd. *reason* is for people."""
        self._handle(e.HandOver(reason))

    def describe(self, report: NodeReport, stop_grace_s: float) -> None:
        """The configuration was read again; the head hears of the node with the next hello."""
        self._report = report
        self._state.policy.stop_grace_s = stop_grace_s

    # --- in ---

    def _reported(self, report: e.Report) -> None:
        self._handle(e.FromWorkers(report))

    def _noticed(self, body: Body) -> None:
        self._handle(e.Heard(body))

    def _connection_lost(self) -> None:
        self._handle(e.ConnectionLost())

    def _handle(self, event: e.Event) -> None:
        if self._done.done():
            return
        for action in self._state.handle(event, self._loop.time()):
            self._act(action)
        self._set_timer()

    def _set_timer(self) -> None:
        due = max(self._state.next_deadline(), self._loop.time())  # what is overdue is no stand still of ours
        if self._timer is not None:
            if self._due <= due:  # uvloop's handles do not all know when
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf and not self._done.done():
            self._due, self._timer = due, self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._timer = None
        now = max(self._loop.time(), due)  # uvloop's clock is coarser than its time()
        events: list[e.Event] = []
        if now - due > STALL_S:
            log.warning("agentd stood still for %.1f s: it or its machine was stopped, or is overloaded", now - due)
            events.append(e.Stalled(now - due))
        for event in (*events, e.Tick()):  # a tick in any case: not every deadline is the head's silence
            for action in self._state.handle(event, now):
                self._act(action)
        self._set_timer()

    # --- out ---

    def _act(self, action: e.Action) -> None:
        if isinstance(action, e.Send):
            if self._client is not None:
                self._client.notify(action.body)
        elif isinstance(action, e.SayHello):
            if self._greeting is not None:
                self._greeting.cancel()  # of a life that is over; its failure must not be taken for this one's
            self._greeting = self._spawn(self._hello(action), "hello")
        elif isinstance(action, e.StartChildren):
            self._children.start(action.order)
        elif isinstance(action, e.NoteOwner):
            self._children.note_owner(action.order)
        elif isinstance(action, e.StopChildren):
            self._children.stop(action.ids, action.grace_s, action.reason)
        elif isinstance(action, e.RenewLeases):
            self._children.renew(action.until, action.lease_s)
        elif isinstance(action, e.Settled):
            self._children.settled(action.ids)
        elif isinstance(action, e.CloseChildren):
            self._spawn(self._close_children(action), "close children")
        elif isinstance(action, e.Credit):
            self._children.log_credit(action.chars, action.owner)
        elif isinstance(action, e.FlushOutput):
            self._children.flush_output(action.owner, action.wait_s)
        elif isinstance(action, e.WatchProcess):
            self._watch(action)
        elif isinstance(action, e.UnwatchProcess):
            self._unwatch(action.incarnation)
        elif isinstance(action, e.LookForHardware) and action.id in self._looks:
            pass  # the head asks again over a new connection
        elif isinstance(action, e.LookForHardware):
            look = self._spawn(self._look_for_hardware(action), f"look for {action.question.type}")
            self._looks[action.id] = look
            # and not by the task itself: one that is cancelled before it began does nothing
            look.add_done_callback(lambda _: self._looks.pop(action.id, None))
        elif isinstance(action, e.StopLooking):
            if action.id in self._looks:
                self._looks[action.id].cancel()
        elif isinstance(action, e.LookAtHead):
            self._spawn(self._look(action), "look at the head")
        elif isinstance(action, e.Say):
            level = logging.ERROR if action.urgent else logging.WARNING if action.warns else logging.INFO
            log.log(level, "%s", action.text)
            self._on_status(action.text)
        elif isinstance(action, e.Registered):
            self._children.settled(list(self._lost))
            self._lost, self._was_registered = {}, True
            self._children.registered(self._state.policy.head_grace_s if self._is_head else action.lease_s)
            self._on_registered(action.epoch)
        elif not self._done.done():
            self._done.set_result(action)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.start(work, name, expected=Exception)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._done.done():
            self._done.set_exception(error)

    async def _hello(self, action: e.SayHello) -> None:
        if action.delay_s:
            await asyncio.sleep(action.delay_s)
        if action.anew and self._client is not None:
            self._client.close()
            self._client = None
        if self._client is None:
            name = f"agent:{action.incarnation}"
            if not self.identity.startswith(f"{name}#".encode()):  # each incarnation has one
                self.identity = secret_identity(name)
            try:
                self._client = self._connect()
            except OSError as error:
                if not action.anew:
                    raise  # the first of all: whoever starts this agentd is told at once
                # of something there is none left just now, and workers may depend on us: as if the head were away
                text = f"no connection to the head at {self._endpoint} can be made: {error.strerror or error}"
                self._greeting = None
                self._handle(e.HelloFailed(ClusterTimeoutError(text)))
                return
        running = self._state.running()
        hello = AgentHello(
            OLDEST,
            version.VERSION,
            action.incarnation,
            self._report,
            self._is_head,
            running,
            self._keeps,
            self._lost,
            list(self._watched),
            PROTOCOL,
        )
        try:
            answer = await self._client.request(hello, action.timeout_s)
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"the head answered a hello with {type(answer).__name__}")
        except RlinfActorsError as error:
            self._greeting = None
            self._handle(e.HelloFailed(error))
        else:
            self._greeting = None
            self._handle(e.Welcomed(answer))

    def _connect(self) -> ControlClient:
        return ControlClient(
            self._network,
            self._endpoint,
            self.identity,
            self._noticed,
            self._connection_lost,
            explains=not self._was_registered,
        )

    async def _close_children(self, action: e.CloseChildren) -> None:
        await self._children.close(action.grace_s, action.reason)
        self._handle(e.Empty())

    async def _look_for_hardware(self, action: e.LookForHardware) -> None:
        try:
            answer = await self._look_for(action.question)
        except Exception as error:  # nothing of ours has changed by it, and whoever asked can be told
            log.exception("the look for %s has failed", action.question.type)
            text = f"its agentd cannot look for it ({type(error).__name__}: {error}); its log has more"
            answer = HardwareAnswer(kind="failed", text=text)
        self._handle(e.Looked(HardwareFound(action.id, answer)))

    async def _look(self, action: e.LookAtHead) -> None:
        sight = await self._network.check_reachability(self._endpoint, action.timeout_s)
        self._handle(e.HeadLooked(sight is not Reachability.SILENT))

    # --- watching processes ---

    def _watch(self, action: e.WatchProcess) -> None:
        if action.incarnation not in self._watched and action.incarnation not in self._not_yet:
            self._try_to_watch(action)

    def _try_to_watch(self, action: e.WatchProcess) -> None:
        """Watch a process, or try again later: the head takes it for watched, and so must hear of its end in time."""
        waited = self._not_yet.pop(action.incarnation, None) is not None
        fd = -1
        try:
            fd = procfs.open_pidfd(action.pid, action.pid_start)
            if fd >= 0:
                self._loop.add_reader(fd, self._process_ended, action.incarnation)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if not waited:
                log.warning("process %d of a client is watched once that can be done: %s", action.pid, explain(error))
            self._not_yet[action.incarnation] = self._loop.call_later(AGAIN_S, self._try_to_watch, action)
            return
        if fd < 0:
            self._loop.call_soon(self._process_ended, action.incarnation)
            return
        self._watched[action.incarnation] = fd
        if waited:
            log.info("process %d is watched now", action.pid)

    def _process_ended(self, incarnation: str) -> None:
        self._unwatch(incarnation)
        self._handle(e.ProcessEnded(incarnation))

    def _unwatch(self, incarnation: str) -> None:
        if incarnation in self._not_yet:
            self._not_yet.pop(incarnation).cancel()
        fd = self._watched.pop(incarnation, -1)
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _close(self) -> None:
        for incarnation in [*self._watched, *self._not_yet]:
            self._unwatch(incarnation)
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()
        if self._client is not None:
            self._client.close(linger_ms=200)
