"""The values inside control messages: nodes, workers, groups, and how they end.

House rules: a value is a frozen struct in this file; user data never rides in one.

How a worker ended, as a clause for people. Pure.
"""

from __future__ import annotations

import signal as signals
from typing import Literal, Union

import msgspec

from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.protocol import Number, Pid, Size, WorkerId


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the structs inside messages."""


class HardwareReport(Value, frozen=True):
    """One piece of hardware. `detail` holds the fields that `type` adds (plain values)."""

    type: str
    model: str
    detail: dict[str, Union[str, int, float, bool, list[str], None]] = {}


class ResourceReport(Value, frozen=True):
    """All pieces of one type, in the order of their local ranks.

    `registered_by` is the module that registered an accelerator type which is not built in, else "".
    """

    type: str
    infos: list[HardwareReport]
    registered_by: str = ""


class Extension(Value, frozen=True):
    """Code that registers hardware types, as one process tells another to load it.

    `name` is a module or ``module:attribute``; `group` is the group of its entry point, "RLINF_EXT_MODULE" for the
    module of that variable, "" for a module that registers by being imported. `package` is for people.
    """

    name: str
    group: str = ""
    package: str = ""


class HardwareQuestion(Value, frozen=True):
    """Which hardware of one type a node group has on a node. `configs` is JSON: the configuration's entries for the
    node, null without any. The rest says what process finds it there: `env` is on top of the node's environment,
    `sys_path` are the asker's import paths, `extensions` what it loaded itself; `limit_s` is how long it may take.
    """

    type: str
    node_rank: int
    configs: str = "null"
    interpreter: Union[str, None] = None
    env: dict[str, str] = {}
    path_env_merge_mode: str = "append"
    sys_path: list[str] = []
    extensions: list[Extension] = []
    limit_s: Number = 10.0


class Piece(Value, frozen=True):
    """One piece of configured hardware. `cls` is ``module:qualname`` of its info class, `detail` the JSON object of the
    fields that the class adds.
    """

    type: str
    model: str
    cls: str = ""
    detail: str = "{}"
    identity: str = ""
    claim_keys: list[str] = []


class HardwareAnswer(Value, frozen=True):
    """What a node said to a HardwareQuestion: its pieces, or what is wrong.

    `kind` is "" without a fault; "config": the type refuses its configuration, `path` says where in it;
    "unregistered": the node does not know the type; "failed": the process that looks crashed, hung or talked nonsense.
    """

    pieces: list[Piece] = []
    kind: str = ""
    text: str = ""
    path: str = ""


class NodeReport(Value, frozen=True):
    """What an agent knows of its node.

    `node_id` stays the same when agentd restarts; `host` is equal for processes that share a
    kernel and a network namespace; `rank` is RLINF_NODE_RANK or None; `interface` has the address `ip`. `env_vars` are
    the variables of its workers that choose devices and interfaces: a launch must not contradict them.
    """

    node_id: str
    hostname: str
    ip: str
    host: str
    num_cpus: int
    memory_bytes: int
    python: str
    interpreter: str
    rank: Union[int, None] = None
    resources: list[ResourceReport] = []
    env_vars: dict[str, str] = {}
    labels: dict[str, str] = {}
    interfaces: dict[str, str] = {}
    faults: list[str] = []
    profilers: list[str] = []
    port: int = 0
    interface: str = ""


class NodeState(Value, frozen=True):
    """A node as the head sees it. `state` is ready, suspect, draining or lost; `rank` -1 before it is fixed. `draining`
    says why it takes no new workers and who wants that, "" if it takes some; a lost node's drain waits for it.
    """

    report: NodeReport
    incarnation: str
    rank: int
    state: str
    last_seen_s: float
    is_head: bool = False
    draining: str = ""


class Claim(Value, frozen=True):
    """Something that one group alone may use while its worker lives, such as a robot. `key` is equal for two claims
    of one thing, `title` names it for people.
    """

    key: str
    title: str


class RobotStop(Value, frozen=True):
    """A robot worker that an emergency stop is for. `reached` is False where its node is silent: its lease ends there
    without a word from us.
    """

    worker: str
    namespace: str
    robots: list[str]
    node: str
    reached: bool


class WorkerSpec(Value, frozen=True):
    """What an agent needs to start one worker process. `env` is what the placement and the
    configuration ask for; the agent adds its node's. `token` proves membership of the job.
    `claims` are the robots it was placed on. `numa_nodes` are those of its accelerators, -1 where unknown, if it is to
    be bound to them. `owner_must_answer`: the head ends the group if its owner does not answer beats for a robot lease,
    although an agent sees the owner's process: "always", "elsewhere" (if the robot is on another host), "" for never.
    `memory_limit` is in bytes, `pids_limit` in processes and threads, both for it and all that it
    starts; with `limits_best_effort` it starts also where they cannot hold. `incarnation` counts the restarts of its
    rank.
    """

    id: WorkerId
    group: str
    namespace: str
    rank: int
    world_size: Size
    node_rank: int
    env: dict[str, str]
    path_env_merge_mode: str = "append"
    interpreter: Union[str, None] = None
    start_method: str = "fork"
    preload: list[str] = []
    sys_path: list[str] = []
    cwd: Union[str, None] = None
    log_dir: Union[str, None] = None
    forward_logs: bool = True
    token: str = ""
    claims: list[Claim] = []
    numa_nodes: list[int] = []
    memory_limit: Union[int, None] = None
    pids_limit: Union[int, None] = None
    limits_best_effort: bool = False
    restart: Union[RestartPolicy, None] = None
    incarnation: int = 0
    owner_must_answer: str = ""


class Endpoint(Value, frozen=True):
    """Where a worker listens. `ipc` is usable by processes whose host is `host`."""

    host: str
    ipc: str = ""
    tcp: str = ""


class ExitReport(Value, frozen=True):
    """How a worker ended. `kind`: exited, signalled, start_failed, node_lost, stopped.
    `oom`: no, suspected, yes.
    """

    kind: str
    exit_code: Union[int, None] = None
    signal: Union[int, None] = None
    oom: str = "no"
    stderr_tail: list[str] = []
    reason: str = ""


class WorkerHealth(Value, frozen=True):
    """What an agent sees of a worker that is up: `unresponsive` says why there is no answer of its I/O thread, "" if
    there is; `method` is a call that has been running for long, with `waiting` more behind it. Either for `for_s`.
    """

    id: str
    unresponsive: str = ""
    method: str = ""
    for_s: Number = 0.0
    waiting: int = 0


class WorkerPulse(Value, frozen=True):
    """The same as the head tells it: `since` is in seconds since the epoch, by the head's clock."""

    unresponsive: str = ""
    method: str = ""
    since: Number = 0.0
    waiting: int = 0


class WorkerState(Value, frozen=True):
    """One worker of a group as the head sees it. `state`: restarting, starting, running, stopping, gone. `restarts`
    counts those of its rank; `exit` is how it ended, or how the incarnation before it did. `pulse` is
    set while it does not answer, or has been in one call for long: it lives all the same.
    """

    id: str
    rank: int
    node_rank: int
    node_ip: str
    state: str
    pid: Pid = 0
    endpoint: Union[Endpoint, None] = None
    port: int = 0
    master_port: int = 0
    exit: Union[ExitReport, None] = None
    restarts: int = 0
    pulse: Union[WorkerPulse, None] = None


class RunningWorker(Value, frozen=True):
    """One worker as its agent tells a head that may not know it. `endpoint` is None before it is ready;
    `exit` is set for one that ended while no head listened. `owner`, `cls`, `detail` and `detached` are its
    StartWorkers'.
    """

    spec: WorkerSpec
    owner: str
    cls: str = ""
    detail: str = ""
    pid: Pid = 0
    endpoint: Union[Endpoint, None] = None
    port: int = 0
    master_port: int = 0
    exit: Union[ExitReport, None] = None
    detached: bool = False


class GroupState(Value, frozen=True):
    """A group as the head sees it. `cls` is module:qualname of the worker class, for people.
    `detail` is JSON that the launching client wrote for those who attach (placements and the like). `detached`: no
    client owns it, and it ends by name alone.
    """

    namespace: str
    name: str
    cls: str
    owner: str
    state: str
    workers: list[WorkerState]
    token: str = ""
    detail: str = ""
    detached: bool = False


class GroupHandle(Value, frozen=True):
    """A group as a client that has a handle of it knows it: its workers, those that have ended too."""

    namespace: str
    name: str
    workers: list[WorkerState]


class LeaseState(Value, frozen=True):
    """A piece of exclusive hardware that a group holds, as the head sees it; `key` and `title` are its Claim's.

    `state` is held, or lost: its worker's node was lost, and the worker may still be running; it is free in
    `free_in_s` seconds at the latest then. `owner` is for people.
    """

    key: str
    title: str
    namespace: str
    group: str
    owner: str
    workers: list[str]
    nodes: list[str]
    state: str
    held_s: float
    free_in_s: Union[float, None] = None


EventKind = Literal[
    "head_started", "events_missing",
    "node_joined", "node_suspect", "node_heard", "node_lost", "node_left",
    "node_draining", "node_drained", "node_undrained",
    "driver_joined", "driver_ended", "refused",
    "group_launched", "group_adopted", "group_ended",
    "worker_started", "worker_unresponsive", "worker_responsive", "worker_restarted", "worker_stopped", "worker_died",
    "lease_lost", "robot_conflict", "estop", "estop_released",
    "key_added", "key_enrolled", "key_rotated", "key_ended",
]  # fmt: skip
"""What can happen in a cluster. `events_missing` is said by a reader in place of those that the head does not keep any
more; `node_heard` ends node_suspect, `node_drained` says that nothing runs on a draining node any more; a worker that
was asked to end is `worker_stopped`, and so is the host of a channel that was closed; any other end is `worker_died`.
"""


class ClusterEvent(Value, frozen=True):
    """One entry of the cluster's event log.

    Attributes:
        seq: its number in this head's log, from 1 on; what is not kept any more leaves gaps.
        at: when the head saw it, in seconds since the epoch by the head's clock.
        kind: what happened.
        text: one line for people.
        node: hostname of the node that it happened on, "" for none.
        node_id: of the node.
        namespace: of the job, "" for what concerns the whole cluster.
        group: name of the group.
        rank: of the worker, None where it is about none.
        worker_id: of the worker; another one after each restart.
        pid: of the worker's or driver's process, 0 where there is none.
        exit: how a worker ended, with the last lines of its stderr.
    """

    seq: int
    at: Number
    kind: EventKind
    text: str
    node: str = ""
    node_id: str = ""
    namespace: str = ""
    group: str = ""
    rank: Union[int, None] = None
    worker_id: str = ""
    pid: Pid = 0
    exit: Union[ExitReport, None] = None


CHANNEL_GROUPS = "channel@"
"""Before a channel's name: the name of the group of its hosts."""

_MEMORY = {"yes": "; it was out of memory", "suspected": "; out of memory suspected"}


def ending(report: ExitReport) -> str:
    """For example ``was ended by signal 9 (SIGKILL); out of memory suspected``, to follow the worker's name."""
    reason = f"; {report.reason}" if report.reason else ""
    if report.kind == "start_failed":
        return f"could not be started: {report.reason}"
    if report.kind == "node_lost":
        return f"is gone with its node: {report.reason or 'the node stopped answering'}"
    if report.signal is not None:
        try:
            how = f"was ended by signal {report.signal} ({signals.Signals(report.signal).name})"
        except ValueError:
            how = f"was ended by signal {report.signal}"
    elif report.exit_code is not None:
        how = f"exited with code {report.exit_code}"
    else:
        how = "ended, and nobody saw how"
    return f"{how}{_MEMORY.get(report.oom, '')}{reason}"


def orderly(group: str, report: ExitReport) -> bool:
    """True if this end of a worker of *group* is no failure.

    A worker that was asked to end is stopped. The host of a channel exits with code 0 by itself once the channel was
    closed and every item was taken.
    """
    if report.kind == "stopped":
        return True
    return report.kind == "exited" and report.exit_code == 0 and group.startswith(CHANNEL_GROUPS)
