"""ChannelWorker: the hosts of a channel, for older code that launches them itself; see channel.assembled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rlinf_actors.channel.connecting import HOST, check_name
from rlinf_actors.channel.queue_commands import MAX_DELIVERIES
from rlinf_actors.cluster.service import launch_service
from rlinf_actors.errors import UsageError
from rlinf_actors.group.class_facts import facts_of
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.placement.strategies import NodePlacementStrategy
from rlinf_actors.settings import Settings
from rlinf_actors.wire.values import CHANNEL_GROUPS
from rlinf_actors.worker.channelhost import ChannelHost

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.placement.strategies import PlacementStrategy


class ChannelWorker(ChannelHost):
    """The class of the processes that store a channel's items, for code that launches them itself.

    Scripts call `Channel.create` instead.
    """

    @classmethod
    def create_group(cls, maxsize: int = 0) -> ChannelLauncher:  # type: ignore[override]
        """Return a group of hosts that does not run yet: call ``launch`` on it.

        Args:
            maxsize: most items that wait under each key; 0 for no limit.
        """
        return ChannelLauncher(maxsize)


class ChannelLauncher:
    """What `ChannelWorker.create_group` returns; `launch` starts the hosts of one channel."""

    def __init__(self, maxsize: int) -> None:
        if not isinstance(maxsize, int) or isinstance(maxsize, bool):
            raise UsageError(f"maxsize of a channel is {maxsize!r}; it must be an int")
        self._maxsize = maxsize

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
    ) -> WorkerGroup[ChannelWorker]:
        """Start the hosts of a channel, one for each placement, and return their group. Blocks for one round trip.

        Args:
            cluster: the cluster to launch on.
            placement_strategy: where the hosts run; default: one on node 0. Several hosts are the replicas of a
                distributed channel.
            name: name of the channel.
            max_concurrency, isolate_gpu, catch_system_failure: ignored; hosts run no user code.
            disable_distributed_log: True to keep the output of the hosts out of the terminal.

        Raises:
            NameInUseError: (a ValueError) a channel with this name exists.
            UsageError, PlacementError: an argument is not valid.
        """
        name = name or f"worker_group_{ChannelWorker.__name__}"
        check_name(name)
        strategy = placement_strategy or NodePlacementStrategy([0])
        placements = sorted(strategy.get_placement(cluster, isolate_gpu), key=lambda one: one.rank)
        nodes = [placement.cluster_node_rank for placement in placements]
        detail = json.dumps({"maxsize": self._maxsize, "distributed": len(nodes) > 1})
        made = launch_service(
            cluster,
            CHANNEL_GROUPS + name,
            HOST,
            (self._maxsize, Settings.load().channel_bytes, MAX_DELIVERIES),
            nodes,
            detail,
            show_logs=not disable_distributed_log,
        )
        group = cluster.runtime.io.submit(made).result()
        return WorkerGroup(GroupControl(cluster.runtime, group, facts_of(ChannelWorker)))
