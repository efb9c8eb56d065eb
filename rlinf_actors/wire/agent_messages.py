"""Control messages of agents and the head (workers, hardware, processes, output), and those that every session has."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rlinf_actors.wire.protocol import ControlMessage, Count, Number, Pid
from rlinf_actors.wire.values import (
    Endpoint,
    ExitReport,
    HardwareAnswer,
    HardwareQuestion,
    NodeReport,
    RunningWorker,
    Value,
    WorkerHealth,
    WorkerSpec,
)

MAX_REFUSALS = 256
"""In one report; who keeps them for one has room for fewer kinds (security.refusals)."""

LINE_COST = 32
"""Credit that a line of output takes beside its characters, since keeping it does: empty ones would go on for ever."""


class StartWorkers(ControlMessage, frozen=True):
    """Notice to an agent. Its answer, per worker, is WorkerReady or WorkerExited; ids it knows are
    ignored, but for `owner` and `detached`, which an agent takes over where `detached` is set (since protocol 7).
    `owner` is the incarnation of the client that owns the group, `cls` and `detail` are its Launch's.
    `detached`: another client launched it, and the owner may have no handle of it; without an owner it ends by name.
    """

    workers: list[WorkerSpec]
    owner: str = ""
    cls: str = ""
    detail: str = ""
    detached: bool = False


class StopWorkers(ControlMessage, frozen=True):
    """Notice to an agent: SIGTERM, and SIGKILL after `grace_s`. Unknown ids are ignored. Robot workers lose their
    lease instead. `reason`: why, where it is not the owner's wish.
    """

    ids: list[str]
    grace_s: Number
    reason: str = ""


class LookForHardware(ControlMessage, frozen=True):
    """Notice to an agent, which answers with HardwareFound of the same id."""

    id: str
    question: HardwareQuestion


class HardwareFound(ControlMessage, frozen=True):
    """Notice of an agent; an id that nobody waits for any more is ignored."""

    id: str
    answer: HardwareAnswer


class StopLooking(ControlMessage, frozen=True):
    """Notice to an agent: nobody waits for that answer any more. Unknown ids are ignored."""

    id: str


class Watch(ControlMessage, frozen=True):
    """Notice to an agent: say ProcessGone when this process of your host ends."""

    incarnation: str
    pid: Pid
    pid_start: int


class Unwatch(ControlMessage, frozen=True):
    """Notice to an agent: that client is gone, although its process may go on. Unknown ones are ignored."""

    incarnation: str


class ProcessGone(ControlMessage, frozen=True):
    incarnation: str


class WorkerReady(ControlMessage, frozen=True):
    """A worker's runtime listens; its class is not constructed yet."""

    id: str
    pid: Pid
    endpoint: Endpoint
    port: int = 0
    master_port: int = 0


class WorkerExited(ControlMessage, frozen=True):
    id: str
    exit: ExitReport


class WorkersHealth(ControlMessage, frozen=True):
    """Notice of an agent: these workers answer or do not answer, or are in one call for long, other than before."""

    workers: list[WorkerHealth]


class Refusal(Value, frozen=True):
    """Somebody whom a socket did not let in, `times` since that was said last. `text` follows "refused" in a line for
    people: what, and why. `worker` is the id of the worker whose socket it was, "" for a template's.
    """

    text: str
    times: Count = 1
    worker: str = ""


class RefusalReport(ControlMessage, frozen=True):
    """Notice of an agent or template of an earlier version: peers that sockets of its node rejected. Ignored.

    No process of this version sends it. It stays until the oldest protocol that is served is newer than 7.
    """

    refusals: Annotated[list[Refusal], Meta(max_length=MAX_REFUSALS)]


UPDATE = "\r"
"""At the end of a line's text: the state of a progress bar, which the next line of that stream takes the place of."""
MAX_LOG_WAIT_S = 60.0
MAX_PATH = 4096


class LogLines(ControlMessage, frozen=True):
    """Lines that workers wrote, on their way agent -> head -> owner. `entries` are
    (group:rank, stream, text); `skipped` says that lines were left out here (never in the files). `left` lines more
    will not be shown, since their workers, or this agent, have ended, or the owner does (`final`: the answer to
    FlushLogs); they are in `where`, a file or directory of the node.
    """

    owner: str
    node: str
    entries: list[tuple[str, str, str]]
    skipped: int = 0
    final: bool = False
    left: Annotated[int, Meta(ge=0, le=2**53)] = 0
    where: Annotated[str, Meta(max_length=MAX_PATH)] = ""

    @property
    def cost(self) -> int:
        """What they take of the owner's credit; see line_cost."""
        return sum(line_cost(text) for _, _, text in self.entries)


def line_cost(text: str) -> int:
    """What a line takes of its owner's credit: its characters, and LINE_COST."""
    return len(text) + LINE_COST


class FlushLogs(ControlMessage, frozen=True):
    """The owner ends: show what its workers wrote, for *wait_s* seconds at most.

    Request of the driver to the head, answered by Flushing; then notice of the head to the agents of the job's nodes.
    Each answers with a LogLines that is `final`.
    """

    owner: str
    wait_s: Annotated[float, Meta(ge=0.0, le=MAX_LOG_WAIT_S)]


class Flushing(ControlMessage, frozen=True):
    """The answer to FlushLogs: so many agents will answer."""

    agents: int


class LogCredit(ControlMessage, frozen=True):
    """The owner's answer to LogLines: lines of that cost were shown; send more."""

    owner: str
    node: str
    chars: int


class AgentHello(ControlMessage, frozen=True):
    """First message of an agent; answered by Welcome or Failed. `workers` is all it has: a head that
    was restarted learns its groups from there.

    `keeps`: workers without robots go on for a lease when this agent ends, and the next incarnation lists them. `ended`
    are ids of workers of an earlier one that it could not take over and ended, and why. `watched` are the clients whose
    processes it watches, for this head or the one before: they are there, however long they are silent. It speaks
    `protocol` (the oldest) to `newest` (0: the same).
    """

    protocol: int
    version: str
    incarnation: str
    node: NodeReport
    is_head: bool = False
    workers: list[RunningWorker] = []
    keeps: bool = False
    ended: dict[str, str] = {}
    watched: list[str] = []
    newest: int = 0


class ClientHello(ControlMessage, frozen=True):
    """First message of a driver or worker. `pid` and `pid_start` (clock ticks since boot, field
    22 of /proc/PID/stat) let the agent on the same host watch the process. `token` is the job's: a worker was given it
    when it was started, a driver that comes back has it from its first Welcome. The client speaks
    `protocol` (the oldest) to `newest` (0: the same). A child of a worker (protocol 7) has the role "worker", an id of
    its own as `worker_id`, and its worker's as `parent`.
    """

    protocol: int
    version: str
    incarnation: str
    role: str
    namespace: str
    host: str
    pid: Pid
    pid_start: int
    worker_id: str = ""
    token: str = ""
    newest: int = 0
    parent: str = ""


class Welcome(ControlMessage, frozen=True):
    """The head's answer to a hello. `token` is the job's membership token (clients only). Agents with robot workers
    beat four times in `robot_lease_s`, owners of such workers eight times. `head_grace_s` is how long the head may be
    silent while its machine answers. `protocol` is the one that this session speaks.
    """

    epoch: str
    version: str
    beat_s: Number
    lease_s: Number
    token: str = ""
    robot_lease_s: Number = 2.0
    head_grace_s: Number = 120.0
    protocol: int = 5  # a head of protocol 5 does not say


class Goodbye(ControlMessage, frozen=True):
    """Sent by whoever ends a session on purpose. `lost`: the head has given up on the process that it is sent to.

    `restarting`: the head was stopped and is expected back, so that nothing ends.
    """

    reason: str = ""
    lost: bool = False
    restarting: bool = False


HELLO_AGAIN = "hello?"
"""The `incarnation` of the head's Beat to a peer that it does not know: it is to say hello (again)."""


class Beat(ControlMessage, frozen=True):
    """Sent every beat by agents and clients; the head answers with a Beat of its own (`incarnation`: its epoch).

    `at` is the sender's monotonic clock, in seconds; the answer repeats it. What a robot worker may still do is
    counted from then, when the head was certainly not yet silent, and not from when the answer came.

    `word` is the head's clock, in its answers to clients, which repeat it in their next beat (0 before the
    first answer). So the head knows that its words arrive, and not only that the client's do.
    """

    incarnation: str = ""
    at: Number = 0.0
    word: Number = 0.0
