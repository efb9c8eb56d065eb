"""What goes into agentd's state and what comes out."""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.agent_messages import (
    HardwareFound,
    LogLines,
    StartWorkers,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.values import HardwareQuestion, RunningWorker

Report = Union[WorkerReady, WorkerExited, WorkersHealth, LogLines]
"""What the children of an agent report, for the head."""

# --- what happens ---


class Start(msgspec.Struct, frozen=True):
    """Everything is set up: begin."""


class Welcomed(msgspec.Struct, frozen=True):
    """The head took us."""

    welcome: Welcome


class HelloFailed(msgspec.Struct, frozen=True):
    """The head refused, or did not answer."""

    error: Exception


class Heard(msgspec.Struct, frozen=True):
    """A notice of the head."""

    body: Body


class FromWorkers(msgspec.Struct, frozen=True):
    """What the children report."""

    report: Report


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to the head was lost, and is there again: what we or it said may be missing."""


class Looked(msgspec.Struct, frozen=True):
    """A look for hardware has ended."""

    found: HardwareFound


class ProcessEnded(msgspec.Struct, frozen=True):
    """A watched process is gone."""

    incarnation: str


class HeadLooked(msgspec.Struct, frozen=True):
    """The head was silent and we looked: `there` says that its machine answers, whether or not a head runs there."""

    there: bool


class Tick(msgspec.Struct, frozen=True):
    """`next_deadline` has come."""


class Stalled(msgspec.Struct, frozen=True):
    """We stood still for so many seconds: the head was not silent."""

    seconds: float


class Adopted(msgspec.Struct, frozen=True):
    """What an earlier agentd left is ours: workers that go on, and ends that the head may not know. Comes first.
    `since`: when the last agentd that the head had registered was gone, 0 if nobody knows.
    """

    workers: list[RunningWorker]
    since: float = 0.0


class HandOver(msgspec.Struct, frozen=True):
    """End at once; the workers go on for another agentd."""

    reason: str


class Drain(msgspec.Struct, frozen=True):
    """Stop for good; `grace_s` None for the policy's."""

    reason: str
    grace_s: Union[float, None] = None


class Empty(msgspec.Struct, frozen=True):
    """The children that were told to close are all gone."""


Event = Union[
    Start, Welcomed, HelloFailed, Heard, FromWorkers, Looked, ProcessEnded, HeadLooked, Tick, Stalled, Adopted,
    HandOver, Drain, Empty, ConnectionLost,
]  # fmt: skip


# --- what to do ---


class SayHello(msgspec.Struct, frozen=True):
    """Say hello after *delay_s*, with `running` as it is then. Answered by Welcomed or HelloFailed, the latter when
    it was refused or has waited *timeout_s*. *anew*: over a new connection, so that what was queued for a head that
    went away is not sent.
    """

    incarnation: str
    timeout_s: float
    delay_s: float = 0.0
    anew: bool = False


class Send(msgspec.Struct, frozen=True):
    """Send a notice to the head."""

    body: Body


class StartChildren(msgspec.Struct, frozen=True):
    """Start workers, as the head asked."""

    order: StartWorkers


class NoteOwner(msgspec.Struct, frozen=True):
    """Write down that workers which run already have this order's owner."""

    order: StartWorkers


class StopChildren(msgspec.Struct, frozen=True):
    """Stop workers; an unknown id is ignored."""

    ids: list[str]
    grace_s: float
    reason: str = ""


class RenewLeases(msgspec.Struct, frozen=True):
    """Robot workers may go on until then."""

    until: float
    lease_s: float


class Settled(msgspec.Struct, frozen=True):
    """The head knows how these workers ended, or need not know."""

    ids: list[str]


class CloseChildren(msgspec.Struct, frozen=True):
    """Stop all workers and templates for good. Answered by Empty."""

    grace_s: float
    reason: str = ""


class Credit(msgspec.Struct, frozen=True):
    """The owner has shown lines of its workers' output of that cost (LogLines.cost)."""

    chars: int
    owner: str


class FlushOutput(msgspec.Struct, frozen=True):
    """The owner ends: pass on what its workers wrote, for so many seconds. Answered by a LogLines that is `final`."""

    owner: str
    wait_s: float


class WatchProcess(msgspec.Struct, frozen=True):
    """Hold this process's pidfd. Answered by ProcessEnded."""

    incarnation: str
    pid: int
    pid_start: int


class UnwatchProcess(msgspec.Struct, frozen=True):
    """Let it go. Unknown ones are ignored."""

    incarnation: str


class LookForHardware(msgspec.Struct, frozen=True):
    """Ask a hardware type for its pieces here. Answered by Looked."""

    id: str
    question: HardwareQuestion


class StopLooking(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any more."""

    id: str


class LookAtHead(msgspec.Struct, frozen=True):
    """Find out whether the head's machine answers within so many seconds. Answered by HeadLooked."""

    timeout_s: float


class Say(msgspec.Struct, frozen=True):
    """A line for people: the service manager's status and the log. `urgent`: somebody has to do something; `warns`:
    something ended, or is out of reach.
    """

    text: str
    urgent: bool = False
    warns: bool = False


class Registered(msgspec.Struct, frozen=True):
    """The head took us (again); the lease that it gives is this long."""

    epoch: str
    lease_s: float


class Exit(msgspec.Struct, frozen=True):
    """End the process; 78 when starting again would not help."""

    code: int
    text: str


Action = Union[
    SayHello, Send, StartChildren, NoteOwner, StopChildren, RenewLeases, Settled, CloseChildren, Credit, FlushOutput,
    WatchProcess, UnwatchProcess, LookForHardware, StopLooking, LookAtHead, Say, Registered, Exit,
]  # fmt: skip
