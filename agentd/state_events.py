"""The events that go into agentd's state (node_state) and the commands that come out. Plain data, no behaviour.

The head's orders come out as they came in: StartWorkers (without the workers that run already), StopWorkers,
FlushLogs, Watch, Unwatch, LookForHardware and StopLooking of wire.agent_messages.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.agent_messages import (
    FlushLogs,
    HardwareFound,
    LogLines,
    LookForHardware,
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
from rlinf_actors.wire.values import RunningWorker

Report = Union[WorkerReady, WorkerExited, WorkersHealth, LogLines]
"""What the workers' side of agentd (agentd.workers) reports for the head."""

# --- events ---


class StartSession(msgspec.Struct, frozen=True):
    """Everything is set up: say hello."""


class Welcomed(msgspec.Struct, frozen=True):
    """The head has registered this node."""

    welcome: Welcome


class HelloFailed(msgspec.Struct, frozen=True):
    """The head refused the hello, or did not answer."""

    error: Exception


class HeadNotice(msgspec.Struct, frozen=True):
    """The head sent a notice."""

    body: Body


class WorkersReported(msgspec.Struct, frozen=True):
    """agentd.workers reports."""

    report: Report


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to the head was lost and is restored: messages in both directions may be missing."""


class HardwareAnswered(msgspec.Struct, frozen=True):
    """A hardware query has ended."""

    found: HardwareFound


class ProcessEnded(msgspec.Struct, frozen=True):
    """A watched client process has ended."""

    incarnation: str


class HeadChecked(msgspec.Struct, frozen=True):
    """The reachability check of the head's machine has ended. `there`: the machine answers, with or without a head."""

    there: bool


class Tick(msgspec.Struct, frozen=True):
    """`next_deadline` has come."""


class Stalled(msgspec.Struct, frozen=True):
    """This process stood still for so many seconds; the head was not silent meanwhile."""

    seconds: float


class WorkersAdopted(msgspec.Struct, frozen=True):
    """agentd took over workers of an earlier agentd, and ends that the head may not know. Comes first of all events.

    `since`: when the last registered agentd of this node ended, 0 if unknown.
    """

    workers: list[RunningWorker]
    since: float = 0.0


class HandOver(msgspec.Struct, frozen=True):
    """End at once; the workers go on for another agentd."""

    reason: str


class StopAgent(msgspec.Struct, frozen=True):
    """End all workers, then agentd. `grace_s`: None for the policy's."""

    reason: str
    grace_s: Union[float, None] = None


class WorkersClosed(msgspec.Struct, frozen=True):
    """CloseWorkers is carried out: no worker and no template is left."""


Event = Union[
    StartSession, Welcomed, HelloFailed, HeadNotice, WorkersReported, HardwareAnswered, ProcessEnded, HeadChecked,
    Tick, Stalled, WorkersAdopted, HandOver, StopAgent, WorkersClosed, ConnectionLost,
]  # fmt: skip


# --- commands ---


class SayHello(msgspec.Struct, frozen=True):
    """Say hello after *delay_s*, with the workers of then. Answered by Welcomed, or by HelloFailed if the head refuses
    or does not answer within *timeout_s*. *anew*: over a new connection, so that nothing is sent that was queued for a
    head that is gone.
    """

    incarnation: str
    timeout_s: float
    delay_s: float = 0.0
    anew: bool = False


class SendNotice(msgspec.Struct, frozen=True):
    """Send a notice to the head."""

    body: Body


class RecordOwner(msgspec.Struct, frozen=True):
    """Write to disk that the workers of *order*, which run already, have its owner now."""

    order: StartWorkers


class RenewLeases(msgspec.Struct, frozen=True):
    """Let robot workers go on until then."""

    until: float
    lease_s: float


class EndsAcknowledged(msgspec.Struct, frozen=True):
    """Forget how these workers ended: the head knows, or need not know."""

    ids: list[str]


class CloseWorkers(msgspec.Struct, frozen=True):
    """End all workers and templates for good. Answered by WorkersClosed."""

    grace_s: float
    reason: str = ""


class CreditLogs(msgspec.Struct, frozen=True):
    """Let the owner have more lines of its workers' output, of that cost (LogLines.cost)."""

    chars: int
    owner: str


class CheckHead(msgspec.Struct, frozen=True):
    """Find out whether the head's machine answers within so many seconds. Answered by HeadChecked."""

    timeout_s: float


class LogStatus(msgspec.Struct, frozen=True):
    """Log a line, and show it as the service's status. `urgent`: a person has to act; `warns`: something was lost."""

    text: str
    urgent: bool = False
    warns: bool = False


class Registration(msgspec.Struct, frozen=True):
    """Note that the head has registered this node (again), with a lease of that length."""

    epoch: str
    lease_s: float


class EndAgent(msgspec.Struct, frozen=True):
    """End the process. Code 78 means that starting agentd again would not help."""

    code: int
    text: str


Command = Union[
    SayHello, SendNotice, StartWorkers, RecordOwner, StopWorkers, RenewLeases, EndsAcknowledged, CloseWorkers,
    CreditLogs, FlushLogs, Watch, Unwatch, LookForHardware, StopLooking, CheckHead, LogStatus, Registration, EndAgent,
]  # fmt: skip
