"""A worker's channels: `Worker.create_channel` and `connect_channel`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import UsageError

if TYPE_CHECKING:
    from rlinf_actors.channel.channel import Channel
    from rlinf_actors.runtime.future import AsyncWork


class Channels:
    """What a Worker has of channels. Any thread but the I/O thread."""

    @overload
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: Literal[False] = False,
    ) -> Channel[Any]: ...
    @overload
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: Literal[True],
    ) -> AsyncWork[Channel[Any]]: ...
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: bool = False,
    ) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Make a channel, or connect to the one of that name with a warning; it ends with this worker.

        Args:
            channel_name: unique in the job; *name* is its older keyword.
            maxsize, distributed, node_rank, local, max_deliveries, async_op: as Channel.create.
            name: older keyword for *channel_name*.
            group_affinity: (older) place it where a worker of this group runs, instead of on *node_rank*.
            group_rank_affinity: (older) which worker of that group.
            detached: it ends with the job's driver instead of this worker.

        Raises:
            UsageError: *maxsize* is no int (it was the fourth argument once), or there is no such worker.
        """
        from rlinf_actors.channel.channel import create_channel

        chosen = channel_name if channel_name is not None else name
        if chosen is None:
            raise UsageError("create_channel() needs a name: create_channel('rollouts')")
        beside = None if group_affinity is None else partial(_node_of, group_affinity, group_rank_affinity)
        work = create_channel(chosen, maxsize, distributed, node_rank, local, True, detached, max_deliveries, beside)
        return work if async_op else work.wait()

    @overload
    def connect_channel(self, name: str, async_op: Literal[False] = False) -> Channel[Any]: ...
    @overload
    def connect_channel(self, name: str, async_op: Literal[True]) -> AsyncWork[Channel[Any]]: ...
    def connect_channel(self, name: str, async_op: bool = False) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Return a handle of a channel that another process of the job made; *async_op* as Channel.connect.

        Raises:
            GroupNotFoundError: (a ValueError) there is none of that name.
        """
        from rlinf_actors.channel.channel import Channel

        return Channel.connect(name, async_op=True) if async_op else Channel.connect(name)


async def _node_of(group: str, rank: int) -> int:
    job = worker_job()
    if job is None:
        raise UsageError("group_affinity needs a worker of a group")
    runtime = await job.connected()
    found = await runtime.groups.find(runtime.namespace, group)
    state = found.states.get(rank)
    if state is None:
        raise UsageError(f"group {group!r} has no rank {rank}: it has {len(found.peers)} workers")
    return state.node_rank
