"""WorkerAddress, the name of a worker or of its child, and WorkerInfo, the public properties of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, total_ordering
from typing import Any

from rlinf_actors.model.hardware import AcceleratorType


@lru_cache(maxsize=4096)
def _name(group: str, path: tuple[int, ...]) -> str:
    return ":".join((group, *map(str, path)))


@total_ordering
@dataclass(frozen=True, slots=True, init=False)
class WorkerAddress:
    """A group's name and a path of ranks: ``trainer:3``, or ``trainer:3:0`` for child 0 of that worker.

    A tuple or list of ranks and a single int give equal addresses. Hashable and ordered.

    Attributes:
        root_group_name: name of the group at the root.
        rank_path: the ranks from the root down; empty for the group itself.
    """

    root_group_name: str
    rank_path: tuple[int, ...]

    def __init__(self, root_group_name: str, ranks: int | Sequence[int] = ()) -> None:
        path = (ranks,) if isinstance(ranks, int) else tuple(int(rank) for rank in ranks)
        object.__setattr__(self, "root_group_name", root_group_name)
        object.__setattr__(self, "rank_path", path)

    def __reduce__(self) -> tuple[type[WorkerAddress], tuple[str, tuple[int, ...]]]:
        return WorkerAddress, (self.root_group_name, self.rank_path)

    @property
    def rank(self) -> int:
        """The last rank of the path; -1 for the group itself."""
        return self.rank_path[-1] if self.rank_path else -1

    def get_name(self) -> str:
        """Return the address as text, e.g. ``group:0:1``."""
        return _name(self.root_group_name, self.rank_path)

    def get_parent_rank(self) -> int:
        """Return the parent's rank, which is the last but one of the path.

        Raises:
            ValueError: the address is not a child of a worker.
        """
        if len(self.rank_path) < 2:
            raise ValueError(f"worker address {self.get_name()!r} has no parent rank: it is not a child of a worker")
        return self.rank_path[-2]

    def get_parent_address(self) -> WorkerAddress:
        """Return the address without its last rank.

        Raises:
            ValueError: the address is a group.
        """
        if not self.rank_path:
            raise ValueError(f"worker address {self.get_name()!r} is a group and has no parent")
        return WorkerAddress(self.root_group_name, self.rank_path[:-1])

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Return the address of child *rank* of this worker."""
        return WorkerAddress(self.root_group_name, (*self.rank_path, rank))

    @classmethod
    def from_name(cls, name: str) -> WorkerAddress:
        """Return the address with the name ``group:0:1``. The group's name may contain colons before the ranks.

        Raises:
            ValueError: *name* has an empty group.
        """
        parts = name.split(":")
        cut = len(parts)
        while cut > 1 and parts[cut - 1].isdigit():
            cut -= 1
        group = ":".join(parts[:cut])
        if not group:
            raise ValueError(f"{name!r} is no worker name: expected group:rank, e.g. trainer:0")
        return cls(group, tuple(map(int, parts[cut:])))

    @classmethod
    def from_parent_name_rank(cls, parent_name: str, rank: int) -> WorkerAddress:
        """Return the address of child *rank* of the worker or group called *parent_name*."""
        return cls.from_name(parent_name).get_child_address(rank)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, WorkerAddress):
            return NotImplemented
        return (self.root_group_name, self.rank_path) < (other.root_group_name, other.rank_path)

    def __str__(self) -> str:
        return self.get_name()


@dataclass
class WorkerInfo:
    """One worker, as other processes see it.

    Attributes:
        address: its name.
        rank: its rank in the group.
        group_world_size: number of ranks of its group.
        cluster_node_rank: rank of its node in the cluster.
        accelerator_type: type of its accelerators, NO_ACCEL without.
        accelerator_model: e.g. "NVIDIA H100", "" without.
        accelerator_rank: index of its first accelerator on the node, -1 without.
        node_ip: address of its node.
        node_port: TCP port of its socket, 0 if it listens on a unix socket only.
        available_accelerators: its accelerators as the visibility variable lists them.
        hardware_infos: the robots or other hardware of its placement, each the HardwareInfo that its type defines.
    """

    address: WorkerAddress
    rank: int
    group_world_size: int = 1
    cluster_node_rank: int = 0
    accelerator_type: AcceleratorType = AcceleratorType.NO_ACCEL
    accelerator_model: str = ""
    accelerator_rank: int = -1
    node_ip: str = ""
    node_port: int = 0
    available_accelerators: list[str] = field(default_factory=list)
    hardware_infos: list[Any] = field(default_factory=list)

    @property
    def node_id(self) -> int:
        """Older name of `cluster_node_rank`."""
        return self.cluster_node_rank

    @property
    def gpu_id(self) -> int:
        """Older name of `accelerator_rank`."""
        return self.accelerator_rank

    @property
    def available_gpus(self) -> list[str]:
        """Older name of `available_accelerators`."""
        return self.available_accelerators
