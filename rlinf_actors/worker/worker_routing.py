"""The methods of Worker that exchange batches with all ranks of another group.

routing.route_plan decides which rank sends which elements to which rank.

A shard travels through a channel, under the key of its route, or directly from worker to worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from rlinf_actors.errors import RoutingError, UsageError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.plurals import counted
from rlinf_actors.routing import route_plan as routing
from rlinf_actors.routing.batches import infer_batch_size, merge_batches, split_batch, validate_batch_size
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.route_work import AsyncRouteWork
from rlinf_actors.worker.worker_messaging import Messaging, Options

if TYPE_CHECKING:
    from rlinf_actors.channel.channel import Channel


class Routing(Messaging):
    """The methods of Worker that send a batch to another group and receive a batch from it.

    The ranks of a group hold equal parts of a batch, in rank order. The groups may have different world sizes; both
    must divide the batch. Each element arrives once, and in order. Any thread and any coroutine may call the methods.

    In decoupled mode no rank is paired with another: any rank of the receiving group takes a shard, and its answer goes
    back to the rank that sent the shard. Such a worker has an attribute ``batch_router``: a dict with an empty list for
    each tag that it answers. The n-th shard that is answered is the n-th shard that was received, so one thread or task
    of a worker receives the shards of a tag and answers them.
    """

    _rank: int
    batch_router: dict[str, list[str]] | None = None

    @overload
    def send_to(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: Literal[False] = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> None: ...
    @overload
    def send_to(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: Literal[True],
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncRouteWork: ...
    def send_to(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncRouteWork | None:
        """Send this rank's part of a batch to the ranks of another group that receive a share of it.

        The first call to a group asks the head for its world size; with *async_op* the caller does not wait for that.

        Args:
            group_name: the receiving group.
            channel: the channel to put the shards into; None with *enable_p2p*.
            data: this rank's part of the batch: a tensor, array, list, or dict of these.
            route_key: tells streams of the same tag apart.
            mode: part of the tag: the receiver uses the tag ``{mode}_{tag}``. In decoupled mode, part of the return
                route instead.
            tag: kind of message; None for the default.
            async_op: return an AsyncRouteWork. It is done when the channel, or the receivers' runtimes, have all
                shards.
            batch_size: number of elements of all ranks together; by default the size of *data* times the world size.
            split_fn: called with *data* and the sizes of the shards; returns the shards. By default `split_batch`.
            enable_p2p: True to send the shards directly instead of through a channel.
            options: as for `send`, with *enable_p2p*.
            decoupled_mode: True to send to whichever rank is free, or to answer such shards.
            send_queue_size: in decoupled mode, the number of shards to send; 0 for all.

        Returns:
            None, or the AsyncRouteWork of the send.

        Raises:
            RoutingError: the batch cannot be divided among the ranks, or *split_fn* returned another number of shards.
            PeerDiedError: a receiver is gone, and its shard still waited for room.
            GroupNotFoundError: no group of that name is running.
            ValueError: *channel* is None without *enable_p2p*.
        """
        router = self._checked("send_to", channel, enable_p2p, decoupled_mode)
        size = infer_batch_size(data) * self._world_size if batch_size is None else batch_size
        recorded = None if router is None or tag is None else router.get(tag)
        me = self._worker_address.root_group_name
        work = AsyncRouteWork(None, what=f"send_to() to {group_name!r}")

        def start(world_size: int) -> None:
            if router is None:
                plan = routing.build_send_plan(
                    src_group_name=me, dst_group_name=group_name, src_rank=self._rank, src_world_size=self._world_size,
                    dst_world_size=world_size, tag=tag if mode is None else f"{mode}_{tag}", route_key=route_key,
                    batch_size=size,
                )  # fmt: skip
            else:
                plan = routing.decoupled_build_send_plan(
                    src_group_name=me, dst_group_name=group_name, src_rank=self._rank, src_world_size=self._world_size,
                    dst_world_size=world_size, tag=tag, route_key=route_key, batch_size=size, mode=mode,
                    tag_batch_router=recorded, send_queue_size=send_queue_size,
                )  # fmt: skip
            shards = _shards(data, plan, split_fn or split_batch)
            if recorded is not None:
                del recorded[: len(shards)]  # each received shard is answered once
            works = self._start_sends(group_name, None if enable_p2p else channel, plan, shards, options)
            work.begin(works, lambda _: None)
            if router is None and not enable_p2p:
                self._watch_peers(work, group_name, plan)

        self._messenger("send_to()", None).starts.run(group_name, start, work.reject)
        if async_op:
            return work
        work.wait()
        return None

    @overload
    def recv_from(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: Literal[True],
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> AsyncRouteWork: ...
    @overload
    def recv_from(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any: ...
    def recv_from(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Options = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Receive this rank's part of a batch from the ranks of another group.

        The first call for a group asks the head for its world size; with *async_op* the caller does not wait for that.

        Args:
            group_name: the sending group.
            channel: the channel to get the shards from; None with *enable_p2p*.
            route_key, tag: as for `send_to`.
            async_op: return an AsyncRouteWork of the result. If the work is dropped, no shard is lost.
            batch_size: number of elements of all ranks together. It may be None if not *decoupled_mode*; then the sizes
                of the shards are not checked.
            merge_fn: called with the list of shards; returns the result. By default `merge_batches`.
            infer_batch_size_fn: returns the size of a shard, for the check.
            enable_p2p: True if the shards are sent directly instead of through a channel.
            options: as for `recv`, with *enable_p2p*.
            decoupled_mode: True to receive shards of any rank, or the answers to such shards.
            recv_queue_size: in decoupled mode, the number of shards to receive; 0 for all.

        Returns:
            The merged shards, or the AsyncRouteWork of them.

        Raises:
            RoutingError: the batch cannot be divided among the ranks, or a shard has another size.
            PeerDiedError: a sender is gone, and its shard is not there.
            GroupNotFoundError: no group of that name is running.
            ValueError: *channel* is None without *enable_p2p*.
        """
        router = self._checked("recv_from", channel, enable_p2p, decoupled_mode)
        me = self._worker_address.root_group_name
        work = AsyncRouteWork(None, what=f"recv_from() from {group_name!r}")

        def start(world_size: int) -> None:
            if router is None:
                plan = routing.build_recv_plan(
                    src_group_name=group_name, dst_group_name=me, dst_rank=self._rank, src_world_size=world_size,
                    dst_world_size=self._world_size, tag=tag, route_key=route_key, batch_size=batch_size,
                )  # fmt: skip
            elif batch_size is None:
                raise RoutingError("recv_from() with decoupled_mode=True needs batch_size=")
            else:
                plan = routing.decoupled_build_recv_plan(
                    src_group_name=group_name, dst_group_name=me, recv_rank=None if tag in router else self._rank,
                    src_world_size=self._world_size, dst_world_size=world_size, tag=tag, route_key=route_key,
                    batch_size=batch_size, recv_queue_size=recv_queue_size,
                )  # fmt: skip
            works: list[AsyncWork[Any]]
            if enable_p2p:
                works = [self.recv(group_name, one.peer_rank, async_op=True, options=options) for one in plan.entries]
            else:
                assert channel is not None
                works = [channel.get(key=one.key, async_op=True) for one in plan.entries]
            sizes = [one.batch_size for one in plan.entries]
            work.begin(works, partial(_merged, router, sizes, merge_fn, infer_batch_size_fn))
            if router is None and not enable_p2p:
                self._watch_peers(work, group_name, plan)

        self._messenger("recv_from()", None).starts.run(group_name, start, work.reject)
        return work if async_op else work.wait()

    def _checked(
        self, method: str, channel: object, enable_p2p: bool, decoupled_mode: bool
    ) -> dict[str, list[str]] | None:
        """Check the mode of a call. Return the worker's batch_router in decoupled mode, else None."""
        if len(self._worker_address.rank_path) > 1:
            raise UsageError(f"{method}() belongs to the ranks of a group: call it in the worker, not in its child")
        if not enable_p2p and channel is None:
            raise ValueError(f"{method} requires ``channel`` when enable_p2p is False.")
        if not decoupled_mode:
            return None
        if enable_p2p:
            raise RoutingError(f"{method}() with decoupled_mode=True needs a channel: enable_p2p must be False")
        if self.batch_router is None:
            raise RoutingError(
                f"{method}() with decoupled_mode=True needs the attribute batch_router: a dict with an empty list for "
                "each tag that this worker answers"
            )
        return self.batch_router

    def _start_sends(
        self,
        group_name: str,
        channel: Channel[Any] | None,
        plan: routing.RoutePlan,
        shards: Sequence[Any],
        options: Options,
    ) -> list[AsyncWork[Any]]:
        """Start to send each shard to the peer that *plan* has for it: through *channel*, or directly if it is None."""
        works: list[AsyncWork[Any]] = []
        for entry, shard in zip(plan.entries, shards, strict=True):
            if channel is None:
                works.append(self.send(shard, group_name, entry.peer_rank, async_op=True, options=options))
                continue
            decoupled = isinstance(entry, routing.DecoupledRouteEntry)
            item = {"batch_index": entry.batch_index, "batch": shard} if decoupled else shard
            works.append(channel.put(item, key=entry.key, async_op=True))
        return works

    def _watch_peers(self, work: AsyncRouteWork, group_name: str, plan: routing.RoutePlan) -> None:
        """Withdraw the shards of *work* whose peers are gone, since a channel does not know who puts and who gets."""
        watch = self._messenger("routing", None).routed
        for index, entry in enumerate(plan.entries):
            watch.add(WorkerAddress(group_name, [entry.peer_rank]), work, index)


def _shards(data: Any, plan: routing.RoutePlan, split: Callable[[Any, list[int]], list[Any]]) -> list[Any]:
    sizes = [entry.batch_size for entry in plan.entries]
    shards = split(data, sizes)
    if len(shards) != len(sizes):
        raise RoutingError(
            f"split_fn returned {counted(len(shards), 'shard')} for send_to() to {plan.dst_group_name!r}, which needs "
            f"{len(sizes)}, of sizes {sizes}"
        )
    return shards


def _merged(
    router: dict[str, list[str]] | None,
    sizes: Sequence[int | None],
    merge_fn: Callable[[list[Any]], Any] | None,
    infer_batch_size_fn: Callable[[Any], int] | None,
    items: list[Any],
) -> Any:
    """Return the batch that the shards *items* make. In decoupled mode note or use their return routes."""
    if not items:
        return None
    if router is not None:
        items = _without_routes(router, items)
    for item, size in zip(items, sizes, strict=True):
        validate_batch_size(item, size, infer_batch_size_fn)
    return merge_batches(items) if merge_fn is None else merge_fn(items)


def _without_routes(router: dict[str, list[str]], items: list[dict[str, Any]]) -> list[Any]:
    """Return the shards of a decoupled batch. Store the routes of requests in *router*; sort answers by their index."""
    routes = [routing.split_channel_message(item["batch_index"]) for item in items]
    tag = routes[0][3]
    if tag in router:
        router[tag] += [item["batch_index"] for item in items]
        return [item["batch"] for item in items]
    order = sorted(range(len(items)), key=lambda index: routes[index][1])
    return [items[index]["batch"] for index in order]
