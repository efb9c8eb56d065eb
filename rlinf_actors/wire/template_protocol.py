"""Packets between agentd, its templates and their workers: a struct in each packet of a unix SOCK_SEQPACKET socket.

A template is the small process that forks workers. agentd never runs user code and never imports what workers need, so
the fork happens in the template. A packet is at most MAX_PACKET bytes.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.agent_messages import RefusalReport
from rlinf_actors.wire.protocol import MALFORMED, ControlMessage, Number, Pid
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerSpec

MAX_PACKET = 1 << 20
"""SO_SNDBUF is raised to hold it; an environment near ARG_MAX/2 still fits."""


TEXT_CHARS = 1000
"""Most of a text that others than the packet's sender have chosen, such as names: what is too long cannot be sent, and
the packet with many of them neither.
"""


class WorkerPlace(ControlMessage, frozen=True):
    """What a worker process is told of where it runs; the agent's part beside the WorkerSpec.

    `run_dir` is where its ipc socket goes, `listen_ip` the address to bind TCP on ("" for ipc
    only), `head` the coordinator's endpoint, `head_key` its public key where the cluster has keys, `node` the node's
    name for messages to people, `out_path`/`err_path` the files its stdout and stderr are drained to. A robot worker's
    lease lasts `lease_s` from the last beat that the head answered; `lease_until` is its end as known so far
    (CLOCK_MONOTONIC, in seconds).
    """

    run_dir: str
    host: str
    head: str
    node: str
    node_ip: str
    listen_ip: str
    out_path: str
    err_path: str
    lease_until: Number = 0.0
    lease_s: Number = 0.0
    head_key: str = ""


# --- agentd to template ---


class Fork(ControlMessage, frozen=True):
    """Start one worker. `env` is its whole environment; nothing of the template's is kept."""

    spec: WorkerSpec
    place: WorkerPlace
    env: dict[str, str]


class Watching(ControlMessage, frozen=True):
    """agentd holds a pidfd of this worker: the template may reap it once it ends."""

    id: str


class Renew(ControlMessage, frozen=True):
    """The leases of this node's robot workers last until then (CLOCK_MONOTONIC, in seconds). Passed on to them."""

    until: Number


class Revoke(ControlMessage, frozen=True):
    """To a robot worker, through its template: its lease is over. It makes its robots safe, and ends. `orderly`: its
    owner wanted that, so no lease was lost.
    """

    id: str
    reason: str
    orderly: bool = False


class Probe(ControlMessage, frozen=True):
    """Answered at once by Pulses. Each worker that has answered the last Ping is sent another one."""


class Ping(ControlMessage, frozen=True):
    """To a worker, from its template. Its I/O thread answers with Pong."""


class Shutdown(ControlMessage, frozen=True):
    """Kill what is left, reap it, and exit."""


class Adopt(ControlMessage, frozen=True):
    """First packet of an agentd that takes over a template of an earlier one. Answered by a SurvivingWorker for each
    worker, then Inventory.
    """


class KeepFor(ControlMessage, frozen=True):
    """The head has registered this agentd. How many seconds a template waits for another one when it is gone."""

    seconds: Number


class Settled(ControlMessage, frozen=True):
    """The head knows how these workers ended: nobody will ask again."""

    ids: list[str]


class DevicesLocked(ControlMessage, frozen=True):
    """To a worker, through its template: the accelerators that it asked for are its own; see LockDevices."""

    id: str
    request: int


class DevicesBusy(ControlMessage, frozen=True):
    """To a worker, through its template: it has waited that long; `text` says for whom."""

    id: str
    request: int
    waited_s: Number
    text: str


# --- template to agentd ---


class TemplateReady(ControlMessage, frozen=True):
    """`forks` is False when it must spawn instead; `why` then says what is running in it.

    `paths` is the interpreter's sys.path. `installed` is the fingerprint of what was there before the template imported
    it (rlinf_actors.installed).
    """

    pid: Pid
    python: str
    forks: bool
    why: str = ""
    installed: str = ""
    paths: list[str] = []


class TemplateFailed(ControlMessage, frozen=True):
    """The interpreter cannot run workers (package missing, too old); `text` says what to do."""

    text: str


class Forked(ControlMessage, frozen=True):
    id: str
    pid: Pid


class WorkerUp(ControlMessage, frozen=True, tag="Up"):
    """The worker's runtime listens."""

    id: str
    endpoint: Endpoint
    port: int
    master_port: int


class StartFailed(ControlMessage, frozen=True):
    """From a worker before WorkerUp: it cannot start. It ends next; its Exited carries the text as reason."""

    id: str
    text: str


class LeaseLost(ControlMessage, frozen=True):
    """From a robot worker: its lease is over, and why. It ends within moments; its Exited carries the text."""

    id: str
    text: str


class LogsGrew(ControlMessage, frozen=True, tag="Grew"):
    """There is more in these workers' log files; one is sent per file until agentd says Read with `to_end`."""

    ids: list[str]


class LogsLost(ControlMessage, frozen=True):
    """This worker's output cannot be written (a full disk), or, with `text` "", can be again."""

    id: str
    text: str


class Read(ControlMessage, frozen=True):
    """agentd to template: a worker's log files were read so far (bytes, and the file's inode), and their lines handed
    on; an agentd after this one goes on there. `to_end`: tell me when they grow again.
    """

    id: str
    out: tuple[int, int]
    err: tuple[int, int]
    to_end: bool = True


class LockDevices(ControlMessage, frozen=True):
    """From a worker: it wants its accelerators for itself. Answered by DevicesLocked when they are free; `request`
    is a number that it has not used before.
    """

    id: str
    request: int


class UnlockDevices(ControlMessage, frozen=True):
    """From a worker: it gives that request up, whether or not it was granted yet."""

    id: str
    request: int


class Pong(ControlMessage, frozen=True):
    """From a worker: its I/O thread runs. `method` is the call that has been running longest, since `since`
    (CLOCK_MONOTONIC, in seconds); "" for none. `waiting` calls are queued behind it.
    """

    id: str
    method: Annotated[str, msgspec.Meta(max_length=TEXT_CHARS)] = ""
    since: Number = 0.0
    waiting: int = 0


class Pulses(ControlMessage, frozen=True):
    """A template's answer to Probe: what its workers have answered since the Pulses before. One that comes late is
    sent as it comes.
    """

    pongs: list[Pong]


class Exited(ControlMessage, frozen=True):
    id: str
    exit: ExitReport


class SurvivingWorker(ControlMessage, frozen=True, tag="Kept"):
    """A worker, as a template tells an agentd that takes it over.

    `pid` is not given to another process before Watching; `up` is what the worker said when it listened; `exit` is how
    it ended, where the head may not know yet. `out_read` and `err_read` are the last Read's. `request` is its number in
    LockDevices, 0 without one; it is `granted`, or waits since `asked_at` (CLOCK_MONOTONIC, in seconds).
    """

    id: str
    pid: Pid = 0
    up: Union[WorkerUp, None] = None
    exit: Union[ExitReport, None] = None
    out_path: str = ""
    err_path: str = ""
    out_read: tuple[int, int] = (0, 0)
    err_read: tuple[int, int] = (0, 0)
    request: int = 0
    granted: bool = False
    asked_at: Number = 0.0


class Inventory(ControlMessage, frozen=True):
    """Every SurvivingWorker was sent. `since`: when the last agentd that the head had registered was gone
    (CLOCK_MONOTONIC, in seconds). `installed` and `paths` are those of TemplateReady.
    """

    since: Number
    installed: str = ""
    paths: list[str] = []


LEASE_LOST_CODE = 76
"""Exit code of a robot worker that ended because its lease was over."""
ON_LEASE_LOST_S = 1.0
"""How long a robot worker's on_lease_lost may take, in seconds."""
ROBOT_END_S = 1.5
"""When a robot worker that was told of its lease's end is killed: on_lease_lost, and half a second around it."""

ToWorker = Union[DevicesLocked, DevicesBusy, Renew, Revoke, Ping]
ToTemplate = Union[
    Fork, Watching, Read, Shutdown, Probe, Adopt, KeepFor, Settled, DevicesLocked, DevicesBusy, Renew, Revoke
]
ToAgent = Union[
    TemplateReady, TemplateFailed, Forked, WorkerUp, StartFailed, LeaseLost, LogsGrew, LogsLost, LockDevices,
    UnlockDevices, Exited, Pong, Pulses, SurvivingWorker, Inventory, RefusalReport,
]  # fmt: skip
"""RefusalReport comes from templates of an earlier version alone; agentd ignores it."""

_encoder = msgspec.msgpack.Encoder()
_to_template: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(packet: ToTemplate | ToAgent | ToWorker) -> bytes:
    """One packet as bytes."""
    return _encoder.encode(packet)


def decode_to_template(data: bytes | memoryview) -> ToTemplate:
    """Raises RemoteWireError when *data* is no such packet."""
    try:
        return _to_template.decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not a packet for a template: {error}") from None


def decode_to_agent(data: bytes | memoryview) -> ToAgent:
    """Raises RemoteWireError when *data* is no such packet."""
    try:
        return _to_agent.decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not a packet for agentd: {error}") from None


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    """Raises RemoteWireError when *data* is no such packet."""
    try:
        return _to_worker.decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not a packet for a worker: {error}") from None
