"""All control messages, and the envelopes they travel in: what `wire.codec` knows.

Who says what stands by speaker: `wire.session` (every peer of the head), `wire.clients` (drivers and workers),
`wire.agents`, `wire.operators` and `wire.keys` (people).

House rules: a message is a frozen struct in one of these files; user data never rides in one. Decoding
validates types, so that a message that got past the door is well formed. `Notice` needs no
answer; a `Request` gets exactly one `Reply` or `Failed`.
"""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire.agents import (
    Flushing,
    FlushLogs,
    HardwareFound,
    LogCredit,
    LogLines,
    LookForHardware,
    ProcessGone,
    RefusalReport,
    StartWorkers,
    StopLooking,
    StopWorkers,
    Unwatch,
    Watch,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.clients import (
    ClientGone,
    Detach,
    Done,
    Enumerated,
    EnumerateHardware,
    FindGroup,
    GetNodes,
    Handles,
    Launch,
    Launched,
    Nodes,
    StopCluster,
    StopGroup,
    Warn,
    WatchClients,
    WorkerChanged,
)
from rlinf_actors.wire.keys import AddKey, Enroll, Enrolled, GetKeys, Keys, RevokeKey, RotateKey
from rlinf_actors.wire.operators import (
    Drained,
    DrainNode,
    EndGroup,
    EStop,
    EStopped,
    Events,
    GetEvents,
    GetStatus,
    Status,
)
from rlinf_actors.wire.protocol import Message
from rlinf_actors.wire.session import AgentHello, Beat, ClientHello, Goodbye, Welcome

Body = Union[
    AgentHello, ClientHello, Welcome, Goodbye, Beat,
    GetNodes, Nodes, EnumerateHardware, Enumerated, Launch, Launched, FindGroup, Handles, Detach, StopGroup,
    WorkerChanged,
    WatchClients, ClientGone, Warn, StopCluster, Done,
    GetStatus, Status, GetEvents, Events, EStop, EStopped, EndGroup, DrainNode, Drained,
    StartWorkers, StopWorkers, LookForHardware, HardwareFound, StopLooking, Watch, Unwatch, ProcessGone, WorkerReady,
    WorkerExited, WorkersHealth, LogLines, LogCredit, FlushLogs, Flushing, RefusalReport,
    Enroll, RotateKey, Enrolled, AddKey, RevokeKey, GetKeys, Keys,
]  # fmt: skip
"""Every control message."""


class Request(Message, frozen=True, tag="req"):
    id: int
    body: Body


class Reply(Message, frozen=True, tag="rep"):
    id: int
    body: Body


class Failed(Message, frozen=True, tag="err"):
    """A request that was refused. `kind` names the error class at the asker (net.rpc.refusal):
    hello (say hello first, then ask again), config, placement, timeout,
    name_in_use, hardware_in_use, not_found, unreachable, authentication, protocol, usage, node_lost, emergency_stop.
    """

    id: int
    kind: str
    text: str
    missing_ranks: list[int] = []
    path: str = ""


class Notice(Message, frozen=True, tag="not"):
    body: Body


Envelope = Union[Request, Reply, Failed, Notice]
