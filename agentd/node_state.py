"""The state of one agentd: every decision of its session with the head. Pure: no socket, no clock, no loop.

Theory of operation. `AgentState.handle` takes an event (state_events) and the time, and returns the commands that
agentd.session carries out. The state holds the workers of the node (worker_table), the state of the session with the
head, and the deadlines: next beat, end of the robot lease, ends of clients that the head has not acknowledged, and the
head's silence. `next_deadline` returns the earliest; agentd.session then passes in a Tick.

The table SESSION_STATES lists the states of the session. While JOINING, agentd says hello until the head registers it,
once by each connection: a busy head that has received a hello gets no second one. The hello lists the running workers,
and the ended workers whose exit reports the head may not have. Once JOINED, agentd
beats. The head answers each beat, and an answer acknowledges everything that agentd sent before that beat. If the head
is silent, agentd checks whether the head's machine answers. If it does, a head is restarting there, and the workers go
on for head_grace_s. If it does not, the network is cut, and the workers end with the lease (`net.failure_detection`).
When the head has declared this node lost, or the grace is over, the session is RESETTING: all workers end, and agentd
registers again as a new incarnation. DRAINING ends all workers and then agentd.

Robot workers have a lease of their own. It counts from the time at which agentd sent the last beat that the head
answered. When it expires, robot workers end, whatever the session's state.

When a client process of this host ends, agentd tells the head, which ends the client's workers. If the head does not
answer within ORPHANS_S, agentd ends them itself.

House rules:
* Workers are started and ended by commands alone. A worker id is started once in an agentd's life.
* Each accepted worker ends in one WorkerExited. The state keeps that report until the head has acknowledged it.
* An event that SESSION_STATES does not allow in the current state is a bug, and raises ProtocolError.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from agentd import state_events as e
from agentd.worker_table import RobotLeases, WorkerTable
from rlinf_actors.errors import (
    ClusterTimeoutError,
    NodeLostError,
    ProtocolError,
    ProtocolMismatchError,
    WrongServerError,
)
from rlinf_actors.net.failure_detection import FailureDetector, ReconnectBackoff
from rlinf_actors.plurals import counted
from rlinf_actors.tracing.clocks import HeadClock
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    Beat,
    Goodbye,
    LogCredit,
    LogLines,
    ProcessGone,
    StartWorkers,
    StopWorkers,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.client_messages import Warn
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.values import ExitReport, RunningWorker


class SessionState(str, enum.Enum):
    JOINING = "joining"
    JOINED = "joined"
    RESETTING = "resetting"
    DRAINING = "draining"
    ENDED = "ended"


SESSION_STATES: Mapping[SessionState, Mapping[str, SessionState]] = {
    SessionState.JOINING: {
        "welcomed": SessionState.JOINED,
        "failed": SessionState.JOINING,
        "refused": SessionState.ENDED,
        "cut_off": SessionState.RESETTING,
        "drain": SessionState.DRAINING,
    },
    SessionState.JOINED: {
        "welcomed": SessionState.JOINED,
        "forgotten": SessionState.JOINING,
        "cut_off": SessionState.RESETTING,
        "drain": SessionState.DRAINING,
    },
    SessionState.RESETTING: {"empty": SessionState.JOINING, "drain": SessionState.DRAINING},
    SessionState.DRAINING: {"welcomed": SessionState.DRAINING, "empty": SessionState.ENDED},
    SessionState.ENDED: {},
}
"""For each state, the events that may happen in it and the state that follows."""


CUT_OFF_GRACE_S = 2.0  # seconds between SIGTERM and SIGKILL for workers whose head is out of reach
ORPHANS_S = 0.4
"""Seconds that the head has to acknowledge the end of a client process before agentd ends that client's workers."""
ORPHANS_GRACE_S = 0.4
"""Seconds between SIGTERM and SIGKILL for workers whose client has ended; the head uses the same number."""
ALL_CREDIT = 1 << 60
"""More log credit than any job can use: lifts the limit after a new head has lost count of lines in flight."""
BUNCH_S = 0.05
"""Beats are sent at times at which they reach the head at multiples of this, in seconds of the head's clock.

So the beats of many agentds arrive together, and the head wakes up once for all of them. A beat is sent up to half of
this earlier or later.
"""
PROCESSES_KEPT = 4096  # how many ends of client processes agentd keeps, to repeat them to a restarted head


class Policy(msgspec.Struct):
    """agentd's times for workers without a head and for its own stop, in seconds, from the configuration."""

    head_grace_s: float = 120.0  # how long workers live while the head's machine answers but no head does
    stop_grace_s: float = 3.0  # time between SIGTERM and SIGKILL when agentd stops


@dataclass
class AgentState:
    """The state of one agentd: makes every decision of its session with the head, without I/O. agentd.session passes
    events in and carries out the commands that come out.
    """

    new_incarnation: Callable[[], str]  # returns a new name for each incarnation of this node
    random: Callable[[], float]  # returns a number between 0 and 1, which spreads beats and retries
    policy: Policy = field(default_factory=Policy)
    session: SessionState = SessionState.JOINING
    incarnation: str = ""  # "" before StartSession
    _beat_s: float = 1.0
    _next_beat: float = math.inf
    _head_ahead: float | None = None  # the head's clock when its last answer arrived, minus agentd's; None if unknown
    _backoff: ReconnectBackoff = field(init=False)
    _epoch: str = ""
    _workers: WorkerTable = field(default_factory=WorkerTable)
    _unsent: list[Body] = field(default_factory=list)
    _ended_clients: dict[str, None] = field(default_factory=dict)
    _orphaned_at: dict[str, float] = field(default_factory=dict)  # by the client that ended
    _leases: RobotLeases = field(default_factory=RobotLeases)
    _detector: FailureDetector = field(init=False)
    _out: list[e.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._backoff = ReconnectBackoff(self.random)
        self.clock = HeadClock()
        self._detector = FailureDetector(self.policy.head_grace_s)

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        """Apply *event* to agentd's state, and return the commands to carry out, in order. Raise ProtocolError if the
        state does not allow the event, which is a bug.
        """
        self._out = []
        self._end_leases(now)  # first: a beat that waited unread while this process stood still must not revive one
        if isinstance(event, e.StartSession):
            self.incarnation = self.new_incarnation()
            self._say_hello()
        elif isinstance(event, e.Welcomed):
            self._welcomed(event.welcome, now)
        elif isinstance(event, e.HelloFailed):
            self._hello_failed(event.error, now)
        elif isinstance(event, e.HelloWaits):
            if self.session is SessionState.JOINING:
                self._head_away(f"not registered yet: {event.text}", now)
        elif isinstance(event, e.HeadNotice):
            if isinstance(event.body, Beat) and (self._answers(event.body) or event.body.incarnation == HELLO_AGAIN):
                was_silent = self._detector.suspected(now)
                self._detector.heard(now)  # answers alone prove that the head hears us too
                if was_silent and self.session is SessionState.JOINED:
                    self._head_back(now)
            self._notice(event.body, now)
        elif isinstance(event, e.WorkersReported):
            self._reported(event.report, now)
        elif isinstance(event, (e.ConnectionLost, e.NodeDescribed)):  # a hello on its way has the old description
            self._connection_lost()
        elif isinstance(event, e.HardwareAnswered):
            self._send(event.found)
        elif isinstance(event, e.ProcessEnded):
            self._client_ended(event.incarnation, now)
        elif isinstance(event, e.HeadChecked):
            self._head_checked(event.there, event.stands, now)
        elif isinstance(event, e.Stalled):
            self._detector.stalled(event.seconds, now)
            self._next_beat = now
            self._orphaned_at = dict.fromkeys(self._orphaned_at, now)
        elif isinstance(event, e.WorkersAdopted):
            # The head's silence goes on from then: agentds that start and end without a head gain no time for workers.
            self._workers.adopt(event.workers)
            self._detector.heard(min(event.since or now, now))
        elif isinstance(event, e.HandOver):
            self._out.append(e.EndAgent(0, f"workers go on: {event.reason}"))
        elif isinstance(event, e.StopAgent):
            self._stop_agent(event)
        elif isinstance(event, e.WorkersClosed):
            self._step("empty")
            self._out += [e.SendNotice(Goodbye("its agentd was stopped")), e.EndAgent(0, "stopped")]
        else:
            self._tick(now)
        return self._out

    def listed_workers(self) -> list[RunningWorker]:
        """Return the workers that agentd lists in a hello to the head: those that run, and those that have ended and
        whose exit reports the head may not have.
        """
        return self._workers.listed()

    def next_deadline(self) -> float:
        """Return the time at which `handle` must be called with a Tick, or infinity if no deadline is set."""
        times = [self._leases.deadline, min(self._orphaned_at.values(), default=math.inf) + ORPHANS_S]
        if self.session is SessionState.JOINED:
            times.append(self._next_beat)
        if self._depends_on_head():
            times.append(self._detector.next_deadline())
        return min(times)

    # --- the session ---

    def _step(self, event: str) -> None:
        try:
            self.session = SESSION_STATES[self.session][event]
        except KeyError:
            raise ProtocolError(f"{event!r} is not expected of a session that is {self.session.value}") from None

    def _say_hello(self, again: bool = False) -> None:
        timeout_s = self._backoff.attempt_timeout(self._detector.lease_s)
        self._out.append(e.SayHello(self.incarnation, timeout_s, self._backoff.pause() if again else 0.0, anew=again))

    def _hello_again(self) -> None:
        """Register with the head again on the same connection, because the head does not know this node or messages
        were lost.
        """
        if self.session is SessionState.JOINED:
            self._step("forgotten")
            self._say_hello()

    def _connection_lost(self) -> None:
        if self.session is SessionState.JOINING:  # the hello may be lost: say it again, by the connection made since
            timeout_s = self._backoff.attempt_timeout(self._detector.lease_s)
            self._out.append(e.SayHello(self.incarnation, timeout_s, self._backoff.pause()))
        else:
            self._hello_again()

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        if self.session is SessionState.RESETTING:
            return  # a late answer to the incarnation that is over
        self._step("welcomed")
        self._beat_s = self._detector.beat_s = welcome.beat_s
        self._detector.lease_s = welcome.lease_s
        self._detector.heard(now)
        self._leases.lease_s = welcome.robot_lease_s
        self._orphaned_at = {}
        self._head_back(now)
        self._next_beat = now + min(self._beat_s, self._leases.beat_s) * self.random()
        again = welcome.epoch == self._epoch
        self._out.append(e.Registration(welcome.epoch, welcome.lease_s, again))
        if welcome.epoch != self._epoch:  # a new head knows nothing of lines in flight, nor of clients that ended
            self.clock.forget()
            owners = dict.fromkeys(worker.spec.namespace for worker in self._workers.running.values())
            self._out += [e.CreditLogs(ALL_CREDIT, owner) for owner in owners]
            self._out += [e.SendNotice(ProcessGone(client)) for client in self._ended_clients]
            self._unsent = [body for body in self._unsent if not isinstance(body, ProcessGone)]
        self._epoch = welcome.epoch
        health = self._workers.registered(now)
        self._out += [e.SendNotice(body) for body in [*self._unsent, *([health] if health is not None else [])]]
        self._unsent = []

    def _hello_failed(self, error: Exception, now: float) -> None:
        if self.session in (SessionState.RESETTING, SessionState.DRAINING, SessionState.ENDED):
            return
        if isinstance(error, NodeLostError):
            self._reset(str(error))
        elif isinstance(error, (ClusterTimeoutError, WrongServerError)):
            self._step("failed")
            self._head_away(f"not registered yet: {error}", now)
            self._say_hello(again=True)
        elif isinstance(error, ProtocolMismatchError) and self._workers.running:
            self._step("failed")
            text = f"the head refused this node: {error}; workers go on for {self.policy.head_grace_s:g} s"
            self._head_away(text, now, urgent=True)
            self._say_hello(again=True)
        else:
            self._step("refused")
            self._out.append(e.EndAgent(78, f"the head refused this node: {error}"))

    def _reset(self, reason: str) -> None:
        """End all workers because of *reason*, and then register with the head as a new incarnation of this node."""
        self._step("cut_off")
        self._out.append(e.LogStatus(f"workers end: {reason}", warns=True))
        self._acknowledged(self._workers.forget_ends())
        self._unsent, self._orphaned_at = [], {}
        if self._workers.running:
            self._stop(list(self._workers.running), CUT_OFF_GRACE_S, reason)
        else:
            self._next_incarnation()

    def _next_incarnation(self) -> None:
        self._step("empty")
        self.incarnation = self.new_incarnation()
        self._say_hello(again=True)

    def _head_away(self, text: str, now: float, *, urgent: bool = False, warns: bool = False) -> None:
        """Log *text*, which says that the head does not answer: as an error if *urgent*, as a warning if *warns*. If
        such a line was logged less than REMIND_S seconds ago, log nothing.
        """
        line = self._backoff.failed(now, text)
        if line:
            self._out.append(e.LogStatus(line, urgent, warns))

    def _head_back(self, now: float) -> None:
        away = self._backoff.recovered(now)
        if away is not None:
            self._out.append(e.LogStatus(f"the head is there, after {away:.0f} s"))

    def _stop_agent(self, event: e.StopAgent) -> None:
        if self.session is SessionState.ENDED or (self.session is SessionState.DRAINING and event.grace_s is None):
            return
        grace_s = self.policy.stop_grace_s if event.grace_s is None else event.grace_s
        if self.session is SessionState.DRAINING:
            self._stop(list(self._workers.running), grace_s, event.reason)  # with a shorter grace than before
            return
        self._step("drain")
        self._orphaned_at = {}
        for id in self._workers.running:
            self._leases.ended(id)
        self._out += [e.LogStatus(f"stopping: {event.reason}"), e.CloseWorkers(grace_s, event.reason)]

    # --- time ---

    def _tick(self, now: float) -> None:
        if self.session is SessionState.JOINED and now >= self._next_beat:
            self._next_beat = max(self._next_beat + min(self._beat_s, self._leases.beat_s), now)
            if self._leases.beat_s >= self._beat_s:  # not those that renew leases of robots
                self._next_beat = self._bunched(self._next_beat, now)
            self._out.append(e.SendNotice(Beat(self.incarnation, now)))
            self._workers.beat_sent(now)
        for client in [client for client, at in self._orphaned_at.items() if now >= at + ORPHANS_S]:
            del self._orphaned_at[client]
            orphans = self._workers.owned_by(client)
            if orphans:
                reason = f"its owner, client {client[:8]}, has ended, and the head does not answer"
                self._out.append(e.LogStatus(f"{counted(len(orphans), 'worker', 'ends|end')}: {reason}"))
                self._stop(orphans, ORPHANS_GRACE_S, reason)
        self._judge_silence(now)

    def _bunched(self, at: float, now: float) -> float:
        """Return the time next to *at*, but not before *now*, at which beats of other agentds arrive too."""
        if self._head_ahead is None:
            return at
        middle = BUNCH_S / 2
        return max(at + middle - (at + self._head_ahead + middle) % BUNCH_S, now)

    def _depends_on_head(self) -> bool:
        """Return True if the head's silence has consequences here: this node is registered, or has workers."""
        joining = self.session is SessionState.JOINING
        return self.session is SessionState.JOINED or (joining and bool(self._workers.running))

    def _judge_silence(self, now: float) -> None:
        if not self._depends_on_head():
            return
        reason = self._detector.verdict(now)
        if reason is not None:
            self._reset(reason)
        elif self._detector.should_check(now):
            self._out.append(e.CheckHead(self._detector.check_timeout_s))

    def _head_checked(self, there: bool, stands: bool, now: float) -> None:
        self._detector.checked(there, now)
        if there and self.session is SessionState.JOINED and self._detector.suspected(now):
            grace = f"; workers go on for {self.policy.head_grace_s:g} s" if self._workers.running else ""
            self._head_away(f"the head does not answer, but its machine does{grace}", now, warns=True)
            if stands:  # the head is busy or stopped, and has our beats: a hello would only add to its work
                return
            self._step("forgotten")
            self._say_hello(again=True)  # over a new connection: a cut may have left the old one waiting for a resend
        self._judge_silence(now)

    def _end_leases(self, now: float) -> None:
        lost = self._leases.expired(now)
        if lost:
            silent = now - self._leases.until + self._leases.lease_s
            self._stop(lost, 0.0, f"no word from the head for {silent:.1f} s")

    # --- notices of the head ---

    def _answers(self, beat: Beat) -> bool:
        """Return True if *beat* is an answer of the head with which this node is registered. If agentd is
        connected to itself by mistake, its own beats come back; they are no answers.
        """
        return beat.incarnation != "" and beat.incarnation == self._epoch

    def _notice(self, body: Body, now: float) -> None:
        if isinstance(body, Beat):
            if self._answers(body):
                self.clock.answered(body.at, now, body.word)
                self._head_ahead = body.word - now if body.word else None
                self._acknowledged(self._workers.beat_answered(body.at))
                self._orphaned_at = {client: at for client, at in self._orphaned_at.items() if at > body.at}
                if self._leases.answered(body.at, now):
                    self._out.append(e.RenewLeases(self._leases.until, self._leases.lease_s))
            elif body.incarnation == HELLO_AGAIN:
                self._hello_again()
            # else the head only tries the connection
        elif isinstance(body, StartWorkers):
            self._start(body, now)
        elif isinstance(body, StopWorkers):
            self._stop(body.ids, body.grace_s, body.reason)
        elif isinstance(body, LogCredit):
            self._out.append(e.CreditLogs(body.chars, body.owner))
        elif isinstance(body, e.PASSED_ON):
            self._out.append(body)
        elif isinstance(body, Warn):
            self._out.append(e.LogStatus(printable(body.text), warns=True))
        elif isinstance(body, Goodbye) and body.restarting:
            self._head_away(f"the head is being restarted; workers go on for {self.policy.head_grace_s:g} s", now)
        else:
            text = f"the head sent a {type(body).__name__}, which an agent does not expect"
            self._out.append(e.LogStatus(text, warns=True))

    def _start(self, order: StartWorkers, now: float) -> None:
        for exited in self._workers.ends_among(order):  # the head has not learned of them
            self._send(exited)
        if not self._depends_on_head():
            self._detector.heard(now)  # an order may overtake the welcome of the head that sent it
        changed = self._workers.change_owner(order)
        if changed:
            self._out.append(e.RecordOwner(msgspec.structs.replace(order, workers=changed)))
        specs = self._workers.add(order)
        if self.session in (SessionState.JOINED, SessionState.JOINING):
            for spec in specs:
                if spec.claims:
                    self._leases.started(spec.id, now)
                    self._next_beat = now  # so that the lease is fresh when the worker is ready
            if any(spec.claims for spec in specs):
                self._out.append(e.RenewLeases(self._leases.until, self._leases.lease_s))
            self._out.append(msgspec.structs.replace(order, workers=specs))
            return
        for spec in specs:
            reason = f"its agentd is {self.session.value}"
            self._reported(WorkerExited(spec.id, ExitReport("start_failed", reason=reason)), now)

    def _stop(self, ids: list[str], grace_s: float, reason: str) -> None:
        for id in ids:
            self._leases.ended(id)
        self._out.append(StopWorkers(ids, grace_s, reason))

    # --- workers and clients of this node ---

    def _reported(self, report: e.Report, now: float) -> None:
        if isinstance(report, WorkerReady):
            self._workers.ready(report)
        elif isinstance(report, WorkerExited):
            self._leases.ended(report.id)
            self._acknowledged(self._workers.end(report, keep=self.session is not SessionState.RESETTING))
        elif isinstance(report, WorkersHealth):
            joined = self.session is SessionState.JOINED
            self._workers.note_health(report, now, joined)
            if not joined:
                return  # sent after registration
        self._send(report)
        if self.session is SessionState.RESETTING and not self._workers.running:
            self._unsent = []
            self._next_incarnation()

    def _client_ended(self, client: str, now: float) -> None:
        self._ended_clients[client] = None
        if len(self._ended_clients) > PROCESSES_KEPT:
            del self._ended_clients[next(iter(self._ended_clients))]
        self._send(ProcessGone(client))
        if self.session in (SessionState.JOINED, SessionState.JOINING) and self._workers.owned_by(client):
            self._orphaned_at[client] = self._next_beat = now  # an answer to that beat acknowledges ProcessGone

    def _acknowledged(self, ids: list[str]) -> None:
        if ids:
            self._out.append(e.EndsAcknowledged(ids))

    def _send(self, body: Body) -> None:
        """Send *body* to the head. While this node is not registered, queue the message for later, but drop workers'
        output.
        """
        if self.session in (SessionState.JOINED, SessionState.DRAINING):
            self._out.append(e.SendNotice(body))
        elif isinstance(body, LogLines):
            self._out.append(e.CreditLogs(body.cost, body.owner))
        else:
            self._unsent.append(body)
