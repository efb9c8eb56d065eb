"""WorkerInfo: what others may know of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType


@dataclass
class WorkerInfo:
    """One worker, as the others see it.

    Attributes:
        address: its name.
        rank: its rank in the group.
        group_world_size: number of ranks of its group.
        cluster_node_rank: rank of its node in the cluster.
        accelerator_type: of its accelerators, NO_ACCEL without.
        accelerator_model: e.g. "NVIDIA H100", "" without.
        accelerator_rank: index of its first accelerator on the node, -1 without.
        node_ip: address of its node.
        node_port: TCP port it listens on, 0 where it listens on a unix socket only.
        available_accelerators: its accelerators as the visibility variable lists them.
        hardware_infos: the robots or other hardware it was placed on, each the HardwareInfo that its type defines.
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
