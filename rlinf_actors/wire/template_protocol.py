"""Packets between agentd, its templates and their workers: a struct in each packet of a unix SOCK_SEQPACKET socket.

A template is the small process that forks workers. agentd never runs user code and never imports what workers need, so
the fork happens in the template. A packet has at most MAX_PACKET bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Union

import msgspec
from msgspec import Meta

from rlinf_actors.wire.bounds import Address, Few, Method, Name, OfNode, Path, Report, Some, Text, Variables
from rlinf_actors.wire.protocol import ControlMessage, Lease, Number, Pid, Port, checked
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerSpec
from rlinf_actors.wire.worker_questions import AskWorker, WorkerAnswered

MAX_PACKET = 1 << 20
"""Largest packet in bytes; SO_SNDBUF is raised to this size. An environment of nearly half of ARG_MAX still fits."""

TEXT_CHARS = 1000
"""Largest number of characters of a text that the packet's sender did not choose, such as a method's name. Without this
limit the text, or a packet with many such texts, could become too long to send.
"""
FilePath = Annotated[Path, Meta(pattern=r"\A[^\0]*\Z")]
"""A path of a template, which may be run by a user's code: without NUL, which system calls do not take."""
Position = Annotated[int, Meta(ge=0, le=2**62)]
"""A position in a file of a template, or an inode."""


class WorkerPlace(ControlMessage, frozen=True):
    """What a worker process must know about its node and its files. agentd fills it in; the head makes the WorkerSpec.

    Attributes:
        run_dir: directory of the worker's ipc socket.
        host: host key of the node.
        head: endpoint of the head.
        node: name of the node, for messages to people.
        node_ip: address of the node.
        listen_ip: address to bind TCP on, "" for ipc only.
        out_path: file that receives the worker's stdout.
        err_path: file that receives the worker's stderr.
        lease_until: end of a robot worker's lease as known at the start, in seconds of CLOCK_MONOTONIC.
        lease_s: length of that lease in seconds, counted from the last beat that the head answered.
        head_key: the head's public key, "" in a cluster without keys.
        trace_path: file that the worker makes for its trace, "" to record none.
        trace_events: number of events that the trace keeps.
        budgets: memory that a user's workers share for bandwidth groups (net.shared_budgets); the template knows it.
    """

    run_dir: Path
    host: Name
    head: Address
    node: Name
    node_ip: Name
    listen_ip: Name
    out_path: Path
    err_path: Path
    lease_until: Number = 0.0
    lease_s: Lease = 0.0
    head_key: Name = ""
    trace_path: Path = ""
    budgets: tuple[int, int, int, int] = (0, 0, 0, 0)
    trace_events: int = 0


# --- agentd to template ---


class Fork(ControlMessage, frozen=True):
    """Order to a template: start one worker.

    `env` is the worker's whole environment; the worker inherits no variable of the template.

    `wrapper` is the command of a profiler that starts the worker, empty without one. After the worker's end, the
    profiler has `report_s` seconds to write its report.
    """

    spec: WorkerSpec
    place: WorkerPlace
    env: Variables
    wrapper: Some[Path] = []
    report_s: Number = 0.0


class Watching(ControlMessage, frozen=True):
    """Notice of agentd: it holds a pidfd of this worker, so the template may reap the process after its end.

    The template waits for it because a reaped process id can be reused before agentd has the pidfd.
    """

    id: Name


class Renew(ControlMessage, frozen=True):
    """Packet of agentd: the leases of this node's robot workers now last until `until`, in seconds of CLOCK_MONOTONIC.

    The template passes the packet on to the watchdogs of those workers, and a watchdog to the worker's guard. Each of
    the three confirms it by Renewed.
    """

    until: Number


class Renewed(ControlMessage, frozen=True):
    """Packet of a template, of a watchdog or of a guard: it has Renew `until`.

    Who confirms no renewal for the length of a lease is killed by the process above it. `id`: the worker, "" for a
    template.
    """

    id: Name
    until: Number


class Revoke(ControlMessage, frozen=True):
    """Packet of agentd that ends the lease of a robot worker, or of all of the template if `id` is "". The template
    passes it on to the worker's watchdog.

    The worker makes its robots safe and ends. `orderly`: True if the worker's owner asked for the end, so that no lease
    was lost.
    """

    id: Name
    reason: Text
    orderly: bool = False


class Probe(ControlMessage, frozen=True):
    """Packet of agentd: it asks whether the workers answer. The template replies at once with Pulses.

    The template also sends a new Ping to each worker that has answered the last Ping.
    """


class Ping(ControlMessage, frozen=True):
    """Packet of a template to a worker. The worker's I/O thread answers with Pong, to show that the thread runs."""


class NodeRegistered(ControlMessage, frozen=True):
    """Packet of agentd, which the template passes on to all its workers: the head `epoch` has registered this node.

    A worker whose session is with another head says hello again. If `again` is True, this head had registered this
    agentd before: messages may be lost, and every worker with a session says hello again.
    """

    epoch: Name
    again: bool = False


class Shutdown(ControlMessage, frozen=True):
    """Order to a template: kill and reap the remaining workers, and exit."""


class Adopt(ControlMessage, frozen=True):
    """First packet of an agentd that takes over the template of an earlier agentd.

    Answered by a SurvivingWorker for each worker, then by Inventory.
    """


class KeepFor(ControlMessage, frozen=True):
    """Packet of agentd to a template: the head has registered this agentd.

    If this agentd ends, the template waits `seconds` seconds for another agentd.
    """

    seconds: Number


class Settled(ControlMessage, frozen=True):
    """Notice of agentd: the head knows how these workers ended, so the template may forget them."""

    ids: OfNode[Name]


class DevicesLocked(ControlMessage, frozen=True):
    """Packet of agentd, passed on by the template: it grants LockDevices `request`.

    The worker has its accelerators for itself until it sends UnlockDevices or ends.
    """

    id: Name
    request: int


class DevicesBusy(ControlMessage, frozen=True):
    """Packet of agentd, passed on by the template: LockDevices `request` has been waiting for `waited_s` seconds.

    `text` says which workers use the accelerators, and which asked earlier: "held by a:0; b:1 came before". `holders`
    are the names of those that are of its job. A `quiet` packet is not logged.
    """

    id: Name
    request: int
    waited_s: Number
    text: Text
    holders: Few[Name] = []
    quiet: bool = False


class AllowTracer(ControlMessage, frozen=True):
    """Packet of a template to a worker: let the process `pid` trace it, 0 for no process any more.

    The worker's I/O thread answers with TracerAllowed.
    """

    id: Name
    pid: int


# --- template to agentd ---


class TemplateReady(ControlMessage, frozen=True):
    """First packet of a template that can run workers.

    Attributes:
        pid: the template's process.
        python: its Python version.
        forks: False if the template must spawn workers instead of forking them.
        why: why the template must not fork, such as the threads that it runs; "" if `forks` is True.
        installed: fingerprint of the installed packages, taken before the template imported them
            (rlinf_actors.installed).
        paths: the interpreter's sys.path.
    """

    pid: Pid
    python: Name
    forks: bool
    why: Text = ""
    installed: Text = ""
    paths: Some[FilePath] = []


class TemplateFailed(ControlMessage, frozen=True):
    """Packet of a template that cannot run workers, e.g. because a package is missing or too old.

    `text` says why and what to do.
    """

    text: Report


class Forked(ControlMessage, frozen=True):
    """Packet of a template: it has started worker `id` as process `pid`.

    For a worker under a profiler the packet comes twice: with the profiler's pid, and with the worker's own.
    """

    id: Name
    pid: Pid


class WorkerUp(ControlMessage, frozen=True, tag="Up"):
    """Packet of a worker: its runtime listens at `endpoint`.

    `port` is the TCP port of `endpoint`. `master_port` is a free TCP port that rank 0 holds as MASTER_PORT, 0 for other
    ranks. `stack_fd` is the worker's pipe for stacks (worker.signal_stacks), -1 for none; agentd does not use it.
    """

    id: Name
    endpoint: Endpoint
    port: Port
    master_port: Port
    stack_fd: int = -1


class StartFailed(ControlMessage, frozen=True):
    """Packet of a worker before WorkerUp: it cannot start, for the reason `text`.

    The worker then ends, and its Exited carries the text as reason.
    """

    id: Name
    text: Report


class LeaseLost(ControlMessage, frozen=True):
    """Packet of a robot worker's watchdog: the lease is over, for the reason `text`.

    The worker ends within moments, and its Exited carries the text of the last such packet; "" if the worker has ended
    by itself. From the guard to the watchdog: the guard makes the robots safe.
    """

    id: Name
    text: Text


class Held(ControlMessage, frozen=True):
    """Packet of a guard to its watchdog: all threads of the worker are held.

    Before on_lease_lost runs, the watchdog stops the processes that the worker has started, and sends the packet back.
    `done` says that it has run. Then the watchdog kills them: if the worker ended first, the kernel would continue
    stopped processes (SIGHUP and SIGCONT to an orphaned process group).
    """

    done: bool = False


class Keep(ControlMessage, frozen=True):
    """Packet of a guard to its watchdog: do not stop the process `pid` and its descendants before on_lease_lost runs.

    `started` is when it started, in clock ticks since boot.
    """

    pid: Pid
    started: int


class Closed(ControlMessage, frozen=True):
    """Packet of a guard to its watchdog: `_close` has returned, so the robots need no stop."""


class LogsGrew(ControlMessage, frozen=True, tag="Grew"):
    """Packet of a template: the log files of these workers have new output.

    After one such packet for a file the template sends no other for this file until agentd sends Read with `to_end`.
    """

    ids: OfNode[Name]


class LogsLost(ControlMessage, frozen=True):
    """Packet of a template: the output of this worker cannot be written (e.g. a full disk), as `text` says.

    If `text` is "", the output can be written again. A last packet says how many bytes are missing if it never could.
    """

    id: Name
    text: Text


class Read(ControlMessage, frozen=True):
    """Packet of agentd: the positions up to which it has read a worker's log files and handed on the lines.

    A later agentd continues from these positions. `out` and `err` are (bytes, inode of the file). `to_end`: True if the
    template is to send LogsGrew when the files grow again.
    """

    id: Name
    out: tuple[int, int]
    err: tuple[int, int]
    to_end: bool = True


class LockDevices(ControlMessage, frozen=True):
    """Packet of a worker that wants its accelerators for itself. Answered by DevicesLocked when they are free.

    `request` is a number that the worker has not used before.
    """

    id: Name
    request: int


class UnlockDevices(ControlMessage, frozen=True):
    """Packet of a worker: it withdraws its LockDevices `request`, or releases the accelerators that it was granted."""

    id: Name
    request: int


class Pong(ControlMessage, frozen=True):
    """Answer of a worker's I/O thread to Ping: which call the worker is running, and since when.

    Attributes:
        method: the call that has been running longest, "" for none.
        since: start of that call, in seconds of CLOCK_MONOTONIC.
        waiting: number of queued calls.
        breakpoint: where a thread waits in a breakpoint, "" for none.
        stop: number of that breakpoint in the worker, which a step of the debugger does not change.
    """

    id: Name
    method: Method = ""
    since: Number = 0.0
    waiting: int = 0
    breakpoint: Method = ""
    stop: int = 0


class TracerAllowed(ControlMessage, frozen=True):
    """Answer of a worker's I/O thread to AllowTracer. The template does not pass it on."""

    id: Name
    pid: int


class Pulses(ControlMessage, frozen=True):
    """Answer of a template to Probe: the Pongs that it has received since its last Pulses.

    If a worker's Pong arrives only after the next Probe, the template sends it at once, in a further Pulses.
    """

    pongs: OfNode[Pong]


class Exited(ControlMessage, frozen=True):
    """Packet of a template: the worker `id` has ended, in the way that `exit` says."""

    id: Name
    exit: ExitReport


class SurvivingWorker(ControlMessage, frozen=True, tag="Kept"):
    """A worker of an earlier agentd, as its template reports it to the agentd that takes the template over.

    Attributes:
        pid: its process. The template does not reap it before Watching, so the pid cannot be reused until then.
        up: the worker's WorkerUp, None if it does not listen yet.
        exit: how the worker ended, if the head may not know that; None for a running worker.
        out_path: file with its stdout.
        err_path: file with its stderr.
        out_read: position up to which agentd has read the stdout file, and the file's inode (`out` of the last Read).
        err_read: the same for the stderr file.
        request: number of its LockDevices, 0 for none.
        granted: True if that request was granted.
        asked_at: time of that request, in seconds of CLOCK_MONOTONIC.
        token: membership token of its job. Templates keep it in memory, so that it is in no file.
    """

    id: Name
    pid: Pid = 0
    up: Union[WorkerUp, None] = None
    exit: Union[ExitReport, None] = None
    out_path: FilePath = ""
    err_path: FilePath = ""
    out_read: tuple[Position, Position] = (0, 0)
    err_read: tuple[Position, Position] = (0, 0)
    request: int = 0
    granted: bool = False
    asked_at: Number = 0.0
    token: Name = ""


class Inventory(ControlMessage, frozen=True):
    """Last reply to Adopt, after every SurvivingWorker: facts about the template itself.

    `since` is the time when the last registered agentd ended, in seconds of CLOCK_MONOTONIC. `installed`
    and `paths` have the meaning that they have in TemplateReady.
    """

    since: Number
    installed: Text = ""
    paths: Some[FilePath] = []


ON_LEASE_LOST_S = 1.0
"""Time limit of a robot worker's on_lease_lost, in seconds."""
ROBOT_END_S = 1.5
"""Seconds from the end of a robot worker's lease until it is killed: ON_LEASE_LOST_S and half a second more."""
STOP_HARDWARE_S = 1.0
"""Time limit of stop_hardware, in seconds. It begins when the worker has ended or was killed."""
ROBOT_GONE_S = ROBOT_END_S + STOP_HARDWARE_S + 0.25
"""Seconds from the end of a robot worker's lease until its watchdog has ended too: others leave it that time."""

ToOneWorker = Union[DevicesLocked, DevicesBusy, Revoke, AskWorker, AllowTracer]
ToWorker = Union[ToOneWorker, Renew, Held, Ping, NodeRegistered]
ToWatchdog = Union[Renew, Revoke, Renewed, LeaseLost, Held, Keep, Closed]
ToTemplate = Union[
    Fork, Watching, Read, Shutdown, Probe, Adopt, KeepFor, Settled, DevicesLocked, DevicesBusy, Renew, Revoke,
    NodeRegistered, AskWorker,
]  # fmt: skip
ToAgent = Union[
    TemplateReady, TemplateFailed, Forked, WorkerUp, StartFailed, Renewed, LeaseLost, LogsGrew, LogsLost, LockDevices,
    UnlockDevices, Exited, Pong, Pulses, SurvivingWorker, Inventory, WorkerAnswered,
    TracerAllowed,
]  # fmt: skip
"""Packets that agentd receives."""

encode: Callable[[ToTemplate | ToAgent | ToWorker | ToWatchdog], bytes] = msgspec.msgpack.Encoder().encode
decode_to_template: Callable[[bytes | memoryview], ToTemplate] = checked(ToTemplate, "a packet for a template")
decode_to_agent: Callable[[bytes | memoryview], ToAgent] = checked(ToAgent, "a packet for agentd")
decode_to_worker: Callable[[bytes | memoryview], ToWorker] = checked(ToWorker, "a packet for a worker")
decode_to_watchdog: Callable[[bytes | memoryview], ToWatchdog] = checked(ToWatchdog, "a packet for a watchdog")
