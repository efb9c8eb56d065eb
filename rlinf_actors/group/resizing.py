"""Groups that grow and shrink: `add_ranks` and `remove_ranks` of a group's handle.

Only the process that launched the group can do this, because it constructs the workers. `add_ranks` starts the new
workers, constructs them, and only then makes them members: until then, and if it fails, the group is as it was.
`remove_ranks` first takes the ranks out of the group, so that no later call reaches them, and then ends their workers.

The placement is computed on the caller's thread; the rest runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from rlinf_actors.errors import CallTimeoutError, GroupClosedError, PlacementError, RlinfActorsError, UsageError
from rlinf_actors.group import group_spec
from rlinf_actors.group.class_facts import RESIZE_HOOK
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.model.placement import Placement
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.sliced_launch import send_launch
from rlinf_actors.wire import frames, protocol
from rlinf_actors.wire.client_messages import Done
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.group.control import GroupControl
    from rlinf_actors.placement.strategies import PlacementStrategy
    from rlinf_actors.runtime.remote_group import RemoteGroup

log = logging.getLogger(__name__)

KEPT_ARGUMENTS = 16 << 20
"""Bytes of constructor arguments up to which the launching process keeps them after the launch, so that ranks can be
added. With a restart policy it keeps them in any case.
"""


class Resizing:
    """The methods of WorkerGroup that change the number of ranks."""

    _control: GroupControl

    def add_ranks(self, placement_strategy: PlacementStrategy, async_op: bool | None = None) -> Any:
        """Start more workers, and make them ranks of this group when they are constructed.

        The new workers get the arguments of the group's constructor and the options of its launch, and the ranks that
        follow the last rank. Until they are constructed, and if that fails, the group is as it was. Then calls go to
        them too, in every process that has a handle; calls under way do not. The other workers have the new number in
        `Worker._world_size` and WORLD_SIZE before the next call of this process reaches them, and run
        `Worker.on_world_size_changed`.

        Only the process that launched the group can add ranks.

        Args:
            placement_strategy: where the new workers run. The devices may be those of other ranks.
            async_op: True to return an AsyncWork at once; False to block. Default: True in a running event loop.

        Returns:
            The new ranks, or the AsyncWork of them.

        Raises:
            PlacementError, HardwareInUseError, NodeLostError: there is no place for the new workers.
            WorkerStartError, WorkerError, WorkerDiedError: a new worker could not be started or constructed.
            UsageError: another process launched the group, it is being resized already, or its arguments were too large
                to be kept.
        """
        return add_ranks(self._control, placement_strategy, async_op)

    def remove_ranks(self, *ranks: int, grace: float = 5.0, async_op: bool | None = None) -> Any:
        """Remove the highest ranks from this group, and end their workers.

        Calls that begin later do not reach them, in any process that has a handle. Then their ``_close()`` is called if
        the class has one, after the calls that they were running, and they get SIGTERM, and *grace* seconds later
        SIGKILL. Calls that have not ended by then fail. Channel items that they have not acknowledged go back. The
        other workers follow as for `add_ranks`. Only the process that launched the group can remove ranks.

        Args:
            *ranks: the ranks; together with the lower ranks that stay they must be all ranks, and rank 0 stays.
            grace: seconds for ``_close()``, and between SIGTERM and SIGKILL.
            async_op: True to return an AsyncWork at once; False to block. Default: True in a running event loop.

        Raises:
            PlacementError: the ranks are not the highest.
            UsageError: another process launched the group, or it is being resized already.
        """
        return remove_ranks(self._control, ranks, grace, async_op)


class Grower(msgspec.Struct, frozen=True):
    """What the launching process remembers of a launch, to place and describe more ranks of the group.

    Attributes:
        cluster: the cluster of the launch.
        isolate_accelerator: the argument of the launch.
        specs: makes the WorkerSpecs of all placements of the group.
        encode: pickles the constructor arguments for workers with this hardware, by rank.
        prepare: brings the driver's code and environments to the nodes of new workers, whose placements it is given
            too, and returns the specs to start. Loop thread.
        restarts: True if failed workers are restarted.
    """

    cluster: Cluster
    isolate_accelerator: bool
    specs: Callable[[Sequence[Placement]], list[WorkerSpec]]
    encode: Callable[[Mapping[int, Any]], Sequence[Buffer]]
    prepare: Callable[[list[WorkerSpec], Sequence[Placement]], Awaitable[list[WorkerSpec]]]
    restarts: bool


class _Growth(msgspec.Struct, frozen=True):
    """The ranks to add: their workers, placements, nodes' names and arguments, and the group's new description."""

    grower: Grower
    specs: list[WorkerSpec]
    placements: list[Placement]
    nodes: list[str]
    parts: Sequence[Buffer]
    detail: str


def keeps(parts: Sequence[Buffer]) -> bool:
    """True if the constructor arguments are small enough to be kept for ranks that are added later."""
    return sum(memoryview(part).nbytes for part in parts) <= KEPT_ARGUMENTS


# --- adding ---


def add_ranks(control: GroupControl, strategy: PlacementStrategy, async_op: bool | None) -> Any:
    """Add ranks to a group; see `WorkerGroup.add_ranks`."""
    if not hasattr(strategy, "get_placement"):
        raise UsageError(
            f"add_ranks() was given {strategy!r}; it takes a PlacementStrategy, such as NodePlacementStrategy([0, 1])"
        )
    group = _begin(control, "add_ranks()")
    try:
        growth = _growth(group, control, strategy)
    except BaseException:
        group.membership.busy = False
        raise
    return _work(control, _add(control, growth), f"add_ranks() to group {group.name!r}", async_op)


def _growth(group: RemoteGroup, control: GroupControl, strategy: PlacementStrategy) -> _Growth:
    construction = group.construction
    assert construction is not None
    grower: Grower | None = construction.grow
    if grower is None or not construction.parts:
        raise UsageError(
            f"add_ranks(): the arguments of group {group.name!r} have more than {KEPT_ARGUMENTS >> 20} MiB, and were "
            "not kept after the launch: send large data by a channel or a method, or launch with a restart policy"
        )
    cluster, before = grower.cluster, control.placements
    chosen = sorted(strategy.get_placement(cluster, grower.isolate_accelerator), key=lambda one: one.rank)
    if not chosen:
        raise PlacementError("add_ranks() was given a placement without any rank")
    placements = [*before, *_following(before, chosen)]
    group.membership.additions += 1
    specs = [
        replace(spec, id=f"{group.launch}-{spec.rank}a{group.membership.additions}", resizes=-1)
        for spec in grower.specs(placements)[len(before) :]
    ]
    hardware = group_spec.hardware_of(placements, cluster)
    nodes = [cluster.get_node_info(one.cluster_node_rank) for one in placements]
    names = [cluster.node_name(node.node_rank) for node in nodes]
    detail = group_spec.detail_of(placements, nodes, names, hardware, grower.restarts)
    new = {rank for rank in hardware if rank >= len(before)}
    parts = grower.encode(hardware) if new else construction.parts
    added = len(before)
    return _Growth(grower, specs, placements[added:], names[added:], parts, group_spec.encode(detail))


def _following(before: Sequence[Placement], chosen: Sequence[Placement]) -> list[Placement]:
    """Return the *chosen* placements as those of the ranks that follow those *before*."""
    order = list(dict.fromkeys(one.cluster_node_rank for one in before))
    on_node: dict[int, int] = {}
    for one in before:
        on_node[one.cluster_node_rank] = on_node.get(one.cluster_node_rank, 0) + 1
    found = []
    for index, one in enumerate(chosen):
        node = one.cluster_node_rank
        if node not in order:
            order.append(node)
        local_rank = on_node[node] = on_node.get(node, 0) + 1
        found.append(
            dataclasses.replace(
                one, rank=len(before) + index, placement_node_rank=order.index(node), local_rank=local_rank - 1
            )
        )
    return [dataclasses.replace(one, local_world_size=on_node[one.cluster_node_rank]) for one in found]


async def _add(control: GroupControl, growth: _Growth) -> list[int]:
    runtime, group = control.runtime, control.group
    size = control.world_size
    try:
        await group.request_ready()
        specs = await growth.grower.prepare(growth.specs, growth.placements)
        if any(spec.claims for spec in specs):
            group.relays = None  # see `group.relays`: none stands between a robot and its caller
        workers = [(spec.id, node) for spec, node in zip(specs, growth.nodes, strict=True)]
        joined = group.begin_growth(workers, growth.parts)
        try:
            asked = AddRanks(group.namespace, group.name, specs)
            await send_launch(runtime, asked, _patience(control), lambda reply: group.update(reply.group.workers))
            await runtime.progress.during(joined, f"waiting for {counted(len(specs), 'more worker')} of {group.name}")
            await _resize(control, size + len(specs), growth.detail, stop=False)
        except BaseException as error:
            reason = error if isinstance(error, Exception) else GroupClosedError("add_ranks() was cancelled")
            group.membership.withdraw(reason)
            if not group.closing:
                await _clean_up(control, size)
            raise
        group.grow()
        _tell(control, size + len(specs), range(size))
        return list(range(size, size + len(specs)))
    finally:
        group.membership.busy = False


async def _clean_up(control: GroupControl, size: int) -> None:
    """End the workers of ranks that could not be added."""
    try:
        await _resize(control, size, control.group.detail, stop=True, grace_s=1.0)
    except RlinfActorsError as error:
        log.warning("workers that could not be added to group %r may run until it ends: %s", control.name, error)


# --- removing ---


def remove_ranks(control: GroupControl, ranks: Sequence[int], grace: float, async_op: bool | None) -> Any:
    """Remove the highest ranks from a group; see `WorkerGroup.remove_ranks`."""
    size = control.world_size
    grace = protocol.number(grace, "the grace")
    if sorted(ranks) != list(range(size - len(ranks), size)) or not 0 < len(ranks) < size:
        told = f"remove_ranks({', '.join(map(str, ranks))}): group {control.name!r} has "
        if size == 1:
            raise PlacementError(f"{told}only rank 0, which cannot be removed: end the group by shutdown()")
        highest = ", ".join(map(str, range(size - max(1, min(len(ranks), size - 1)), size)))
        raise PlacementError(
            f"{told}ranks 0-{size - 1}, and only its highest can be removed: remove_ranks({highest}). Rank 0 stays: "
            "end the group by shutdown()"
        )
    group = _begin(control, "remove_ranks()")
    work = _remove(control, size - len(ranks), grace)
    return _work(control, work, f"remove_ranks() of group {group.name!r}", async_op)


async def _remove(control: GroupControl, size: int, grace: float) -> None:
    group = control.group
    try:
        await group.request_ready()
        detail = _shortened(control, size)
        await _resize(control, size, detail, stop=False)
        leaving = group.shrink(size)
        _tell(control, size, range(size))
        alive = [peer for peer in leaving if peer.error is None]
        if "_close" in control.facts.private and alive:
            closing: WorkerGroupFuncResult[Any] = WorkerGroupFuncResult(control.runtime, "_close", alive, grace)
            closing._start(())
            try:
                await closing
            except CallTimeoutError:
                log.warning("group %r: _close() of removed ranks took longer than %g s", control.name, grace)
            except RlinfActorsError as error:
                log.warning("group %r: _close() of removed ranks failed: %s", control.name, error)
        ending = _resize(control, size, detail, stop=True, grace_s=grace)
        await control.runtime.progress.during(
            ending, f"waiting for the end of {counted(len(leaving), 'worker')} of {group.name}"
        )
        group.membership.end_removed()
    finally:
        group.membership.busy = False


def _shortened(control: GroupControl, size: int) -> str:
    detail = group_spec.decode(control.group.detail, control.name)
    hardware = {rank: pieces for rank, pieces in detail.hardware.items() if rank < size}
    return group_spec.encode(
        replace(
            detail,
            placements=detail.placements[:size],
            nodes=detail.nodes[:size],
            models=detail.models[:size],
            hardware=hardware,
        )
    )


# --- both ---


def _begin(control: GroupControl, what: str) -> RemoteGroup:
    group = control.group
    if group.construction is None:
        raise UsageError(
            f"{what}: group {control.name!r} can be resized only by the process that launched it, and not if it is "
            "detached"
        )
    if group.closing or group.gone.done():
        raise GroupClosedError(f"{what}: group {control.name!r} was shut down")
    if group.membership.busy:
        raise UsageError(f"{what}: group {control.name!r} is being resized already: wait for that first")
    group.membership.busy = True
    return group


def _work(control: GroupControl, coroutine: Any, what: str, async_op: bool | None) -> Any:
    work = AsyncWork.of(control.runtime.io, coroutine, what)
    if async_op is None:
        async_op = asyncio._get_running_loop() is not None
    return work if async_op else work.wait()


async def _resize(control: GroupControl, size: int, detail: str, stop: bool, grace_s: float = 0.0) -> None:
    group = control.group
    asked = ResizeGroup(group.namespace, group.name, group.launch, size, detail, stop, grace_s)
    await control.runtime.ask(asked, Done, grace_s + _patience(control))
    group.detail = detail


def _patience(control: GroupControl) -> float:
    return control.runtime.groups._head_grace_s() + 10.0


def _tell(control: GroupControl, size: int, ranks: range) -> None:
    """Tell the workers of *ranks* that the group has *size* ranks now, and call their hook if the class has one."""
    peers: list[Peer] = [control.group.peers[rank] for rank in ranks if control.group.peers[rank].error is None]
    for peer in peers:
        peer.send(frames.Resized(size))
    if peers and _defines_hook(control.facts.cls):
        hook: WorkerGroupFuncResult[Any] = WorkerGroupFuncResult(control.runtime, RESIZE_HOOK, peers, None)
        hook._start(())


def _defines_hook(cls: type | None) -> bool:
    """True if the user's class overrides Worker's hook, which does nothing."""
    definer = next((klass for klass in cls.__mro__ if RESIZE_HOOK in vars(klass)), None) if cls is not None else None
    return definer is not None and not definer.__module__.startswith("rlinf_actors.")
