"""WorkerAddress, the name of a worker or child member, and WorkerInfo, the public properties of a worker."""

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
    """The name of a worker or child member: a group's name and a path of ranks.

    ``trainer:3`` is the worker with rank 3 of group trainer, ``trainer:3:0`` is child 0 of that worker. A tuple or list
    of ranks and a single int give equal addresses. Hashable and ordered.

    Attributes:
        root_group_name: name of the group.
        rank_path: rank of the worker in the group, then ranks of children; empty for the group itself.
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
        """Rank of the worker in its group, or of the child below its parent; -1 for the address of a group."""
        return self.rank_path[-1] if self.rank_path else -1

    def get_name(self) -> str:
        """Return the address as text, e.g. ``group:0:1``."""
        return _name(self.root_group_name, self.rank_path)

    def get_parent_rank(self) -> int:
        """Return the rank of this child's parent, which is the last but one of the path.

        Raises:
            ValueError: the address is a worker or a group, not a child.
        """
        if len(self.rank_path) < 2:
            raise ValueError(f"worker address {self.get_name()!r} has no parent rank: it is not a child of a worker")
        return self.rank_path[-2]

    def get_parent_address(self) -> WorkerAddress:
        """Return the address without its last rank: for a child its parent's address, for a worker its group's.

        Raises:
            ValueError: the address is a group.
        """
        if not self.rank_path:
            raise ValueError(f"worker address {self.get_name()!r} is a group and has no parent")
        return WorkerAddress(self.root_group_name, self.rank_path[:-1])

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Return the address of child *rank* of this worker, or of worker *rank* of this group."""
        return WorkerAddress(self.root_group_name, (*self.rank_path, rank))

    @classmethod
    def from_name(cls, name: str) -> WorkerAddress:
        """Return the address that *name* spells, e.g. ``group:0:1``. The group's name may contain colons before ranks.

        Raises:
            ValueError: *name* has no group before the ranks.
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
        """Return the address of worker *rank* of the group, or of child *rank* of the worker, called *parent_name*."""
        return cls.from_name(parent_name).get_child_address(rank)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, WorkerAddress):
            return NotImplemented
        return (self.root_group_name, self.rank_path) < (other.root_group_name, other.rank_path)

    def __str__(self) -> str:
        return self.get_name()


@dataclass
class WorkerInfo:
    """Rank, node and hardware of one worker, for other workers and the driver.

    Attributes:
        address: address of the worker.
        rank: rank of the worker in its group.
        group_world_size: number of workers of that group.
        cluster_node_rank: rank of the worker's node in the cluster.
        accelerator_type: type of the accelerators that the worker sees; NO_ACCEL if it sees none.
        accelerator_model: model of the worker's accelerators, such as "NVIDIA H100"; "" if it sees none.
        accelerator_rank: position on the node of the worker's first accelerator; -1 if it was not placed on
            accelerators.
        node_ip: IP address of the node.
        node_port: TCP port of the worker's socket; 0 if the worker listens on a unix socket only.
        available_accelerators: the accelerators that the worker sees, as the vendor's visibility variable lists them.
        hardware_infos: the robots or other configured hardware of the worker, as HardwareInfos of their types.
        code_hash: hash of the code that the driver has sent and the worker runs; "" if it runs what its node has.
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
    code_hash: str = ""

    @property
    def node_id(self) -> int:
        """Older name of `cluster_node_rank`, the rank of the worker's node."""
        return self.cluster_node_rank

    @property
    def gpu_id(self) -> int:
        """Older name of `accelerator_rank`, the position on the node of the worker's first accelerator."""
        return self.accelerator_rank

    @property
    def available_gpus(self) -> list[str]:
        """Older name of `available_accelerators`, the accelerators that the worker sees."""
        return self.available_accelerators
