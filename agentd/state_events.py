"""The events that `AgentState.handle` takes and the commands that it returns (agentd.node_state). Plain data.

Some commands are messages of the head from wire.agent_messages, which the state passes on: StopWorkers, FlushLogs,
Watch, Unwatch, LookForHardware, StopLooking, and StartWorkers without the workers that run already.
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
"""A message that agentd.workers has for the head."""

# --- events ---


class StartSession(msgspec.Struct, frozen=True):
    """agentd is set up: the session with the head can start."""


class Welcomed(msgspec.Struct, frozen=True):
    """The head has registered this node."""

    welcome: Welcome


class HelloFailed(msgspec.Struct, frozen=True):
    """The head refused the hello message, or did not answer it in time."""

    error: Exception


class HeadNotice(msgspec.Struct, frozen=True):
    """The head sent *body*, a message that expects no reply."""

    body: Body


class WorkersReported(msgspec.Struct, frozen=True):
    """agentd.workers has a message for the head."""

    report: Report


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to the head was lost and is restored: messages in both directions may be missing."""


class HardwareAnswered(msgspec.Struct, frozen=True):
    """A hardware query has ended with the result *found*."""

    found: HardwareFound


class ProcessEnded(msgspec.Struct, frozen=True):
    """A watched client process has ended. `incarnation` identifies the client."""

    incarnation: str


class HeadChecked(msgspec.Struct, frozen=True):
    """The reachability check of the head's machine has ended. `there`: True if it answers, even without a head."""

    there: bool


class Tick(msgspec.Struct, frozen=True):
    """The time that `AgentState.next_deadline` returned has come."""


class Stalled(msgspec.Struct, frozen=True):
    """agentd's process stood still for *seconds*, which must not count as silence of the head."""

    seconds: float


class WorkersAdopted(msgspec.Struct, frozen=True):
    """agentd took over the workers of an earlier agentd. This event comes before all others.

    Attributes:
        workers: running workers, and ended workers whose exit reports the head may not have.
        since: time of the loop at which the last registered agentd of this node ended; 0 if unknown.
    """

    workers: list[RunningWorker]
    since: float = 0.0


class HandOver(msgspec.Struct, frozen=True):
    """agentd must end at once and leave its workers running for the next agentd."""

    reason: str


class StopAgent(msgspec.Struct, frozen=True):
    """agentd must end all workers and then itself.

    Attributes:
        reason: why, for people.
        grace_s: seconds between SIGTERM and SIGKILL; None for `Policy.stop_grace_s`.
    """

    reason: str
    grace_s: Union[float, None] = None


class WorkersClosed(msgspec.Struct, frozen=True):
    """The command CloseWorkers is carried out: no worker and no template is left."""


Event = Union[
    StartSession, Welcomed, HelloFailed, HeadNotice, WorkersReported, HardwareAnswered, ProcessEnded, HeadChecked,
    Tick, Stalled, WorkersAdopted, HandOver, StopAgent, WorkersClosed, ConnectionLost,
]  # fmt: skip


# --- commands ---


class SayHello(msgspec.Struct, frozen=True):
    """Register with the head. The event Welcomed or HelloFailed follows.

    Attributes:
        incarnation: name of this incarnation of the node.
        timeout_s: seconds after which a missing answer counts as HelloFailed.
        delay_s: seconds to wait first; the hello lists the workers at the end of that wait.
        anew: True to make a new connection, which drops the messages that were queued for the previous head.
    """

    incarnation: str
    timeout_s: float
    delay_s: float = 0.0
    anew: bool = False


class SendNotice(msgspec.Struct, frozen=True):
    """Send *body* to the head and expect no reply."""

    body: Body


class RecordOwner(msgspec.Struct, frozen=True):
    """Write to disk that the running workers in *order* now belong to the owner that *order* names."""

    order: StartWorkers


class RenewLeases(msgspec.Struct, frozen=True):
    """Extend the robot lease: robot workers may run until *until* (time of the loop); *lease_s* is its full length."""

    until: float
    lease_s: float


class EndsAcknowledged(msgspec.Struct, frozen=True):
    """Drop the exit reports of these workers: the head has them or does not need them."""

    ids: list[str]


class CloseWorkers(msgspec.Struct, frozen=True):
    """End all workers and templates, with *grace_s* seconds between SIGTERM and SIGKILL. WorkersClosed follows."""

    grace_s: float
    reason: str = ""


class CreditLogs(msgspec.Struct, frozen=True):
    """Allow agentd to send *owner* more worker output: lines whose total LogLines.cost is at most *chars*."""

    chars: int
    owner: str


class CheckHead(msgspec.Struct, frozen=True):
    """Check whether the head's machine answers within *timeout_s*. The event HeadChecked follows."""

    timeout_s: float


class LogStatus(msgspec.Struct, frozen=True):
    """Log *text* and show it as the status of the service.

    Attributes:
        text: one line.
        urgent: True to log an error, because a person has to act.
        warns: True to log a warning, because something was lost.
    """

    text: str
    urgent: bool = False
    warns: bool = False


class Registration(msgspec.Struct, frozen=True):
    """Tell the workers' side that the head has registered this node, for the first time or again.

    Attributes:
        epoch: identifies one run of the head.
        lease_s: seconds of silence after which the head counts this node as lost.
    """

    epoch: str
    lease_s: float


class EndAgent(msgspec.Struct, frozen=True):
    """End agentd's process with exit code *code*. Code 78 tells systemd not to restart it."""

    code: int
    text: str


Command = Union[
    SayHello, SendNotice, StartWorkers, RecordOwner, StopWorkers, RenewLeases, EndsAcknowledged, CloseWorkers,
    CreditLogs, FlushLogs, Watch, Unwatch, LookForHardware, StopLooking, CheckHead, LogStatus, Registration, EndAgent,
]  # fmt: skip
