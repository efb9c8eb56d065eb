"""Control messages by which large launches are sent in slices, and one worker is looked up. No secrets.

A launch of many workers is longer than a control message may be, and would occupy the head while it decodes it. So its
workers are sent in LaunchParts, and the Launch that follows has the last worker and the number of parts. Ranks to add
are sent alike, before an AddRanks. A part has the fields that its workers share once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar, Union

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rlinf_actors.wire import values
from rlinf_actors.wire.bounds import FewOf, Name, SomeOf, Variables
from rlinf_actors.wire.protocol import MAX_SIZE, ControlMessage, WorkerId

PART_RANKS = 2000
"""Number of workers from which a launch is sent in parts, and most workers of a part."""
PART_BYTES = 4 << 20
"""Most bytes of the workers of a part."""
T = TypeVar("T")
OfPart = Annotated[
    list[T], Meta(max_length=PART_RANKS, title="of a part", description="A part is as much as the head does at once.")
]


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """What a worker of a WorkerBatch has for itself. `env` has the variables that differ from the shared ones."""

    id: WorkerId
    rank: int
    node_rank: int
    env: Variables = {}
    claims: FewOf[values.Claim] = ()
    numa_nodes: SomeOf[int] = ()
    owner_must_answer: Name = ""


class WorkerBatch(values.Value, frozen=True):
    """WorkerSpecs of one group: a spec with the fields that they share, and a row for each of them."""

    shared: values.WorkerSpec
    rows: OfPart[WorkerRow]


class LaunchPart(ControlMessage, frozen=True):
    """Workers of a Launch or AddRanks that will follow. May be sent twice. Answered by Done.

    The head keeps the parts of a client's launch until its Launch, AddRanks, ResizeGroup or StopGroup arrives or the
    client ends, and starts nothing before. Failed(kind=parts) asks to begin again at the first part, because the head
    was restarted.

    Attributes:
        launch: common beginning of the workers' ids (model.restart.launch_of), or for an AddRanks the id of its last
            worker. The first part of another launch of the same name replaces the parts of the launch before.
        index: number of the part, from 0.
    """

    namespace: Name
    group: Name
    launch: Name
    index: Annotated[int, Meta(ge=0, le=MAX_SIZE)]
    workers: OfPart[WorkerBatch]


class FindWorker(ControlMessage, frozen=True):
    """Return the state of one worker of the sender's job. Answered by FoundWorker."""

    namespace: Name
    group: Name
    rank: int


class FoundWorker(ControlMessage, frozen=True):
    """Reply to FindWorker: the worker, None if there is no such worker, and the number of ranks of its group."""

    worker: Union[values.WorkerState, None] = None
    world_size: int = 0


def batches_of(specs: Sequence[values.WorkerSpec]) -> list[WorkerBatch]:
    """Return batches with all *specs*, in any order. `specs_of` is the inverse."""
    alike: dict[bytes, list[values.WorkerSpec]] = {}
    for spec in specs:
        blank = replace(spec, id="", rank=0, node_rank=0, env={}, claims=(), numa_nodes=(), owner_must_answer="")
        alike.setdefault(_encode(blank), []).append(spec)
    return [_batch(group) for group in alike.values()]


def _batch(specs: list[values.WorkerSpec]) -> WorkerBatch:
    env = specs[0].env
    for spec in specs:
        if not env.items() <= spec.env.items():
            env = dict(env.items() & spec.env.items())
    rows = [
        WorkerRow(
            spec.id, spec.rank, spec.node_rank, {name: value for name, value in spec.env.items() if name not in env},
            spec.claims, spec.numa_nodes, spec.owner_must_answer,
        )
        for spec in specs
    ]  # fmt: skip
    return WorkerBatch(replace(specs[0], env=env), rows)


def specs_of(batches: Sequence[WorkerBatch]) -> list[values.WorkerSpec]:
    """Return the specs of all workers of *batches*."""
    return [
        replace(
            batch.shared,
            id=row.id,
            rank=row.rank,
            node_rank=row.node_rank,
            env={**batch.shared.env, **row.env},
            claims=row.claims,
            numa_nodes=row.numa_nodes,
            owner_must_answer=row.owner_must_answer,
        )
        for batch in batches
        for row in batch.rows
    ]


def parts_of(specs: Sequence[values.WorkerSpec]) -> Iterator[list[WorkerBatch]]:
    """Yield the workers of each part of a launch: at most PART_RANKS, and PART_BYTES if that is more than one."""
    start, count = 0, PART_RANKS
    while start < len(specs):
        batches = batches_of(specs[start : start + count])
        if count > 1 and part_bytes(batches) > PART_BYTES:
            count = (count + 1) // 2
            continue
        start += count
        yield batches


def part_bytes(batches: Sequence[WorkerBatch]) -> int:
    """Return the size of the workers of a part in bytes."""
    return len(_encode(batches))


_encode = msgspec.msgpack.Encoder().encode
