"""agentd's decisions: what happened and the time in, actions out. No sockets, no clock, no loop.

House rules: children are started, stopped and told of by actions alone; a worker id is started
once in an agent's life; every worker that was taken on ends in one WorkerExited, which a head
that was away meanwhile learns from the next hello.

The life cycle of an agent's session with the head, as a table.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from agentd import state_events as e
from agentd.roster import RobotLeases, Roster
from rlinf_actors.errors import (
    ClusterTimeoutError,
    NodeLostError,
    ProtocolError,
    ProtocolMismatchError,
    WrongServerError,
)
from rlinf_actors.net.failure_detection import FailureDetector, ReconnectBackoff
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    Beat,
    FlushLogs,
    Goodbye,
    LogCredit,
    LogLines,
    LookForHardware,
    ProcessGone,
    StartWorkers,
    StopLooking,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import OLDEST
from rlinf_actors.wire.values import ExitReport, RunningWorker


class Phase(str, enum.Enum):
    """How the session with the head is."""

    JOINING = "joining"
    JOINED = "joined"
    RESETTING = "resetting"
    DRAINING = "draining"
    ENDED = "ended"


PHASES: Mapping[Phase, Mapping[str, Phase]] = {
    Phase.JOINING: {
        "welcomed": Phase.JOINED,
        "failed": Phase.JOINING,
        "refused": Phase.ENDED,
        "cut_off": Phase.RESETTING,
        "drain": Phase.DRAINING,
    },
    Phase.JOINED: {
        "welcomed": Phase.JOINED,
        "forgotten": Phase.JOINING,
        "cut_off": Phase.RESETTING,
        "drain": Phase.DRAINING,
    },
    Phase.RESETTING: {"empty": Phase.JOINING, "drain": Phase.DRAINING},
    Phase.DRAINING: {"welcomed": Phase.DRAINING, "empty": Phase.ENDED},
    Phase.ENDED: {},
}
"""RESETTING: this incarnation is over; its workers are ended before the next one says hello."""


def step(phase: Phase, event: str) -> Phase:
    """The phase after *event*.

    Raises:
        ProtocolError: it cannot happen in this phase; a fault of ours.
    """
    try:
        return PHASES[phase][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a session that is {phase.value}") from None


CUT_OFF_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for workers whose head is out of reach."""
ORPHANS_S = 0.4
"""How long the head may leave unanswered that an owner's process has ended; then this agent ends what that owned."""
ORPHANS_GRACE_S = 0.4
"""Between SIGTERM and SIGKILL for those workers: what the head gives them."""
ALL_CREDIT = 1 << 60
"""As many characters of output as an owner may have outstanding."""
PROCESSES_KEPT = 4096
"""Ends of watched processes that are told again to a head that was restarted."""


@dataclass
class Policy:
    """What the configuration says of time, in seconds.

    Attributes:
        head_grace_s: how long workers live while the head's machine answers and no head runs there.
        stop_grace_s: between SIGTERM and SIGKILL when agentd stops.
    """

    head_grace_s: float = 120.0
    stop_grace_s: float = 3.0


@dataclass
class AgentState:
    """One agent's state.

    Attributes:
        new_incarnation: makes a name for each life of this agent.
        random: between 0 and 1; spreads beats and retries.
        policy: times.
        protocol: the one that the session with the head speaks.
    """

    new_incarnation: Callable[[], str]
    random: Callable[[], float]
    policy: Policy = field(default_factory=Policy)
    phase: Phase = Phase.JOINING
    incarnation: str = ""
    protocol: int = OLDEST
    _beat_s: float = 1.0
    _next_beat: float = math.inf
    _backoff: ReconnectBackoff = field(init=False)
    _epoch: str = ""
    _roster: Roster = field(default_factory=Roster)
    _unsent: list[Body] = field(default_factory=list)
    _processes: dict[str, None] = field(default_factory=dict)
    _bereaved: dict[str, float] = field(default_factory=dict)
    _leases: RobotLeases = field(default_factory=RobotLeases)
    _silence: FailureDetector = field(init=False)
    _out: list[e.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._backoff = ReconnectBackoff(self.random)
        self._detector = FailureDetector(self.policy.head_grace_s)

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """What to do about *event*, in order.

        Raises:
            ProtocolError: it cannot happen in this phase; a fault of ours.
        """
        self._out = []
        self._end_leases(now)  # first: what waited to be read while we stood still must not revive one
        if isinstance(event, e.Start):
            self.incarnation = self.new_incarnation()
            self._hello()
        elif isinstance(event, e.Welcomed):
            self._welcomed(event.welcome, now)
        elif isinstance(event, e.HelloFailed):
            self._failed(event.error, now)
        elif isinstance(event, e.Heard):
            if isinstance(event.body, Beat) and (self._answers(event.body) or event.body.incarnation == HELLO_AGAIN):
                self._detector.heard(now)  # an answer to what we said: anything else may come although we are not heard
            self._heard(event.body, now)
        elif isinstance(event, e.FromWorkers):
            self._reported(event.report, now)
        elif isinstance(event, e.ConnectionLost):
            self._greet_again()
        elif isinstance(event, e.Looked):
            self._send(event.found)  # an id that the head does not know any more is ignored there
        elif isinstance(event, e.ProcessEnded):
            self._process_ended(event.incarnation, now)
        elif isinstance(event, e.HeadLooked):
            self._looked(event.there, now)
        elif isinstance(event, e.Stalled):
            self._detector.stalled(event.seconds, now)
            self._next_beat = now
            self._bereaved = dict.fromkeys(self._bereaved, now)
        elif isinstance(event, e.Adopted):
            self._adopt(event, now)
        elif isinstance(event, e.HandOver):
            self._out.append(e.Exit(0, f"workers go on: {event.reason}"))
        elif isinstance(event, e.Drain):
            self._drain(event)
        elif isinstance(event, e.Empty):
            self._step("empty")
            self._out += [e.Send(Goodbye("its agentd was stopped")), e.Exit(0, "stopped")]
        else:
            self._tick(now)
        return self._out

    def running(self) -> list[RunningWorker]:
        """What a hello says: every worker, and the ends that the head may have missed."""
        return self._roster.listed()

    def next_deadline(self) -> float:
        """When a Tick is due, infinity for never."""
        times = [self._leases.deadline, min(self._bereaved.values(), default=math.inf) + ORPHANS_S]
        if self.phase is Phase.JOINED:
            times.append(self._next_beat)
        if self._depends():
            times.append(self._detector.next_deadline())
        return min(times)

    def _adopt(self, adopted: e.Adopted, now: float) -> None:
        """Robot workers among them have lost their lease with the earlier agentd. The head's silence began there, too:
        agentds that come and go without the head win no time for their workers.
        """
        self._roster.adopt(adopted.workers)
        self._detector.heard(min(adopted.since or now, now))

    def _process_ended(self, client: str, now: float) -> None:
        """Tell the head. One that is not there, killed with the driver perhaps, ends nothing: then this agent does."""
        self._processes[client] = None
        if len(self._processes) > PROCESSES_KEPT:
            del self._processes[next(iter(self._processes))]
        self._send(ProcessGone(client))
        if self.phase in (Phase.JOINED, Phase.JOINING) and self._roster.owned_by(client):
            self._bereaved[client] = self._next_beat = now  # whoever answers that beat has been told before

    def _end_orphans(self, now: float) -> None:
        for client in [client for client, since in self._bereaved.items() if now >= since + ORPHANS_S]:
            del self._bereaved[client]
            orphans = self._roster.owned_by(client)
            if orphans:
                reason = f"its owner, client {client[:8]}, has ended, and the head does not answer"
                self._out.append(e.Say(f"{len(orphans)} workers end: {reason}"))
                self._stop(orphans, ORPHANS_GRACE_S, reason)

    def _settled(self, ids: list[str]) -> None:
        """The head knows how these ended, or need not know."""
        if ids:
            self._out.append(e.Settled(ids))

    # --- the session ---

    def _step(self, event: str) -> None:
        self.phase = step(self.phase, event)

    def _hello(self, again: bool = False) -> None:
        timeout_s = self._backoff.attempt_timeout(self._detector.lease_s)
        self._out.append(e.SayHello(self.incarnation, timeout_s, self._backoff.pause() if again else 0.0, anew=again))

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        if self.phase is Phase.RESETTING:
            return  # a late answer to the life that is over
        self._step("welcomed")
        self._beat_s = self._detector.beat_s = welcome.beat_s
        self._detector.lease_s = welcome.lease_s
        self.protocol = welcome.protocol
        self._detector.heard(now)
        self._leases.lease_s = welcome.robot_lease_s
        self._bereaved = {}
        away = self._backoff.recovered(now)
        if away is not None:
            self._out.append(e.Say(f"the head is there, after {away:.0f} s"))
        self._next_beat = now + min(self._beat_s, self._leases.beat_s) * self.random()
        self._out.append(e.Registered(welcome.epoch, welcome.lease_s))
        if welcome.epoch != self._epoch:  # output that an earlier head was to pass on is not acknowledged any more
            owners = dict.fromkeys(worker.spec.namespace for worker in self._roster.running.values())
            self._out += [e.Credit(ALL_CREDIT, owner) for owner in owners]
            self._out += [
                e.Send(ProcessGone(incarnation)) for incarnation in self._processes
            ]  # it may have missed them
            self._unsent = [body for body in self._unsent if not isinstance(body, ProcessGone)]
        self._epoch = welcome.epoch
        health = self._roster.welcomed(now)
        self._out += [e.Send(body) for body in [*self._unsent, *([health] if health is not None else [])]]
        self._unsent = []

    def _failed(self, error: Exception, now: float) -> None:
        if self.phase in (Phase.RESETTING, Phase.DRAINING, Phase.ENDED):
            return
        if isinstance(error, NodeLostError):
            self._reset(str(error))
        elif isinstance(error, (ClusterTimeoutError, WrongServerError)):
            self._step("failed")
            self._away(f"not registered yet: {error}", now)
            self._hello(again=True)
        elif isinstance(error, ProtocolMismatchError) and self._roster.running:
            self._step("failed")
            text = f"the head refused this node: {error}; workers go on for {self.policy.head_grace_s:g} s"
            self._away(text, now, urgent=True)
            self._hello(again=True)
        else:
            self._step("refused")
            self._out.append(e.Exit(78, f"the head refused this node: {error}"))

    def _reset(self, reason: str) -> None:
        """This life is over: end its workers, then come back as a new incarnation."""
        self._step("cut_off")
        self._out.append(e.Say(f"workers end: {reason}", warns=True))
        self._settled(self._roster.settle_all())
        self._unsent, self._bereaved = [], {}
        if self._roster.running:
            self._stop(list(self._roster.running), CUT_OFF_GRACE_S, reason)
        else:
            self._reborn()

    def _reborn(self) -> None:
        self._step("empty")
        self.incarnation = self.new_incarnation()
        self._hello(again=True)

    def _away(self, text: str, now: float, *, urgent: bool = False, warns: bool = False) -> None:
        """The head is not there: say so, but not each time."""
        said = self._backoff.failed(now, text)
        if said:
            self._out.append(e.Say(said, urgent, warns))

    def _drain(self, event: e.Drain) -> None:
        if self.phase is Phase.ENDED or (self.phase is Phase.DRAINING and event.grace_s is None):
            return
        grace_s = self.policy.stop_grace_s if event.grace_s is None else event.grace_s
        if self.phase is Phase.DRAINING:
            self._stop(list(self._roster.running), grace_s, event.reason)  # sooner than was said before
            return
        self._step("drain")
        self._bereaved = {}
        for id in self._roster.running:
            self._leases.ended(id)
        self._out += [e.Say(f"stopping: {event.reason}"), e.CloseChildren(grace_s, event.reason)]

    def _stop(self, ids: list[str], grace_s: float, reason: str) -> None:
        for id in ids:
            self._leases.ended(id)
        self._out.append(e.StopChildren(ids, grace_s, reason))

    def _end_leases(self, now: float) -> None:
        lost = self._leases.expired(now)
        if lost:
            silent = now - self._leases.until + self._leases.lease_s
            self._stop(lost, 0.0, f"no word from the head for {silent:.1f} s")

    def _tick(self, now: float) -> None:
        if self.phase is Phase.JOINED and now >= self._next_beat:
            self._next_beat = max(self._next_beat + min(self._beat_s, self._leases.beat_s), now)
            self._out.append(e.Send(Beat(self.incarnation, now)))
            self._roster.beat_sent(now)
        self._end_orphans(now)
        self._judge(now)

    def _depends(self) -> bool:
        """Whether the head's silence matters: to a node that it knows, and to one that still has workers."""
        return self.phase is Phase.JOINED or (self.phase is Phase.JOINING and bool(self._roster.running))

    def _judge(self, now: float) -> None:
        if not self._depends():
            return
        reason = self._detector.verdict(now)
        if reason is not None:
            self._reset(reason)
        elif self._detector.should_check(now):
            self._out.append(e.LookAtHead(self._detector.check_timeout_s))

    def _looked(self, there: bool, now: float) -> None:
        self._detector.checked(there, now)
        if there and self.phase is Phase.JOINED and self._detector.suspected(now):
            self._step("forgotten")  # over a new connection: the old one may be waiting to repeat what a cut lost
            grace = f"; workers go on for {self.policy.head_grace_s:g} s" if self._roster.running else ""
            self._away(f"the head does not answer, but its machine does{grace}", now, warns=True)
            self._hello(again=True)
        self._judge(now)

    # --- what the head says ---

    def _answers(self, beat: Beat) -> bool:
        """Whether it answers one of ours, and is of the head that took us, not our own by a connection to ourselves."""
        return beat.incarnation != "" and beat.incarnation == self._epoch

    def _greet_again(self) -> None:
        """The head does not know us, or something was lost on the way: a hello brings both up to date."""
        if self.phase is Phase.JOINED:
            self._step("forgotten")
            self._hello()

    def _heard(self, body: Body, now: float) -> None:
        if isinstance(body, Beat):
            if self._answers(body):
                # told before the beat that this answers: the head has them
                self._settled(self._roster.beat_answered(body.at))
                self._bereaved = {client: since for client, since in self._bereaved.items() if since > body.at}
                if self._leases.answered(body.at, now):
                    self._out.append(e.RenewLeases(self._leases.until, self._leases.lease_s))
            elif body.incarnation == HELLO_AGAIN:
                self._greet_again()
            # else the head only tries the connection
        elif isinstance(body, StartWorkers):
            self._start(body, now)
        elif isinstance(body, StopWorkers):
            self._stop(body.ids, body.grace_s, body.reason)
        elif isinstance(body, LogCredit):
            self._out.append(e.Credit(body.chars, body.owner))
        elif isinstance(body, FlushLogs):
            self._out.append(e.FlushOutput(body.owner, body.wait_s))
        elif isinstance(body, LookForHardware):
            self._out.append(e.LookForHardware(body.id, body.question))
        elif isinstance(body, StopLooking):
            self._out.append(e.StopLooking(body.id))
        elif isinstance(body, Goodbye) and body.restarting:
            self._away(f"the head is being restarted; workers go on for {self.policy.head_grace_s:g} s", now)
        elif isinstance(body, Watch):
            self._out.append(e.WatchProcess(body.incarnation, body.pid, body.pid_start))
        elif isinstance(body, Unwatch):
            self._out.append(e.UnwatchProcess(body.incarnation))
        else:
            text = f"the head sent a {type(body).__name__}, which an agent does not expect"
            self._out.append(e.Say(text, warns=True))

    def _start(self, body: StartWorkers, now: float) -> None:
        for end in self._roster.ends_among(body):  # asked for again, by a head that has not heard how they ended
            self._send(end)
        if not self._depends():
            self._detector.heard(now)  # an order of the head that took us may be here before its welcome
        given = self._roster.give_to(body)
        if given:
            self._out.append(e.NoteOwner(msgspec.structs.replace(body, workers=given)))
        specs = self._roster.add(body)
        if self.phase in (Phase.JOINED, Phase.JOINING):
            for spec in specs:
                if spec.claims:
                    self._leases.started(spec.id, now)
                    self._next_beat = now  # the lease is fresh when the worker is
            if any(spec.claims for spec in specs):
                self._out.append(e.RenewLeases(self._leases.until, self._leases.lease_s))
            self._out.append(e.StartChildren(msgspec.structs.replace(body, workers=specs)))
            return
        for spec in specs:
            reason = f"its agentd is {self.phase.value}"
            self._reported(WorkerExited(spec.id, ExitReport("start_failed", reason=reason)), now)

    # --- what workers do ---

    def _reported(self, report: e.Report, now: float) -> None:
        if isinstance(report, WorkerReady):
            self._roster.up(report)
        elif isinstance(report, WorkerExited):
            self._leases.ended(report.id)
            self._settled(self._roster.end(report, keep=self.phase is not Phase.RESETTING))
        elif isinstance(report, WorkersHealth):
            joined = self.phase is Phase.JOINED
            self._roster.say_health(report, now, joined)
            if not joined:
                return  # it is told when the head knows us
        self._send(report)
        if self.phase is Phase.RESETTING and not self._roster.running:
            self._unsent = []
            self._reborn()

    def _send(self, body: Body) -> None:
        """To the head if it knows us; ends and the like wait for it, output does not (it is in the files)."""
        if self.phase in (Phase.JOINED, Phase.DRAINING):
            self._out.append(e.Send(body))
        elif isinstance(body, LogLines):
            self._out.append(e.Credit(body.cost, body.owner))
        else:
            self._unsent.append(body)
