"""Plans of routed batches: which rank of one group sends how many elements to which rank of another group.

A routed batch has *batch_size* elements. The ranks of the sending group hold equal, contiguous parts of it, in rank
order, and the ranks of the receiving group get equal, contiguous parts. So both world sizes must divide the batch. A
rank sends one shard to each rank whose part overlaps with its own part. Both sides compute the same plan from world
sizes alone, and no message is needed to agree on it.

In decoupled mode no rank is paired with another: a shard goes to whichever receiver is free, and carries a return route
(`build_return_route`) by which the answer finds the sender.

`Worker.send_to` and `Worker.recv_from` carry plans out. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rlinf_actors.errors import RoutingError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.plurals import counted

ROUTING_KEY_PREFIX = "scheduler_route"
ROUTING_DEFAULT_TAG = "default"

RouteKey = tuple[str, str, str, str, str, "int | None", "int | None"]
"""Channel key of a route: prefix, sending group, receiving group, tag, route key, sending rank, receiving rank."""


# --- who sends what to whom ---


class RouteShard(msgspec.Struct, frozen=True):
    """The elements ``start`` to ``stop - 1`` of a batch, which travel from one rank to another."""

    src_rank: int
    dst_rank: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def shards(batch_size: int, src_world_size: int, dst_world_size: int) -> Iterator[RouteShard]:
    """Yield all shards of a batch, in the order of its elements.

    Raises:
        RoutingError: a world size is not positive or does not divide *batch_size*.
    """
    _check_divisible(batch_size, src_world_size, dst_world_size)
    for src_rank in range(src_world_size):
        yield from _shards_of(batch_size, src_world_size, dst_world_size, src_rank)


def _shards_of(batch_size: int, own_world_size: int, other_world_size: int, rank: int) -> Iterator[RouteShard]:
    """Yield the shards of one rank: as the sender if its group is *own*. The caller has checked the arguments."""
    own, other = batch_size // own_world_size, batch_size // other_world_size
    start, end = rank * own, (rank + 1) * own
    while start < end:
        peer = start // other
        stop = min(end, (peer + 1) * other)
        yield RouteShard(rank, peer, start, stop)
        start = stop


def _check_divisible(batch_size: int, src_world_size: int, dst_world_size: int) -> None:
    for name, size in (("src_world_size", src_world_size), ("dst_world_size", dst_world_size)):
        if size < 1:
            raise RoutingError(f"{name} ({size}) must be 1 or more")
        if batch_size % size:
            nearest = math.lcm(src_world_size, dst_world_size)
            raise RoutingError(
                f"batch_size ({batch_size}) must be divisible by {name} ({size}). A batch between {src_world_size} and "
                f"{counted(dst_world_size, 'rank')} must be a multiple of {nearest}, such as "
                f"{max(1, math.ceil(batch_size / nearest)) * nearest}"
            )


def _check_rank(name: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise RoutingError(f"{name} ({rank}) must be in [0, {world_size})")


class CommMapper:
    """Static methods that pair the ranks of two groups which exchange parts of one batch."""

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        """Return a channel key for messages of one rank to another: ``src_dst_extra``."""
        return f"{src_rank}_{dst_rank}_{extra}"

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """Return the ranks that *src_rank* sends to, in order, each with its number of elements.

        Args:
            batch_size: number of elements of all senders together.
            src_world_size, dst_world_size: number of ranks of the sending and of the receiving group.
            src_rank: rank of the sender.

        Raises:
            RoutingError: a world size does not divide *batch_size*, or the group has no rank *src_rank*.
        """
        _check_divisible(batch_size, src_world_size, dst_world_size)
        _check_rank("src_rank", src_rank, src_world_size)
        return [(one.dst_rank, one.size) for one in _shards_of(batch_size, src_world_size, dst_world_size, src_rank)]

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """Return the ranks that *dst_rank* receives from, in order, each with its number of elements.

        The arguments and errors are those of `get_dst_ranks`, with the receiver's rank instead of the sender's.
        """
        _check_divisible(batch_size, src_world_size, dst_world_size)
        _check_rank("dst_rank", dst_rank, dst_world_size)
        # the pairs are the same in both directions
        return [(one.dst_rank, one.size) for one in _shards_of(batch_size, dst_world_size, src_world_size, dst_rank)]

    @staticmethod
    def decoupled_get_batch_size(
        batch_size: int, src_world_size: int, dst_world_size: int, queue_size: int = 0
    ) -> list[int]:
        """Return the sizes of the shards that one rank handles in decoupled mode.

        A batch has one shard for each rank of the larger group. A rank of the larger group handles one shard; a rank of
        the smaller group handles as many as there are larger ranks for each smaller rank.

        Args:
            batch_size: number of elements of all ranks together.
            src_world_size: number of ranks of the group that the result is for.
            dst_world_size: number of ranks of the other group.
            queue_size: number of shards that a rank of the smaller group handles at a time; 0 for all of them.

        Raises:
            RoutingError: the larger world size does not divide *batch_size*, or *queue_size* is too large.
        """
        for name, size in (("src_world_size", src_world_size), ("dst_world_size", dst_world_size)):
            if size < 1:
                raise RoutingError(f"{name} ({size}) must be 1 or more")
        split_size = max(src_world_size, dst_world_size)
        if batch_size % split_size:
            raise RoutingError(
                f"batch_size ({batch_size}) must be divisible by split_size ({split_size}), the larger world size of "
                f"src_world_size ({src_world_size}) and dst_world_size ({dst_world_size})"
            )
        count = max(1, dst_world_size // src_world_size)
        if queue_size > 0 and dst_world_size > src_world_size:
            if queue_size > count:
                raise RoutingError(
                    f"queue_size {queue_size} must be at most dst_world_size {dst_world_size} // src_world_size "
                    f"{src_world_size} = {count}"
                )
            count = queue_size
        return [batch_size // split_size] * count


# --- keys and return routes ---


def normalize_route_tag(tag: str | None) -> str:
    """Return *tag*, or the default tag if it is None or empty."""
    return tag or ROUTING_DEFAULT_TAG


def normalize_route_key(route_key: Any) -> str:
    """Return *route_key* as text: "" for None, a str as it is, and the repr of anything else."""
    if route_key is None:
        return ""
    return route_key if isinstance(route_key, str) else repr(route_key)


def build_route_channel_key(
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteKey:
    """Return the channel key of a route from one rank to another.

    Args:
        src_group_name, dst_group_name: the sending and the receiving group.
        src_rank, dst_rank: the sending and the receiving rank; None in decoupled mode, where any rank may do it.
        tag: kind of message; None for the default.
        route_key: tells streams of the same tag apart.
    """
    return (
        ROUTING_KEY_PREFIX,
        src_group_name,
        dst_group_name,
        normalize_route_tag(tag),
        normalize_route_key(route_key),
        src_rank,
        dst_rank,
    )


def build_send_key(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteKey:
    """Return the channel key under which a shard is put. The arguments are those of `build_route_channel_key`."""
    return build_route_channel_key(src_group_name, dst_group_name, src_rank, dst_rank, tag, route_key)


def build_return_route(send_rank: int | None, batch_idx: int, mode: str | None, tag: str | None) -> str:
    """Return the text ``{send_rank}_{batch_idx}_{mode}_{tag}``, which a shard carries in decoupled mode.

    Raises:
        RoutingError: *mode* contains an underscore, so that the text could not be split again.
    """
    if mode is not None and "_" in mode:
        raise RoutingError(f"mode {mode!r} must not contain an underscore: use another name for it")
    return f"{send_rank}_{batch_idx}_{mode}_{tag}"


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Split a return route into the rank that sent the shard, the index of the shard, mode and tag.

    Raises:
        RoutingError: the text has another form than ``{send_rank}_{batch_idx}_{mode}_{tag}``.
    """
    parts = str(channel_message).split("_", 3)
    if len(parts) != 4 or not parts[0].isdigit() or not parts[1].isdigit():
        raise RoutingError(
            f"{channel_message!r} is no return route, which has the form {{send_rank}}_{{batch_idx}}_{{mode}}_{{tag}}"
        )
    return int(parts[0]), int(parts[1]), parts[2], parts[3]


# --- the plan of one rank ---


class RouteEntry(msgspec.Struct, frozen=True):
    """One shard that a rank sends or receives.

    Attributes:
        peer_rank: rank at the other end.
        batch_size: number of elements; None if it is not known.
        key: channel key of the shard.
    """

    peer_rank: int
    batch_size: int | None
    key: Any


class DecoupledRouteEntry(msgspec.Struct, frozen=True):
    """One shard that a rank sends or receives in decoupled mode.

    Attributes:
        batch_size: number of elements; None if it is not known.
        key: channel key of the shard.
        batch_index: return route that the shard carries; None for a receiver, which gets the route with the shard.
    """

    batch_size: int | None
    key: Any
    batch_index: str | None


class RoutePlan(msgspec.Struct, frozen=True):
    """All shards that one rank sends or receives. The rank that the plan does not belong to is None."""

    src_group_name: str
    dst_group_name: str
    src_rank: int | None
    dst_rank: int | None
    src_world_size: int
    dst_world_size: int
    tag: str
    route_key: Any
    entries: list[Any]


def build_send_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
) -> RoutePlan:
    """Return the shards that one rank sends.

    Args:
        src_group_name, dst_group_name: the sending and the receiving group.
        src_rank: rank of the sender.
        src_world_size, dst_world_size: number of ranks of the two groups.
        tag: kind of message; None for the default.
        route_key: tells streams of the same tag apart.
        batch_size: number of elements of all senders together.

    Raises:
        RoutingError: a world size does not divide *batch_size*, or the group has no rank *src_rank*.
    """
    pairs = CommMapper.get_dst_ranks(batch_size, src_world_size, dst_world_size, src_rank)
    entries = [
        RouteEntry(rank, size, build_route_channel_key(src_group_name, dst_group_name, src_rank, rank, tag, route_key))
        for rank, size in pairs
    ]
    return RoutePlan(
        src_group_name, dst_group_name, src_rank, None, src_world_size, dst_world_size,
        normalize_route_tag(tag), route_key, entries,
    )  # fmt: skip


def build_recv_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    dst_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int | None,
) -> RoutePlan:
    """Return the shards that one rank receives.

    Args:
        dst_rank: rank of the receiver.
        batch_size: number of elements of all receivers together. If it is None, the plan has all shards but not their
            sizes, since the pairs of ranks depend on the world sizes only.

    The other arguments and the errors are those of `build_send_plan`.
    """
    assumed = math.lcm(max(1, src_world_size), max(1, dst_world_size)) if batch_size is None else batch_size
    pairs = CommMapper.get_src_ranks(assumed, src_world_size, dst_world_size, dst_rank)
    entries = [
        RouteEntry(
            rank,
            None if batch_size is None else size,
            build_route_channel_key(src_group_name, dst_group_name, rank, dst_rank, tag, route_key),
        )
        for rank, size in pairs
    ]
    return RoutePlan(
        src_group_name, dst_group_name, None, dst_rank, src_world_size, dst_world_size,
        normalize_route_tag(tag), route_key, entries,
    )  # fmt: skip


def decoupled_build_send_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
    mode: str | None = None,
    tag_batch_router: Sequence[str] | None = None,
    send_queue_size: int = 0,
) -> RoutePlan:
    """Return the shards that one rank sends in decoupled mode.

    Args:
        src_rank: rank of the sender, for the return routes of a request; not used for an answer.
        mode: part of the return routes of a request, such as ``train``.
        tag_batch_router: for an answer, the return routes of the shards that are answered, in their order; None for a
            request. A shard of an answer goes to the rank in its return route, under the tag in that route.
        send_queue_size: as *queue_size* of `CommMapper.decoupled_get_batch_size`.

    The other arguments are those of `build_send_plan`.

    Raises:
        RoutingError: the batch cannot be divided, or there are fewer return routes than shards.
    """
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, send_queue_size)
    if tag_batch_router is not None and len(tag_batch_router) < len(sizes):
        raise RoutingError(
            f"an answer to {dst_group_name!r} has {len(sizes)} shards, but {len(tag_batch_router)} shards of tag "
            f"{tag!r} were received since the last answer: receive before each answer"
        )
    entries: list[DecoupledRouteEntry] = []
    to: int | None = None
    for index, size in enumerate(sizes):
        if tag_batch_router is None:
            route = build_return_route(src_rank, index, mode, tag)
        else:
            route = tag_batch_router[index]
            to, _, _, tag = split_channel_message(route)
        key = build_route_channel_key(src_group_name, dst_group_name, None, to, tag, route_key)
        entries.append(DecoupledRouteEntry(size, key, route))
    return RoutePlan(
        src_group_name, dst_group_name, None, to, src_world_size, dst_world_size,
        normalize_route_tag(tag), route_key, entries,
    )  # fmt: skip


def decoupled_build_recv_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    recv_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
    recv_queue_size: int = 0,
) -> RoutePlan:
    """Return the shards that one rank receives in decoupled mode.

    Args:
        recv_rank: rank of the receiver of an answer; None for requests, which any rank may receive.
        src_world_size: number of ranks of the receiver's own group.
        dst_world_size: number of ranks of the other group.
        recv_queue_size: as *queue_size* of `CommMapper.decoupled_get_batch_size`.

    The other arguments are those of `build_recv_plan`.

    Raises:
        RoutingError: the batch cannot be divided.
    """
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, recv_queue_size)
    key = build_route_channel_key(src_group_name, dst_group_name, None, recv_rank, tag, route_key)
    return RoutePlan(
        src_group_name, dst_group_name, None, None, src_world_size, dst_world_size,
        normalize_route_tag(tag), route_key, [DecoupledRouteEntry(size, key, None) for size in sizes],
    )  # fmt: skip


# --- world sizes ---


class _KnowsWorkers(Protocol):
    def get_worker_info(self, address: WorkerAddress) -> Any: ...


def get_group_info(manager_proxy: _KnowsWorkers, group_name: str) -> Any:
    """Return the WorkerInfo of rank 0 of a group. Takes a round trip to the head.

    Args:
        manager_proxy: `Worker.manager_proxy` of this worker.
        group_name: name of the group.

    Raises:
        GroupNotFoundError: (a ValueError) no group of that name is running.
    """
    return manager_proxy.get_worker_info(WorkerAddress(group_name, [0]))


def get_group_world_size(manager_proxy: _KnowsWorkers, group_name: str) -> int:
    """Return the number of ranks of a group. Arguments and errors are those of `get_group_info`."""
    return int(get_group_info(manager_proxy, group_name).group_world_size)
