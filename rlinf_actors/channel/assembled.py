"""Make a Channel of hosts that older code has launched itself, and `WeightedItem`.

RLinf's own code, and code that was written for it, launches a group of ChannelWorker, makes an empty Channel and calls
its `_initialize`. `Channel.create` does all of this in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlinf_actors.channel.client import remote_channel
from rlinf_actors.channel.connecting import member
from rlinf_actors.channel.local import LocalChannel
from rlinf_actors.errors import UsageError

if TYPE_CHECKING:
    from rlinf_actors.channel.inspection import Backend


@dataclass(order=True)
class WeightedItem:
    """An item and its weight. WeightedItems compare by weight.

    Attributes:
        weight: the weight.
        item: the item.
    """

    weight: int
    item: Any = field(compare=False)


class AssembledChannel:
    """Base class of Channel that builds one in two steps, `Channel()` and `_initialize()`, as RLinf's code does."""

    _name: str
    _namespace: str
    _made: Backend | None
    _maxsize: int
    _distributed = False
    _channel_actors_by_rank: Mapping[int, Any] = {}

    def _initialize(
        self,
        channel_name: str,
        channel_worker_group: Any,
        channel_worker_actor: Any = None,
        current_worker: Any = None,
        local_channel: LocalChannel | None = None,
        maxsize: int = 0,
        channel_actors: Mapping[int, Any] | None = None,
    ) -> None:
        """Make this empty Channel, which ``Channel()`` has returned, a handle of the channel *channel_name*.

        Args:
            channel_name: name of the channel.
            channel_worker_group: the group that `ChannelWorker.create_group().launch()` has returned; None for a local
                channel.
            channel_worker_actor: ignored: the hosts are those of the group.
            current_worker: ignored.
            local_channel: the LocalChannel; None for a channel with hosts.
            maxsize: most items that wait under each key; 0 for no limit.
            channel_actors: the host of each rank.

        Raises:
            UsageError: neither a group nor a LocalChannel is given.
        """
        self._name, self._maxsize = channel_name, maxsize
        if local_channel is not None:
            self._made = local_channel
            return
        if channel_worker_group is None:
            raise UsageError(
                f"channel {channel_name!r} has no process that holds it: give the group of ChannelWorker, or call "
                "Channel.create()"
            )
        here, hosts = member(), channel_worker_group.control.group
        self._namespace = hosts.namespace
        self._made = remote_channel(here.runtime, hosts, channel_name, here.node_rank, here.name)
        self._channel_actors_by_rank = dict(channel_actors or {})
        self._distributed = len(hosts.peers) > 1
