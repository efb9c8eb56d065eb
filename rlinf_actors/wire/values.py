"""Values inside control messages: nodes, workers, groups, ends of workers, events. Pure.

House rules: a value is a frozen struct in this file and never carries user data.
"""

from __future__ import annotations

import signal as signals
from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta

from rlinf_actors.model.profiler import Profiler
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.protocol import Number, Pid, Port, Size, WorkerId


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the structs that are fields of control messages."""


class HardwareReport(Value, frozen=True):
    """One piece of hardware. `detail` holds the fields that are specific to `type` (plain values)."""

    type: str
    model: str
    detail: dict[str, Union[str, int, float, bool, list[str], None]] = {}


class ResourceReport(Value, frozen=True):
    """All pieces of one hardware type on a node, in the order of their local ranks.

    `registered_by` is the module that registered an accelerator type that is not built in, else "".
    """

    type: str
    infos: list[HardwareReport]
    registered_by: str = ""


class Extension(Value, frozen=True):
    """Code that registers hardware types. One process sends it so that another process loads the same code.

    Attributes:
        name: a module or ``module:attribute``.
        group: group of the entry point, "RLINF_EXT_MODULE" for that variable's module, "" for an imported module.
        package: package that contains the code, for people.
    """

    name: str
    group: str = ""
    package: str = ""


class HardwareQuestion(Value, frozen=True):
    """Request to a node: report the hardware of one type that a node group has there.

    Attributes:
        configs: JSON of the configuration's entries for the node, "null" without entries.
        interpreter: interpreter of the process that enumerates the hardware, None for the node's default.
        env: environment variables of that process, on top of the node's.
        path_env_merge_mode: how variables such as PATH are merged if both environments set them: "append" puts the
            directories of `env` before the node's, "override" replaces the node's value.
        sys_path: import paths of the requesting process.
        extensions: extensions that the requesting process has loaded.
        limit_s: time limit in seconds.
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
    """One piece of configured hardware, such as a robot, that a node has enumerated (hardware.configured).

    Attributes:
        cls: ``module:qualname`` of the piece's subclass of HardwareInfo. The receiver restores that class if it is
            loaded.
        detail: JSON object of the fields that this class adds.
        identity: `HardwareInfo.identity`, for a receiver that has not loaded the class.
        claim_keys: `HardwareInfo.claim_keys`: a worker that uses the piece claims each key. Empty to claim the piece by
            its node and number.
    """

    type: str
    model: str
    cls: str = ""
    detail: str = "{}"
    identity: str = ""
    claim_keys: list[str] = []


class HardwareAnswer(Value, frozen=True):
    """Answer of a node to a HardwareQuestion: its pieces, or a fault.

    Attributes:
        kind: "" without a fault; "config" if the type rejects its configuration; "unregistered" if the node does not
            know the type; "failed" if the enumerating process crashed, hung or sent an invalid answer.
        text: the fault, for people.
        path: place of the fault in the configuration, for "config".
    """

    pieces: list[Piece] = []
    kind: str = ""
    text: str = ""
    path: str = ""


class NodeReport(Value, frozen=True):
    """Facts about a node that its agentd reports in its hello.

    Attributes:
        node_id: id of the node, which stays the same when agentd restarts.
        hostname: the configured name of the node, else the machine's.
        host: host key, equal for processes that share a kernel and a network namespace.
        python: Python version of `interpreter`, which agentd uses for workers unless they name another.
        rank: RLINF_NODE_RANK, None if it is not set.
        resources: the hardware that the probe has found, by type.
        env_vars: variables of the node's workers that choose devices and interfaces. A launch must not contradict them.
        labels: labels of the node from agentd's configuration.
        interfaces: the first IPv4 address of each network interface, by the interface's name.
        faults: a sentence for people about each thing that agentd's hardware probe could not read.
        profilers: back-ends of `cluster.profiling` whose programs the node allows and has.
        port: unused, always 0.
        interface: name of the network interface that has the address `ip`.
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
    """A node as the head sees it.

    Attributes:
        incarnation: id of the present or last run of the node's agentd.
        rank: its rank in the cluster, -1 before the rank is fixed.
        state: registering (known to the earlier head, not back yet), ready, suspect, draining or lost.
        last_seen_s: seconds since its agentd's last message; since the start of this head before the first message.
        is_head: True if the head runs in the node's agentd.
        draining: the reason of its drain and who asked for the drain, "" if the node is not drained. The drain of a
            lost node stays in force for its return.
    """

    report: NodeReport
    incarnation: str
    rank: int
    state: str
    last_seen_s: float
    is_head: bool = False
    draining: str = ""


class Claim(Value, frozen=True):
    """Exclusive use of something, such as a robot, by one group while its worker lives.

    `key` is equal for two claims of the same thing. `title` names the thing for people. With `shared`, groups of the
    same namespace whose claims are shared too may use it at the same time.
    """

    key: str
    title: str
    shared: bool = False


class RobotStop(Value, frozen=True):
    """A robot worker that an emergency stop tells to make its robots safe.

    If its node does not answer, `reached` is False; the worker's lease then expires without a message.
    """

    worker: str
    namespace: str
    robots: list[str]
    node: str
    reached: bool


class WorkerSpec(Value, frozen=True):
    """Everything that an agentd needs from the head to start one worker process.

    Attributes:
        env: variables from the placement and the configuration; agentd adds those of its node.
        token: membership token of the job.
        claims: the robots on which the worker was placed.
        numa_nodes: NUMA nodes of its accelerators, -1 for unknown; empty if the worker is not to be bound to them.
        memory_limit: bytes for the worker and its descendants, None for no limit.
        pids_limit: processes and threads of the worker and its descendants, None for no limit.
        limits_best_effort: True to start the worker also where these limits cannot be enforced.
        incarnation: number of restarts of its rank so far.
        keep_logs: True if the job's driver writes log files, so that agentd must send it the whole output.
        profiler: the program under which the worker is started, None for none.
        trace_events: number of trace events that the worker keeps; 0 to record no trace.
        owner_must_answer: whether the head ends the group if its owner has not answered beats for the length of a robot
            lease, but an agentd still sees the owner's process: "always", "elsewhere" (only if the robot is on another
            host than the owner) or "" (never).
        resizes: number of times that the group was resized before it had `world_size` ranks; -1 for a rank that is
            being added, and is no member of the group yet.
        code: hash of the driver's code that the worker runs, "" if it runs what its node has.
        code_paths: directories of that code on the node: the whole tree, then those that go first on the import path.
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
    keep_logs: bool = False
    token: str = ""
    claims: list[Claim] = []
    numa_nodes: list[int] = []
    memory_limit: Union[int, None] = None
    pids_limit: Union[int, None] = None
    limits_best_effort: bool = False
    restart: Union[RestartPolicy, None] = None
    incarnation: int = 0
    owner_must_answer: str = ""
    resizes: Annotated[int, Meta(ge=-1, le=1 << 40)] = 0
    code: str = ""
    code_paths: list[str] = []
    profiler: Union[Profiler, None] = None
    trace_events: Annotated[int, Meta(ge=0, le=1 << 22)] = 0


class Endpoint(Value, frozen=True):
    """Addresses on which a worker listens. Only processes whose host key is `host` can use `ipc`.

    `bulk` is the port for bulk streams at the IP address of `tcp`, 0 for none.
    """

    host: str
    ipc: str = ""
    tcp: str = ""
    bulk: Port = 0


class ExitReport(Value, frozen=True):
    """How a worker ended.

    `kind` is exited, signalled (killed by `signal`), start_failed, node_lost or stopped (by order). `oom` says whether
    the worker was killed for memory: no, suspected or yes. `reason` is text for people.
    """

    kind: str
    exit_code: Union[int, None] = None
    signal: Union[int, None] = None
    oom: str = "no"
    stderr_tail: list[str] = []
    reason: str = ""


class WorkerHealth(Value, frozen=True):
    """Health of a running worker, as its agentd sees it.

    Attributes:
        unresponsive: reason why the worker's I/O thread does not answer, "" if it answers.
        method: a call that has been running for long, "" for none.
        for_s: seconds for which the silence, or else the call, has lasted.
        waiting: number of calls queued behind `method`.
    """

    id: str
    unresponsive: str = ""
    method: str = ""
    for_s: Number = 0.0
    waiting: int = 0


class WorkerPulse(Value, frozen=True):
    """Health of a worker, as the head reports it: a WorkerHealth with a start time instead of a duration.

    `since` is in seconds since the epoch, by the head's clock.
    """

    unresponsive: str = ""
    method: str = ""
    since: Number = 0.0
    waiting: int = 0


class WorkerState(Value, frozen=True):
    """One worker of a group as the head sees it.

    Attributes:
        state: restarting, starting, running, stopping or gone.
        exit: how the worker ended, or how the previous incarnation of its rank ended; None if there is no such end.
        restarts: number of restarts of its rank.
        pulse: set while the worker does not answer or has been in one call for long. Such a worker is still alive.
        code: hash of the driver's code that it runs, "" if it runs what its node has.
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
    code: str = ""


class RunningWorker(Value, frozen=True):
    """One worker as its agentd reports it to a head that may not know it.

    Attributes:
        owner, cls, detail, detached: those of its StartWorkers.
        endpoint: None before the worker is ready.
        exit: how the worker ended, if it ended while the agentd had no session with a head; else None.
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
    """A group as the head sees it.

    Attributes:
        cls: "module:qualname" of the worker class, for people.
        owner: incarnation of the client that owns the group.
        state: starting, running, restarting, degraded (some workers have ended), stopping or gone.
        token: the job's membership token for a client that gets a handle, else "".
        detail: description of the group in JSON (placements and the like), for clients that attach to it later.
        detached: True if no client owns the group, so that it ends only by a request that names it.
        world_size: number of ranks, 0 from a head that does not say it.
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
    world_size: int = 0


class GroupHandle(Value, frozen=True):
    """A group as a client with a handle of it knows it. `workers` includes those that have ended.

    `detail` is that of the Launch if the client owns the group, else "".
    """

    namespace: str
    name: str
    workers: list[WorkerState]
    detail: str = ""


class LeaseState(Value, frozen=True):
    """A piece of exclusive hardware that a group holds, as the head sees it.

    Attributes:
        key: the claim's key.
        title: the claim's title.
        owner: the group's owner, for people.
        state: "held", or "lost" if the worker's node was lost and the worker may still be running.
        held_s: seconds since the lease was granted.
        free_in_s: seconds after which a lost lease ends at the latest, None for a held lease.
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
"""Kinds of events in a cluster.

A reader inserts `events_missing` in place of events that the head no longer keeps. `node_heard` ends node_suspect.
`node_drained` means that no worker is left on a draining node. `worker_stopped` is the end of a worker that was asked
to end, or of the host of a closed channel; every other end of a worker is `worker_died`.
"""


class ClusterEvent(Value, frozen=True):
    """One entry of the cluster's event log.

    Attributes:
        seq: its number in this head's log, from 1 on. Entries that are no longer kept leave gaps.
        at: time at which the head saw it, in seconds since the epoch by the head's clock.
        kind: the kind of event.
        text: one line for people.
        node: hostname of the node in question, "" for none.
        node_id: id of that node.
        namespace: name of the job, "" for an event of the whole cluster.
        group: name of the group.
        rank: rank of the worker, None for an event without a worker.
        worker_id: id of the worker; it changes with each restart.
        pid: process id of the worker or driver, 0 for none.
        exit: how the worker ended, with the last lines of its stderr.
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
"""Prefix of the names of channel groups: the hosts of channel NAME are the group "channel@NAME"."""

_MEMORY = {"yes": "; it was out of memory", "suspected": "; out of memory suspected"}


def ending(report: ExitReport) -> str:
    """Return how a worker ended, as a clause that follows the worker's name.

    For example ``was ended by signal 9 (SIGKILL); out of memory suspected``.
    """
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
    """True if this end of a worker of *group* is not a failure.

    The end is orderly if the worker was asked to end. It is also orderly if the worker hosts a channel and exited with
    code 0: a host exits by itself once the channel is closed and every item was taken.
    """
    if report.kind == "stopped":
        return True
    return report.kind == "exited" and report.exit_code == 0 and group.startswith(CHANNEL_GROUPS)
