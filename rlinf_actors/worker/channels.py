"""A worker's channels: `Worker.create_channel` and `connect_channel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.errors import UsageError

if TYPE_CHECKING:
    from rlinf_actors.channel.channel import Channel


class Channels:
    """What a Worker has of channels. Both block for a round trip to the head; any thread but the I/O thread."""

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
    ) -> Channel:
        """Make a channel, or connect to the one of that name with a warning; it ends with this worker.

        Args:
            channel_name: unique in the job; *name* is its older keyword.
            maxsize, distributed, node_rank, local: as Channel.create.
            name: older keyword for *channel_name*.
            group_affinity: (older) place it where a worker of this group runs, instead of on *node_rank*.
            group_rank_affinity: (older) which worker of that group.
            detached: it ends with the job's driver instead of this worker.

        Raises:
            UsageError: *maxsize* is no int (it was the fourth argument once), or there is no such worker.
        """
        from rlinf_actors.channel.channel import Channel

        chosen = channel_name if channel_name is not None else name
        if chosen is None:
            raise UsageError("create_channel() needs a name: create_channel('rollouts')")
        if group_affinity is not None:
            node_rank = _node_of(group_affinity, group_rank_affinity)
        return Channel.create(chosen, maxsize, distributed, node_rank, local, detached=detached)

    def connect_channel(self, name: str) -> Channel:
        """A handle of a channel that another process of the job made.

        Raises:
            GroupNotFoundError: (a ValueError) there is none of that name.
        """
        from rlinf_actors.channel.channel import Channel

        return Channel.connect(name)


def _node_of(group: str, rank: int) -> int:
    job = worker_job()
    if job is None:
        raise UsageError("group_affinity needs a worker of a group")
    runtime = job.connect()
    found = runtime.io.submit(runtime.groups.find(runtime.namespace, group)).result()
    state = found.states.get(rank)
    if state is None:
        raise UsageError(f"group {group!r} has no rank {rank}: it has {len(found.peers)} workers")
    return state.node_rank
