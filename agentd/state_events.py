"""The events that `AgentState.handle` takes, and the commands that it returns (agentd.node_state). Plain data.

Some commands are messages of the head that the state passes on: StopWorkers, those of PASSED_ON, and StartWorkers
without the workers that run already.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.agent_messages import (
    FlushLogs,
    HardwareFound,
    LeaseEnded,
    LogLines,
    LookForHardware,
    OutputLost,
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
from rlinf_actors.wire.node_questions import AskAgent
from rlinf_actors.wire.values import RunningWorker

Report = Union[
    WorkerReady, WorkerExited, LeaseEnded, WorkersHealth, OutputLost, LogLines
]  # a message of agentd.workers to the head

# --- events ---


class StartSession(msgspec.Struct, frozen=True):
    """Event: agentd is set up, so the state can say hello to the head. It is the first event, except for
    WorkersAdopted.
    """


class Welcomed(msgspec.Struct, frozen=True):
    """Event: the head has registered this node; *welcome* is its answer to the hello."""

    welcome: Welcome


class HelloFailed(msgspec.Struct, frozen=True):
    """Event: the head refused agentd's hello, or did not answer it in time."""

    error: Exception


class HelloWaits(msgspec.Struct, frozen=True):
    """Event: the head has not answered agentd's hello in time, but the connection to it stands. The hello is not
    repeated: Welcomed or HelloFailed follows.
    """

    text: str  # for people


class HeadNotice(msgspec.Struct, frozen=True):
    """Event: the head sent the message *body*, which needs no reply."""

    body: Body


class WorkersReported(msgspec.Struct, frozen=True):
    """Event: agentd.workers has the message *report* for the head."""

    report: Report


class ConnectionLost(msgspec.Struct, frozen=True):
    """Event: the connection to the head broke and works again. Messages in both directions may be lost."""


class HardwareAnswered(msgspec.Struct, frozen=True):
    """Event: a hardware query that the head ordered has ended. *found* is the message with its result."""

    found: HardwareFound


class ProcessEnded(msgspec.Struct, frozen=True):
    """Event: a client process that agentd watches for the head has ended. *incarnation* identifies the client."""

    incarnation: str


class NodeDescribed(msgspec.Struct, frozen=True):
    """Event: the description of this node has changed, and the head must get it."""


class HeadChecked(msgspec.Struct, frozen=True):
    """Event: the command CheckHead has been carried out. *there* is True if the head's machine answered, even if no
    head runs on it. *stands* is True if it has also received all that agentd sent, by a connection that stands.
    """

    there: bool
    stands: bool = False


class Tick(msgspec.Struct, frozen=True):
    """Event: the time that `AgentState.next_deadline` returned has come."""


class Stalled(msgspec.Struct, frozen=True):
    """Event: agentd's process stood still for *seconds*. This time does not count as silence of the head."""

    seconds: float


class WorkersAdopted(msgspec.Struct, frozen=True):
    """Event: agentd took over *workers* of an earlier agentd. This event comes before all others."""

    workers: list[RunningWorker]  # running, or ended with exit reports that the head may not have
    since: float = 0.0  # time of the loop at which the last registered agentd of this node ended; 0 if unknown


class HandOver(msgspec.Struct, frozen=True):
    """Event: agentd was told to end at once and to leave its workers running for the next agentd."""

    reason: str


class StopAgent(msgspec.Struct, frozen=True):
    """Event: agentd was told to end all workers and then itself. If *grace_s* is None, `Policy.stop_grace_s`
    is used.
    """

    reason: str
    grace_s: Union[float, None] = None


class WorkersClosed(msgspec.Struct, frozen=True):
    """Event: the command CloseWorkers has been carried out, so no worker and no template is left."""


Event = Union[
    StartSession, Welcomed, HelloFailed, HelloWaits, HeadNotice, WorkersReported, HardwareAnswered, ProcessEnded,
    NodeDescribed, HeadChecked, Tick, Stalled, WorkersAdopted, HandOver, StopAgent, WorkersClosed, ConnectionLost,
]  # fmt: skip


# --- commands ---


class SayHello(msgspec.Struct, frozen=True):
    """Command: register this node with the head. The event Welcomed or HelloFailed follows."""

    incarnation: str
    timeout_s: float  # after which a missing answer counts as HelloFailed
    delay_s: float = 0.0  # wait before the hello is made
    anew: bool = False  # make a new connection first, which drops messages that wait for the previous head


class SendNotice(msgspec.Struct, frozen=True):
    """Command: send the message *body* to the head. No reply follows."""

    body: Body


class RecordOwner(msgspec.Struct, frozen=True):
    """Command: write to disk that the running workers in *order* now belong to the client that *order* names
    as owner.
    """

    order: StartWorkers


class RenewLeases(msgspec.Struct, frozen=True):
    """Command: extend the lease of robot workers to *until* (time of the loop). A lease is *lease_s* seconds long."""

    until: float
    lease_s: float


class EndsAcknowledged(msgspec.Struct, frozen=True):
    """Command: drop the exit reports of the workers *ids*, because the head has them or does not need them."""

    ids: list[str]


class CloseWorkers(msgspec.Struct, frozen=True):
    """Command: end all workers and templates, with *grace_s* seconds between SIGTERM and SIGKILL. The event
    WorkersClosed follows.
    """

    grace_s: float
    reason: str = ""


class CreditLogs(msgspec.Struct, frozen=True):
    """Command: allow agentd to send more worker output to the job whose namespace is *owner*: lines with a
    LogLines.cost of at most *chars*.
    """

    chars: int
    owner: str


class CheckHead(msgspec.Struct, frozen=True):
    """Command: check whether the head's machine answers within *timeout_s*. The event HeadChecked follows."""

    timeout_s: float


class LogStatus(msgspec.Struct, frozen=True):
    """Command: log *text*, and show it as the status of the systemd service. The log level is ERROR if *urgent*,
    WARNING if *warns*, otherwise INFO.
    """

    text: str
    urgent: bool = False
    warns: bool = False


class Registration(msgspec.Struct, frozen=True):
    """Command: note that the head has registered this node, for the first time or again. agentd sends workers' output
    again, tells the workers of it, and forgets the lost workers that the hello reported.
    """

    epoch: str  # identifies one run of the head
    lease_s: float  # seconds of silence after which the head counts this node as lost
    again: bool = False  # the same head had registered this agentd before: messages may be lost


class EndAgent(msgspec.Struct, frozen=True):
    """Command: end agentd's process with exit code *code*. After code 78 systemd does not restart agentd."""

    code: int
    text: str


PASSED_ON = (
    AskAgent, FlushLogs, LookForHardware, StopLooking, Watch, Unwatch,
)  # fmt: skip
"""Messages of the head that the state passes on as they are."""

Command = Union[
    SayHello, SendNotice, StartWorkers, RecordOwner, StopWorkers, RenewLeases, EndsAcknowledged, CloseWorkers,
    CreditLogs, FlushLogs, Watch, Unwatch, LookForHardware, AskAgent, StopLooking, CheckHead, LogStatus,
    Registration, EndAgent,
]  # fmt: skip
