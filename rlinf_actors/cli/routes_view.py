"""The routes that `rlinf-actors plan --routes` prints: which rank sends which elements of a batch to which rank."""

from __future__ import annotations

import math
from typing import Any

from rlinf_actors.cli.output import echo, show_table
from rlinf_actors.errors import ConfigError
from rlinf_actors.placement.plan import Plan, PlannedComponent
from rlinf_actors.plurals import counted
from rlinf_actors.routing.route_plan import RouteShard, shards

_OPTION = "--routes"


class Routes:
    """The shards of one batch from component to component.

    Args:
        planned: the plan of the components.
        pair: names of the sending and of the receiving component, separated by a comma.
        batch_size: number of elements of the batch; None for the smallest batch that can be divided.

    Raises:
        ConfigError: *pair* does not name two components.
        RoutingError: the batch cannot be divided.
    """

    def __init__(self, planned: Plan, pair: str, batch_size: int | None) -> None:
        names = [name.strip() for name in pair.split(",")]
        known = {component.name: component for component in planned.components}
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no component {name!r}; components: {', '.join(known)}", path=_OPTION)
        if len(names) != 2:
            raise ConfigError(f"{pair!r} must name two components, such as actor,rollout", path=_OPTION)
        self.sender, self.receiver = known[names[0]], known[names[1]]
        sizes = len(self.sender.placements), len(self.receiver.placements)
        self.multiple = math.lcm(*sizes)
        self.batch_size = self.multiple if batch_size is None else batch_size
        self.shards: list[RouteShard] = list(shards(self.batch_size, *sizes))

    def show(self) -> None:
        """Print the routes: a line for each shard."""
        title = (
            f"{self.sender.name} to {self.receiver.name}: {len(self.sender.placements)} to "
            f"{counted(len(self.receiver.placements), 'rank')}, a batch of {self.batch_size} "
            f"(any multiple of {self.multiple})"
        )
        rows = [
            [
                str(one.src_rank), str(_node(self.sender, one.src_rank)),
                str(one.dst_rank), str(_node(self.receiver, one.dst_rank)),
                f"{one.start}-{one.stop - 1}" if one.size > 1 else str(one.start), str(one.size),
            ]
            for one in self.shards
        ]  # fmt: skip
        echo(title)
        show_table(["FROM", "NODE", "TO", "NODE", "ELEMENTS", "SIZE"], rows, "")

    def to_dict(self) -> dict[str, Any]:
        """Return the routes as plain values. Keys are stable; later versions may add keys."""
        return {
            "sender": self.sender.name,
            "receiver": self.receiver.name,
            "batch_size": self.batch_size,
            "multiple": self.multiple,
            "shards": [
                {
                    "src_rank": one.src_rank,
                    "src_node_rank": _node(self.sender, one.src_rank),
                    "dst_rank": one.dst_rank,
                    "dst_node_rank": _node(self.receiver, one.dst_rank),
                    "start": one.start,
                    "size": one.size,
                }
                for one in self.shards
            ],
        }


def _node(component: PlannedComponent, rank: int) -> int:
    return component.placements[rank].cluster_node_rank
