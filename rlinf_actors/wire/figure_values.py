"""Values inside control messages about the figures of nodes and workers, for metrics and pages. Pure.

The house rules of values.py hold.

A counter only grows while its process lives; its reader makes rates of it. Names of methods are the user's: they are
shown, and never interpreted.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, Union

from msgspec import Meta

from rlinf_actors.wire.bounds import Few, Name, OfNode, Path, Some, Text
from rlinf_actors.wire.protocol import Number
from rlinf_actors.wire.values import Value

T = TypeVar("T")

Total = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A number of things, or of bytes, counted since a process began; or how many there are now."""
Buckets = Annotated[
    list[T],
    Meta(max_length=32, title="buckets", description="One for each bound of a histogram (rlinf_actors.counters)."),
]


class FigureQuestion(Value, frozen=True, tag="ReadFigures"):
    """Request to a node: send its figures, with those of the workers of the job `namespace`; None for all jobs."""

    namespace: Union[Name, None] = None


class ProcessFigures(Value, frozen=True):
    """What a process uses.

    Attributes:
        cpu_s: CPU time so far of all its threads, in seconds.
        rss_bytes: resident memory, shared memory included.
        threads: number of its threads.
        descriptors: open descriptors; None if agentd may not see them.
    """

    cpu_s: Number = 0.0
    rss_bytes: Total = 0
    threads: Total = 0
    descriptors: Union[Total, None] = None


class MethodFigures(Value, frozen=True):
    """The calls of one method of a worker.

    Attributes:
        method: its name; "" for all methods beyond the first of a worker that has very many.
        done, failed: number of calls that have returned, and that have raised.
        seconds: how long the method ran in the calls that have returned, all together.
        buckets: number of those calls by duration: the first bound of counters.BOUNDS_S that is not less. The last
            number is of those that took longer than each bound.
    """

    method: Name
    done: Total = 0
    failed: Total = 0
    seconds: Number = 0.0
    buckets: Buckets[Total] = []


class PathFigures(Value, frozen=True):
    """What a worker has sent by one path: `messages` messages or large parts, with `size` bytes."""

    path: Name
    messages: Total = 0
    size: Total = 0


MAX_KEYS = 32
"""Most keys of a channel in its figures: those with the most items and waiting requests."""
MAX_WAITERS = 4
KEY_CHARS = 80
"""Most characters of a key."""


class KeyFigures(Value, frozen=True):
    """A key of a channel.

    Attributes:
        key: the key as Python writes it, cut to KEY_CHARS characters. It is the user's: it is shown only.
        items: items that wait for a get.
        out: deliveries that are not acknowledged.
        puts_waiting, gets_waiting: requests that wait for room, and for items.
        undeliverable: items that were delivered too often.
        producers, consumers: the first MAX_WAITERS processes that wait: ids of workers, incarnations of drivers.
        size: bytes of the items of this key that the host holds.
    """

    key: Name
    items: Total = 0
    out: Total = 0
    puts_waiting: Total = 0
    gets_waiting: Total = 0
    undeliverable: Total = 0
    producers: Few[Name] = []
    consumers: Few[Name] = []
    size: Total = 0


class ChannelFigures(Value, frozen=True):
    """A channel, or one replica of it, as its host sees it.

    Attributes:
        items: items that wait for a get.
        size: bytes of all items that it holds.
        keys: keys in use.
        out: deliveries that are not acknowledged.
        puts_waiting, gets_waiting: requests that wait for room, and for items.
        undeliverable: items that were delivered too often.
        entered: items that have entered the queue so far.
        max_items, max_bytes: the channel's limits, 0 for none.
        by_key: the MAX_KEYS keys with the most items and waiting requests.
        closed: whether the channel is closed.
    """

    items: Total = 0
    size: Total = 0
    keys: Total = 0
    out: Total = 0
    puts_waiting: Total = 0
    gets_waiting: Total = 0
    undeliverable: Total = 0
    entered: Total = 0
    max_items: Total = 0
    max_bytes: Total = 0
    by_key: Few[KeyFigures] = []
    closed: bool = False


class WorkerFigures(Value, frozen=True, tag=True):
    """What a worker has done and uses. agentd fills in `process` and the last field, the worker's I/O thread the rest.

    Attributes:
        process: None if the process has ended.
        method: the call that has been running longest, "" for none.
        call_s: for how many seconds it has been running.
        queued: number of calls that wait for their turn.
        calls: its calls by method.
        sent: what it has sent, by path.
        unacknowledged_bytes: bytes on their way to receivers, which have not returned the credit for them yet.
        waiting_messages: messages that wait for credit.
        channel: set by the host of a channel.
        delay_s: seconds from agentd's question until the worker's I/O thread had it.
        fault: why there is no answer of the worker, for people; "" if there is one.
        accelerator_bytes: memory of accelerators that its processes hold; -1 if unknown.
    """

    id: Name
    process: Union[ProcessFigures, None] = None
    method: Name = ""
    call_s: Number = 0.0
    queued: Total = 0
    calls: Few[MethodFigures] = []
    sent: Few[PathFigures] = []
    unacknowledged_bytes: Total = 0
    waiting_messages: Total = 0
    channel: Union[ChannelFigures, None] = None
    delay_s: Number = 0.0
    fault: Text = ""
    accelerator_bytes: int = -1


class DeviceFigures(Value, frozen=True):
    """An accelerator of a node, in the order of the node's report. -1 stands for unknown.

    Attributes:
        type: its hardware type.
        utilization: percent of time that it was busy.
        temperature: degrees Celsius.
        memory_bytes: its memory.
        memory_used_bytes: how much of it is in use.
    """

    type: Name
    utilization: int = -1
    temperature: int = -1
    memory_bytes: int = -1
    memory_used_bytes: int = -1


class DiskFigures(Value, frozen=True):
    """A file system that the node writes to: `purpose` says for what, such as "logs"."""

    purpose: Name
    path: Path
    total_bytes: Total = 0
    free_bytes: Total = 0


class NodeFigures(Value, frozen=True, tag=True):
    """Answer of a node to a FigureQuestion.

    Attributes:
        workers: one for each of its running workers that the question is about.
        agentd: what agentd uses.
        cpu_s: CPU time that all processors were busy since the machine began, in seconds.
        cpus: number of processors.
        load: processes that run or wait for a processor, on average over a minute.
        memory_bytes: the machine's memory.
        memory_free_bytes: how much of it programs can still get.
        lag_s: how late a timer of agentd's event loop was, in seconds.
        devices: its accelerators; empty if it has none, or they could not be read.
        devices_age_s: how old their figures are, in seconds: they take a process each time.
        disks: the file systems that it writes to.
        age_s: how old the figures are, in seconds: agentd collects them at most once in a second.
        machine: equal for nodes of one machine, whose processors and memory they share.
    """

    workers: OfNode[WorkerFigures] = []
    agentd: ProcessFigures = ProcessFigures()
    cpu_s: Number = 0.0
    cpus: Total = 0
    load: Number = 0.0
    memory_bytes: Total = 0
    memory_free_bytes: Total = 0
    lag_s: Number = 0.0
    devices: Some[DeviceFigures] = []
    devices_age_s: Number = 0.0
    disks: Few[DiskFigures] = []
    age_s: Number = 0.0
    machine: Name = ""
