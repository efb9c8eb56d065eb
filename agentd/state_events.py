"""The events that `AgentState.handle` takes, and the commands that it returns (agentd.node_state). Plain data.

Some commands are messages of the head (wire.agent_messages) that the state passes on: StopWorkers, FlushLogs, Watch,
Unwatch, LookForHardware, StopLooking, and StartWorkers without the workers that run already.
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

Report = Union[WorkerReady, WorkerExited, WorkersHealth, LogLines]  # a message of agentd.workers to the head

# --- events ---


class StartSession(msgspec.Struct, frozen=True):
    """agentd is set up, and may say hello to the head. The first event, except for WorkersAdopted."""


class Welcomed(msgspec.Struct, frozen=True):
    """The head has registered this node and answered with *welcome*."""

    welcome: Welcome


class HelloFailed(msgspec.Struct, frozen=True):
    """The head refused agentd's hello, or did not answer it in time."""

    error: Exception


class HeadNotice(msgspec.Struct, frozen=True):
    """The head sent the message *body*, which expects no reply."""

    body: Body


class WorkersReported(msgspec.Struct, frozen=True):
    """agentd.workers has a message for the head."""

    report: Report


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to the head broke and is restored. Messages in both directions may be missing."""


class HardwareAnswered(msgspec.Struct, frozen=True):
    """A hardware query that the head ordered has ended with *found*."""

    found: HardwareFound


class ProcessEnded(msgspec.Struct, frozen=True):
    """A client process that the head had agentd watch has ended. `incarnation` identifies the client."""

    incarnation: str


class HeadChecked(msgspec.Struct, frozen=True):
    """The command CheckHead has a result. `there`: True if the head's machine answered, even without a head."""

    there: bool


class Tick(msgspec.Struct, frozen=True):
    """The time that `AgentState.next_deadline` returned has come."""


class Stalled(msgspec.Struct, frozen=True):
    """agentd's process stood still for *seconds*, which must not count as silence of the head."""

    seconds: float


class WorkersAdopted(msgspec.Struct, frozen=True):
    """agentd took over workers of an earlier agentd. This event comes before all others."""

    workers: list[RunningWorker]  # running, or ended with exit reports that the head may not have
    since: float = 0.0  # time of the loop at which the last registered agentd of this node ended; 0 if unknown


class HandOver(msgspec.Struct, frozen=True):
    """agentd was told to end at once and to leave its workers running for the next agentd."""

    reason: str


class StopAgent(msgspec.Struct, frozen=True):
    """agentd was told to end all workers and itself. `grace_s` None stands for `Policy.stop_grace_s`."""

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
    """Register with the head. The event Welcomed or HelloFailed follows."""

    incarnation: str
    timeout_s: float  # after which a missing answer counts as HelloFailed
    delay_s: float = 0.0  # wait before the hello is made
    anew: bool = False  # make a new connection first, which drops messages that wait for the previous head


class SendNotice(msgspec.Struct, frozen=True):
    """Send *body* to the head; no reply follows."""

    body: Body


class RecordOwner(msgspec.Struct, frozen=True):
    """Write to disk that the running workers in *order* now belong to the client that *order* names as owner."""

    order: StartWorkers


class RenewLeases(msgspec.Struct, frozen=True):
    """Extend the lease of robot workers, `lease_s` long, to *until* (time of the loop)."""

    until: float
    lease_s: float


class EndsAcknowledged(msgspec.Struct, frozen=True):
    """Drop the exit reports of the workers *ids*: the head has them or does not need them."""

    ids: list[str]


class CloseWorkers(msgspec.Struct, frozen=True):
    """End all workers and templates, with *grace_s* from SIGTERM to SIGKILL. The event WorkersClosed follows."""

    grace_s: float
    reason: str = ""


class CreditLogs(msgspec.Struct, frozen=True):
    """Allow *owner*, a job's namespace, to get more worker output: lines with a LogLines.cost of at most *chars*."""

    chars: int
    owner: str


class CheckHead(msgspec.Struct, frozen=True):
    """Check whether the head's machine answers within *timeout_s*. The event HeadChecked follows."""

    timeout_s: float


class LogStatus(msgspec.Struct, frozen=True):
    """Log *text* (an error if `urgent`, a warning if `warns`) and show it as the service's status."""

    text: str
    urgent: bool = False
    warns: bool = False


class Registration(msgspec.Struct, frozen=True):
    """Resume output and forget lost workers, since the head has registered this node, for the first time or again."""

    epoch: str  # identifies one run of the head
    lease_s: float  # seconds of silence after which the head counts this node as lost


class EndAgent(msgspec.Struct, frozen=True):
    """End agentd's process with exit code *code*. With code 78 systemd does not restart agentd."""

    code: int
    text: str


Command = Union[
    SayHello, SendNotice, StartWorkers, RecordOwner, StopWorkers, RenewLeases, EndsAcknowledged, CloseWorkers,
    CreditLogs, FlushLogs, Watch, Unwatch, LookForHardware, StopLooking, CheckHead, LogStatus, Registration, EndAgent,
]  # fmt: skip
