"""Values inside control messages: nodes, workers, groups, ends of workers, events. Pure.

House rules: a value is a frozen struct in this file and never carries user data.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta

from rlinf_actors.model.profiler import Profiler
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.wire.bounds import (
    Address,
    Details,
    Document,
    Few,
    FewOf,
    Ip,
    Name,
    OfCluster,
    OfGroup,
    Path,
    Some,
    SomeOf,
    Text,
    Title,
    Variables,
)
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.protocol import Number, Pid, Port, Size, WorkerId


class Value(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of the structs that are fields of control messages.

    A value never refers to itself, so the garbage collector need not look at it: a head keeps a hundred thousand. What
    a head keeps for each worker has tuples in place of lists, because the collector looks at each list, also at an
    empty one, and at no tuple of such values.
    """


class HardwareReport(Value, frozen=True):
    """One piece of hardware. `detail` holds the fields that are specific to `type` (plain values)."""

    type: Name
    model: Name
    detail: Details = {}


class ResourceReport(Value, frozen=True):
    """All pieces of one hardware type on a node, in the order of their local ranks.

    `registered_by` is the module that registered an accelerator type that is not built in, else "".
    """

    type: Name
    infos: Some[HardwareReport]
    registered_by: Name = ""


class Extension(Value, frozen=True):
    """Code that registers hardware types. One process sends it so that another process loads the same code.

    Attributes:
        name: a module or ``module:attribute``.
        group: group of the entry point, "RLINF_EXT_MODULE" for that variable's module, "" for an imported module.
        package: package that contains the code, for people.
    """

    name: Name
    group: Name = ""
    package: Name = ""


class HardwareQuestion(Value, frozen=True):
    """Request to a node: report the hardware of one type that a node group has there.

    Attributes:
        configs: JSON of the configuration's entries for the node, "null" without entries.
        interpreter: interpreter of the process that enumerates the hardware, None for the node's default.
        env: environment variables of that process, on top of the node's.
        path_env_merge_mode: how variables such as PATH are merged if both environments set them: "append" puts the
            directories of `env` before the node's, "override" replaces the node's value.
        sys_path, extensions: import paths and loaded extensions of the requesting process.
        limit_s: time limit in seconds.
    """

    type: Name
    node_rank: int
    configs: Document = "null"
    interpreter: Union[Path, None] = None
    env: Variables = {}
    path_env_merge_mode: Name = "append"
    sys_path: Some[Path] = []
    extensions: Some[Extension] = []
    limit_s: Number = 10.0


class Identity(Value, frozen=True):
    """What tells a robot from all others, such as a serial number, a numeric address, a device file, a CAN interface.

    `node_rank` is the cluster rank of the node on which `name` is unique; None if it is unique in the cluster.
    """

    name: Title
    node_rank: Union[int, None] = None


class Piece(Value, frozen=True):
    """One piece of configured hardware, such as a robot, that a node has enumerated (hardware.configured).

    Attributes:
        cls: ``module:qualname`` of the piece's subclass of HardwareInfo. The receiver restores that class if it is
            loaded.
        detail: JSON object of the fields that this class adds.
        identity: `HardwareInfo.identity`, for a receiver that has not loaded the class.
        identities: `HardwareInfo.identities`.
    """

    type: Name
    model: Name
    cls: Name = ""
    detail: Document = "{}"
    identity: Name = ""
    identities: Few[Identity] = []


class HardwareAnswer(Value, frozen=True):
    """Answer of a node to a HardwareQuestion: its pieces, or a fault.

    Attributes:
        kind: "" without a fault; "config" if the type rejects its configuration; "unregistered" if the node does not
            know the type; "failed" if the enumerating process crashed, hung or sent an invalid answer.
        text: the fault, for people.
        path: place of the fault in the configuration, for "config".
    """

    pieces: Some[Piece] = []
    kind: Name = ""
    text: Text = ""
    path: Text = ""


class NodeReport(Value, frozen=True):
    """Details about a node that its agentd reports in its hello.

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
        interface: name of the network interface that has the address `ip`.
        admit: who may launch workers on the node.
    """

    node_id: Name
    hostname: Name
    ip: Ip
    host: Name
    num_cpus: int
    memory_bytes: int
    python: Name
    interpreter: Path
    rank: Union[int, None] = None
    resources: Few[ResourceReport] = []
    env_vars: Variables = {}
    labels: Variables = {}
    interfaces: Variables = {}
    faults: Some[Text] = []
    profilers: Few[Name] = []
    interface: Name = ""
    admit: LaunchRules = LaunchRules()


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
        closed: why the receiver may not launch workers on the node, "" if it may.
    """

    report: NodeReport
    incarnation: Name
    rank: int
    state: Name
    last_seen_s: float
    is_head: bool = False
    draining: Text = ""
    closed: Text = ""


class Claim(Value, frozen=True):
    """Exclusive use of something, such as a robot, by one group while its worker lives.

    `key` is equal for two claims of the same thing. `title` names the thing for people. With `shared`, groups of the
    same namespace whose claims are shared too may use it at the same time. `by` is the id of the worker that has the
    robot, if this worker inherited its claim: it launched the group, or a worker that inherited it did. "" otherwise.
    """

    key: Title
    title: Title
    shared: bool = False
    by: Name = ""


class RobotStop(Value, frozen=True):
    """A robot worker that is to end because of an emergency stop, and whose node has not confirmed its end.

    Attributes:
        worker: its address; "" for all robot workers of a node that has not reported them to a restarted head.
        reached: True if its node was heard within half a robot lease, and so gets the order to stop.
        lease_s: seconds after which its lease ends at the latest, without an order.
        why: why its end is not certain although the head counts it as ended; "" if the head does not.
    """

    worker: Name
    namespace: Name
    robots: Few[Title]
    node: Name
    reached: bool
    lease_s: Number = 0.0
    why: Text = ""


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
        stops_outside: True if its class has stop_hardware, which a process beside a robot worker runs.
        resizes: number of times that the group was resized before it had `world_size` ranks; -1 for a rank that is
            being added, and is no member of the group yet.
        code: hash of the driver's code that the worker runs, "" if it runs what its node has.
        code_paths: directories of that code on the node: the whole tree, then those that go first on the import path.
    """

    id: WorkerId
    group: Name
    namespace: Name
    rank: int
    world_size: Size
    node_rank: int
    env: Variables
    path_env_merge_mode: Name = "append"
    interpreter: Union[Path, None] = None
    start_method: Name = "fork"
    preload: SomeOf[Path] = ()
    sys_path: SomeOf[Path] = ()
    cwd: Union[Path, None] = None
    log_dir: Union[Path, None] = None
    forward_logs: bool = True
    keep_logs: bool = False
    token: Name = ""
    claims: FewOf[Claim] = ()
    numa_nodes: SomeOf[int] = ()
    memory_limit: Union[int, None] = None
    pids_limit: Union[int, None] = None
    limits_best_effort: bool = False
    restart: Union[RestartPolicy, None] = None
    incarnation: int = 0
    owner_must_answer: Name = ""
    stops_outside: bool = False
    resizes: Annotated[int, Meta(ge=-1, le=1 << 40)] = 0
    code: Name = ""
    code_paths: SomeOf[Path] = ()
    profiler: Union[Profiler, None] = None
    trace_events: Annotated[int, Meta(ge=0, le=1 << 22)] = 0


class Endpoint(Value, frozen=True):
    """Addresses on which a worker listens. Only processes whose host key is `host` can use `ipc`.

    `bulk` is the port for bulk streams at the IP address of `tcp`, 0 for none.
    """

    host: Name
    ipc: Address = ""
    tcp: Address = ""
    bulk: Port = 0


class ExitReport(Value, frozen=True):
    """How a worker ended.

    `kind` is exited, signalled (killed by `signal`), start_failed, node_lost or stopped (by order). `oom` says whether
    the worker was killed for memory: no, suspected or yes. `reason` is text for people.
    """

    kind: Name
    exit_code: Union[int, None] = None
    signal: Union[int, None] = None
    oom: Name = "no"
    stderr_tail: Some[Text] = []
    reason: Text = ""


class WorkerHealth(Value, frozen=True):
    """Health of a running worker, as its agentd sees it.

    Attributes:
        unresponsive: reason why the worker's I/O thread does not answer, "" if it answers.
        method: a call that has been running for long, "" for none.
        for_s: seconds for which the silence, or else the call, has lasted.
        waiting: number of calls queued behind `method`.
        breakpoint: where a thread waits in a breakpoint, such as "train.py:42 in step", "" for none.
        breakpoint_s: seconds for which it has been there.
        stop: number of that breakpoint in the worker, which a step of the debugger does not change.
    """

    id: Name
    unresponsive: Text = ""
    method: Text = ""
    for_s: Number = 0.0
    waiting: int = 0
    breakpoint: Text = ""
    breakpoint_s: Number = 0.0
    stop: int = 0


class WorkerPulse(Value, frozen=True):
    """A WorkerHealth as the head reports it: times in place of durations, in seconds since the epoch by its clock."""

    unresponsive: Text = ""
    method: Text = ""
    since: Number = 0.0
    waiting: int = 0
    breakpoint: Text = ""
    breakpoint_since: Number = 0.0
    stop: int = 0


class WorkerState(Value, frozen=True):
    """One worker of a group as the head sees it.

    Attributes:
        state: restarting, starting, running, stopping or gone.
        exit: how the worker ended, or how the previous incarnation of its rank ended; None if there is no such end.
        restarts: number of restarts of its rank.
        pulse: set while the worker does not answer, is in one call for long, or waits in a breakpoint. It is alive.
        code: hash of the driver's code that it runs, "" if it runs what its node has.
    """

    id: Name
    rank: int
    node_rank: int
    node_ip: Name
    state: Name
    pid: Pid = 0
    endpoint: Union[Endpoint, None] = None
    port: int = 0
    master_port: int = 0
    exit: Union[ExitReport, None] = None
    restarts: int = 0
    pulse: Union[WorkerPulse, None] = None
    code: Name = ""


class RunningWorker(Value, frozen=True):
    """One worker as its agentd reports it to a head that may not know it.

    Attributes:
        owner, cls, detail, detached: those of its StartWorkers.
        endpoint: None before the worker is ready.
        exit: how the worker ended, if it ended while the agentd had no session with a head; else None.
    """

    spec: WorkerSpec
    owner: Name
    cls: Name = ""
    detail: Document = ""
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
        world_size: number of ranks.
    """

    namespace: Name
    name: Name
    cls: Name
    owner: Name
    state: Name
    workers: OfGroup[WorkerState]
    token: Name = ""
    detail: Document = ""
    detached: bool = False
    world_size: int = 0


class GroupHandle(Value, frozen=True):
    """A group as a client with a handle of it knows it. `workers` includes those that have ended.

    `detail` is that of the Launch if the client owns the group, else "".
    """

    namespace: Name
    name: Name
    workers: OfGroup[WorkerState]
    detail: Document = ""


class LeaseState(Value, frozen=True):
    """A piece of exclusive hardware that a group holds, as the head sees it.

    Attributes:
        key, title: those of the claim.
        owner: the group's owner, for people.
        state: "held", or "lost" if the worker's node was lost and the worker may still be running.
        held_s: seconds since the lease was granted.
        free_in_s: seconds after which a lost lease ends at the latest, None for a held lease.
    """

    key: Title
    title: Title
    namespace: Name
    group: Name
    owner: Text
    workers: OfGroup[Name]
    nodes: OfCluster[Name]
    state: Name
    held_s: float
    free_in_s: Union[float, None] = None


RELAY_GROUPS = "relay@"
"""Prefix of the names of groups of relays."""
CHANNEL_GROUPS = "channel@"
"""Prefix of the names of channel groups: the hosts of channel NAME are the group "channel@NAME"."""
