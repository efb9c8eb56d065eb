"""Control messages between agentd and the head (workers, hardware, processes, output), and those of every session.

A "notice to an agentd" is sent by the head to agentd, a "notice of an agentd" by agentd to the head. No reply follows a
notice.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, Union

import msgspec
from msgspec import Meta

from rlinf_actors.wire import values
from rlinf_actors.wire.bounds import Document, FewOf, Line, Lines, Name, OfGroup, OfNode, Path, Reasons, Text
from rlinf_actors.wire.launch_rules import Launcher
from rlinf_actors.wire.program import Program
from rlinf_actors.wire.protocol import ControlMessage, Lease, Number, Pid, RobotLease

LINE_COST = 32
"""Credit that a line of output takes in addition to its characters, so that empty lines are not free."""


ForDriverT = TypeVar("ForDriverT", bound="ForDriver")


class ForDriver(ControlMessage, frozen=True, kw_only=True):
    """Fields of a notice that makes an agentd run code for a driver.

    Attributes:
        driver: name of the driver's key to which the job belongs, "" if no driver has a key. It decides as which user
            the code runs.
        driver_groups: the groups of drivers to which that driver belongs.
        nested: True if a worker of the job asks, and not its driver.
    """

    driver: Name = ""
    driver_groups: FewOf[Name] = ()
    nested: bool = False

    @property
    def launcher(self) -> Launcher:
        return Launcher(self.driver, self.driver_groups, self.nested)

    def asked_by(self: ForDriverT, by: Launcher) -> ForDriverT:
        """Return this notice, for *by*."""
        return msgspec.structs.replace(self, driver=by.driver, driver_groups=by.groups, nested=by.nested)


class StartWorkers(ForDriver, frozen=True):
    """Notice to an agentd: start these workers. For each of them agentd sends a WorkerReady or WorkerExited.

    A worker that agentd already has is not started again; if `detached` is True, agentd stores `owner` and `detached`
    for this worker, and if the group was resized (`resizes` of the spec), the spec and `detail`.

    Attributes:
        owner: incarnation of the client that owns the group, "" if no client owns it.
        cls: "module:qualname" of the worker class.
        detail: description of the group in JSON (placements and the like), for a restarted head; "" on most nodes.
        detached: True if the group outlives the client that launched it.
        owned_by: which process `owner` is, for people; "" without an owner.
    """

    workers: OfGroup[values.WorkerSpec]
    owner: Name = ""
    cls: Name = ""
    detail: Document = ""
    detached: bool = False
    owned_by: Text = ""


class StopWorkers(ControlMessage, frozen=True):
    """Notice to an agentd: end these workers by SIGTERM, and by SIGKILL after `grace_s` seconds.

    The agentd revokes the lease of a robot worker instead of sending a signal. It ignores unknown ids. `reason` says
    why the workers end; "" if their owner asked for it.
    """

    ids: OfGroup[Name]
    grace_s: Number
    reason: Text = ""


class LookForHardware(ForDriver, frozen=True):
    """Notice to an agentd: enumerate hardware as `question` says, and send HardwareFound with the same id."""

    id: Name
    question: values.HardwareQuestion


class HardwareFound(ControlMessage, frozen=True):
    """Notice of an agentd: the answer to the LookForHardware with this id. The head ignores an unknown id."""

    id: Name
    answer: values.HardwareAnswer


class StopLooking(ControlMessage, frozen=True):
    """Notice to an agentd: the answer to the LookForHardware or AskAgent with this id is not needed any more.

    The agentd ignores an unknown id.
    """

    id: Name


class Watch(ControlMessage, frozen=True):
    """Notice to an agentd: watch the process of this client on agentd's host, and report its end by ProcessGone.

    `incarnation` identifies the client. `pid_start` is the start time of the process in clock ticks since boot.
    """

    incarnation: Name
    pid: Pid
    pid_start: int


class Unwatch(ControlMessage, frozen=True):
    """Notice to an agentd: stop watching the process of this client, whose session has ended.

    The agentd ignores an unknown client.
    """

    incarnation: Name


class ProcessGone(ControlMessage, frozen=True):
    """Notice of an agentd: the watched process of this client has ended."""

    incarnation: Name


class WorkerReady(ControlMessage, frozen=True):
    """Notice of an agentd: the runtime of this worker listens at `endpoint`. Its class is not constructed yet.

    `port` is the TCP port of `endpoint`, 0 for none. `master_port` is a free TCP port that rank 0 holds as MASTER_PORT;
    0 for other ranks.
    """

    id: Name
    pid: Pid
    endpoint: values.Endpoint
    port: int = 0
    master_port: int = 0


class WorkerExited(ControlMessage, frozen=True):
    """Notice of an agentd: this worker has ended or could not be started, as `exit` says.

    `refused` is True if the rules of the node did not admit who launched it.
    """

    id: Name
    exit: values.ExitReport
    refused: bool = False


class LeaseEnded(ControlMessage, frozen=True):
    """Notice of an agentd: the lease of this robot worker has ended, for the reason `text`. The worker ends next.

    Groups that it has launched make their robots safe at the same time.
    """

    id: Name
    text: Text


class WorkersHealth(ControlMessage, frozen=True):
    """Notice of an agentd: the health of those workers whose health has changed.

    A worker's health changes when its I/O thread stops or resumes answering, or when a long call begins or ends.
    """

    workers: OfNode[values.WorkerHealth]


class OutputLost(ControlMessage, frozen=True):
    """Notice of an agentd: output of the worker `id` is lost, as `text` says; "" if it is written again."""

    id: Name
    text: Text = ""


UPDATE = "\r"
"""Last character of a line that is the state of a progress bar: the next line of the stream replaces that line."""
CUT = " [continues]"
"""End of a piece of a line that was longer than agentd reads at once: the next line of the stream continues it."""
MAX_LOG_WAIT_S = 60.0
MAX_PATH = 4096


class LogLines(ControlMessage, frozen=True):
    """Output lines of workers, sent by agentd to the head and by the head to the first driver of the workers' job.

    Attributes:
        owner: the namespace of the job.
        node: the host name of the workers' node, for people; the driver's LogCredit repeats it.
        entries: the lines, each as (group:rank, "out" or "err", text).
        skipped: number of lines left out here; the log files have them.
        final: True if this is the answer to FlushLogs.
        left: number of further lines that will not be shown, because their workers, this agentd or the driver ended.
        where: path on the node of the file or directory with those lines.
    """

    owner: Name
    node: Name
    entries: Lines[tuple[Name, Name, Line]]
    skipped: int = 0
    final: bool = False
    left: Annotated[int, Meta(ge=0, le=2**53)] = 0
    where: Path = ""

    @property
    def cost(self) -> int:
        """Credit that the lines take from the job's window: their characters, and LINE_COST for each line."""
        return sum(line_cost(text) for _, _, text in self.entries)


def line_cost(text: str) -> int:
    """Return the credit that a line takes from its job's window: the number of its characters plus LINE_COST."""
    return len(text) + LINE_COST


class FlushLogs(ControlMessage, frozen=True):
    """Ask for the remaining output of a job's workers within `wait_s` seconds, because the driver is about to end.

    A driver sends it to the head as a request, which the head answers by Flushing. The head passes it as a notice to
    the nodes that have, or had, workers of the job, and each of their agentds sends a LogLines whose `final` is True.
    `owner` is the job's namespace.
    """

    owner: Name
    wait_s: Annotated[float, Meta(ge=0.0, le=MAX_LOG_WAIT_S)]


class Flushing(ControlMessage, frozen=True):
    """Reply to FlushLogs. `agents` is the number of nodes that will send a final LogLines."""

    agents: int


class LogCredit(ControlMessage, frozen=True):
    """Answer to LogLines: lines that cost `chars` of credit were printed or dropped, so agentd may send as much again.

    The driver sends it to the head, and the head to agentd. `owner` and `node` are those of the LogLines.
    """

    owner: Name
    node: Name
    chars: int


class AgentHello(ControlMessage, frozen=True):
    """First message of an agentd, answered by Welcome or Failed.

    Attributes:
        protocol: the protocol that the agentd speaks.
        version: its version of rlinf-actors, for people.
        incarnation: id of this run of agentd.
        node: report of the node.
        is_head: True if the head runs in this agentd.
        workers: every worker that the agentd has. A restarted head restores its groups from these.
        keeps: True if workers without robots survive the end of this agentd for one lease, so that the next agentd can
            take them over.
        ended: workers of an earlier agentd that this one had to end because it could not take them over: the reason by
            worker id.
        watched: incarnations of the clients whose processes the agentd watches. Those processes live, however long the
            clients are silent.
        user: the user that the agentd says it runs as.
        secret: a secret that only agentds in this run directory know, by which a restarted agentd proves to the head
            that it may take the place of the one before; "" for none.
        pid, program: its process, for people.
    """

    protocol: int
    version: Name
    incarnation: Name
    node: values.NodeReport
    is_head: bool = False
    workers: OfNode[values.RunningWorker] = []
    keeps: bool = False
    ended: Reasons = {}
    watched: OfNode[Name] = []
    user: Name = ""
    secret: Name = ""
    pid: Pid = 0
    program: Program = Program()


class ClientHello(ControlMessage, frozen=True):
    """First message of a driver, a worker or a child of a worker, answered by Welcome or Failed.

    Attributes:
        protocol: the protocol that the client speaks.
        version: its version of rlinf-actors, for people.
        incarnation: id of this run of the client.
        role: "driver" or "worker". A child of a worker has the role "worker".
        namespace: name of the job.
        host: host key of the client's machine.
        pid: the client's process. The agentds on the same host watch it.
        pid_start: start time of that process in clock ticks since boot (field 22 of /proc/PID/stat).
        worker_id: id of the worker or child, "" for a driver.
        token: the job's membership token. A worker has it from its start, a returning driver from its first Welcome.
        parent: worker id of a child's parent, "" for other clients.
        program: who runs what, from a driver.
    """

    protocol: int
    version: Name
    incarnation: Name
    role: Name
    namespace: Name
    host: Name
    pid: Pid
    pid_start: int
    worker_id: Name = ""
    token: Name = ""
    parent: Name = ""
    program: Program = Program()


class Welcome(ControlMessage, frozen=True):
    """The head's answer to a hello.

    Attributes:
        epoch: id of this run of the head.
        version: the head's version of rlinf-actors, for people.
        beat_s: seconds between two beats of the receiver.
        lease_s: seconds of silence after which the head gives the receiver up. The receiver gives the head up when the
            head's machine has not answered for the same time.
        token: the job's membership token, "" for an agentd.
        robot_lease_s: length of a robot worker's lease. Agentds with robot workers beat four times in it, owners of
            robot workers eight times.
        head_grace_s: seconds for which the head may be silent while its machine answers.
    """

    epoch: Name
    version: Name
    beat_s: Lease
    lease_s: Lease
    token: Name = ""
    robot_lease_s: RobotLease = 2.0
    head_grace_s: Number = 120.0


class Goodbye(ControlMessage, frozen=True):
    """Last message of a session that the sender ends on purpose.

    An agentd or client says that it ends. The head says to clients that the cluster ends, unless `lost` or
    `restarting` is True.

    Attributes:
        reason: why, for people.
        lost: True if the head has declared the receiving client dead, and refuses it from now on.
        restarting: True if the head was stopped and will return, so that workers and groups continue.
    """

    reason: Text = ""
    lost: bool = False
    restarting: bool = False


HELLO_AGAIN = "hello?"
"""The `incarnation` in the head's Beat to a peer without a session. That peer must send its hello again."""


class Beat(ControlMessage, frozen=True):
    """Heartbeat. Agentds and clients send one in every beat interval, and the head answers with its own.

    Attributes:
        incarnation: the sender's incarnation; the head's epoch in its answers.
        at: time at which the sender sent its beat, in seconds of its monotonic clock; the head's answer repeats the
            number. A robot lease is counted from that time, because the head was surely alive after it.
        word: the head's monotonic clock in its answers. A client repeats the number in its next beat (0 before the
            first answer), so that the head knows that its messages reach the client.
    """

    incarnation: Name = ""
    at: Number = 0.0
    word: Number = 0.0


AgentMessage = Union[
    AgentHello, ClientHello, Welcome, Goodbye, Beat, StartWorkers, StopWorkers, LookForHardware, HardwareFound,
    StopLooking, Watch, Unwatch, ProcessGone, WorkerReady, WorkerExited, LeaseEnded,
    WorkersHealth,
    OutputLost, LogLines, LogCredit, FlushLogs, Flushing,
]  # fmt: skip
"""Every control message of this file."""
