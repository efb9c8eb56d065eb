"""Control messages that begin, keep and end a session: what every peer of the head says."""

from __future__ import annotations

from rlinf_actors.wire.bounds import Number, Pid
from rlinf_actors.wire.protocol import Message
from rlinf_actors.wire.values import NodeReport, RunningWorker


class AgentHello(Message, frozen=True):
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


class ClientHello(Message, frozen=True):
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


class Welcome(Message, frozen=True):
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


class Goodbye(Message, frozen=True):
    """Sent by whoever ends a session on purpose. `lost`: the head has given up on the process that it is sent to.

    `restarting`: the head was stopped and is expected back, so that nothing ends.
    """

    reason: str = ""
    lost: bool = False
    restarting: bool = False


HELLO_AGAIN = "hello?"
"""The `incarnation` of the head's Beat to a peer that it does not know: it is to say hello (again)."""


class Beat(Message, frozen=True):
    """Sent every beat by agents and clients; the head answers with a Beat of its own (`incarnation`: its epoch).

    `at` is the sender's monotonic clock, in seconds; the answer repeats it. What a robot worker may still do is
    counted from then, when the head was certainly not yet silent, and not from when the answer came.

    `word` is the head's clock, in its answers to clients, which repeat it in their next beat (0 before the
    first answer). So the head knows that its words arrive, and not only that the client's do.
    """

    incarnation: str = ""
    at: Number = 0.0
    word: Number = 0.0
