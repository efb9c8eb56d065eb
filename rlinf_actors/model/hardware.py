"""What a node has, as plain values: accelerators, robots, and their groups."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class AcceleratorType(str, enum.Enum):
    """Vendors of accelerators; the value is what travels and what the user sees."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"

    def __str__(self) -> str:
        return self.value


@dataclass
class HardwareConfig:
    """One entry of ``hardware.configs`` in a node group. Types add fields by subclassing.

    Attributes:
        node_rank: cluster rank of the node that the piece is attached to.
    """

    node_rank: int

    def as_values(self) -> dict[str, Any]:
        """The fields as plain values, of which the same configuration is made on the node."""
        return dataclasses.asdict(self)


@dataclass
class HardwareInfo:
    """One piece of hardware: what kind it is and which model. Robots add fields by subclassing.

    Attributes:
        type: the registered type, e.g. ``NV_GPU`` or ``Franka``.
        model: the vendor's name of the model.
    """

    type: str
    model: str

    @property
    def identity(self) -> str:
        """What tells this piece from all others of its type in the cluster, such as a robot's address.

        "" where only its node and its rank there do. Types with an address override it.
        """
        return ""

    @property
    def claim_keys(self) -> list[str]:
        """What a group that uses this piece keeps from all others: equal keys mean the same thing.

        Empty where its node and its rank there are the key.
        """
        return [f"{self.type}:{self.identity}"] if self.identity else []


@dataclass
class AcceleratorInfo(HardwareInfo):
    """One accelerator, as its vendor's library describes it.

    Attributes:
        index: the vendor's index on the node, before any visibility variable.
        uuid: the vendor's unique id, "" where there is none.
        pci_bus: e.g. ``0000:17:00.0``, "" where unknown.
        memory_bytes: total memory in bytes, 0 where unknown.
        numa_node: NUMA node, -1 where unknown.
        utilization: percent busy, -1 where unknown.
        temperature: degrees Celsius, -1 where unknown.
    """

    index: int = 0
    uuid: str = ""
    pci_bus: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    utilization: int = -1
    temperature: int = -1


@dataclass
class HardwareResource:
    """All pieces of one type on a node, in the order of their local ranks."""

    type: str
    infos: Sequence[HardwareInfo] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.infos)
