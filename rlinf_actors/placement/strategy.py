"""What all placement strategies have in common: the two calls, and the checks of their arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rlinf_actors.config.components import parse_labels
from rlinf_actors.errors import PlacementError
from rlinf_actors.model.node import CLUSTER_GROUP
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.view import ClusterView


class PlacementStrategy(ABC):
    """Where the processes of a group go."""

    def get_placement(
        self,
        cluster: ClusterView | int | None = None,
        isolate_accelerator: bool = True,
        *,
        num_gpus_per_node: int | None = None,
        isolate_gpu: bool | None = None,
    ) -> list[Placement]:
        """The placement of every process, by rank.

        Args:
            cluster: the cluster, or (older call) the number of accelerators of each of its identical nodes.
            isolate_accelerator: whether a process sees only its own accelerators.
            num_gpus_per_node: older name of *cluster* as a number.
            isolate_gpu: older name of *isolate_accelerator*.

        Raises:
            PlacementError: the cluster has no room for it, or a process would span two nodes.
        """
        if cluster is None:
            cluster = num_gpus_per_node
        if isolate_gpu is not None:
            isolate_accelerator = isolate_gpu
        if cluster is None:
            raise PlacementError("get_placement() needs a cluster, or the number of accelerators of each node")
        if isinstance(cluster, int):
            per_node = whole(cluster, "num_gpus_per_node", least=0)
            cluster = DescribedCluster.identical(self._nodes_needed(per_node), per_node)
        return self._place(cluster, isolate_accelerator)

    @abstractmethod
    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        """What get_placement promises, its arguments in one form."""

    @abstractmethod
    def _nodes_needed(self, per_node: int) -> int:
        """How many identical nodes the strategy reaches."""


def group_labels(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Labels given as one label, ``"a,b"`` or a list; the group of all nodes for None.

    Raises:
        PlacementError: a label is no label, or given twice.
    """
    if value is None:
        return (CLUSTER_GROUP,)
    try:
        return parse_labels(value, "node_group")
    except ValueError as error:
        raise PlacementError(str(error)) from error


def whole(value: object, name: str, least: int = 0) -> int:
    """*value* as an int of at least *least*; numpy's integers count, booleans do not.

    Raises:
        PlacementError: it is something else; *name* is the argument's.
    """
    number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if number is None or number < least:
        raise PlacementError(f"{name} is {value!r}; it must be a whole number from {least} up")
    return int(number)
