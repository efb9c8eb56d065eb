"""The hardware of a node as plain values: accelerators, robots, and the configuration entries that describe them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class AcceleratorType(str, enum.Enum):
    """Types of accelerators, one per vendor. The value is the name on the wire and in output.

    ``AcceleratorType(name)`` also accepts the name of a type that a package has registered in this process
    (``AcceleratorUtil.register_accelerator``), and returns the same object each time; iteration over the class does not
    include such types. :meth:`named` also makes a type that only another machine knows. All types print, compare and
    pickle alike.
    """

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"

    def __str__(self) -> str:
        return self.value

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[str], AcceleratorType], tuple[str]]:
        # Not by the constructor: a process that has not registered the type can still be told of it.
        return AcceleratorType.named, (self.value,)

    @classmethod
    def _missing_(cls, value: object) -> AcceleratorType | None:
        return cls.named(value) if isinstance(value, str) and value in _registered else None

    @classmethod
    def named(cls, name: str) -> AcceleratorType:
        """Return the type called *name*, even if this process does not know it; for the reports of other machines."""
        member = cls._value2member_map_.get(name) or _named.get(name)
        if member is None:
            member = str.__new__(cls, name)
            member._name_ = member._value_ = name
            _named[name] = member
        assert isinstance(member, AcceleratorType)
        return member


_named: dict[str, AcceleratorType] = {}
"""Types that are not members of the class, by name, so that each exists once."""
_registered: set[str] = set()
"""Names that AcceleratorType(name) accepts in addition to its members."""


def register_accelerator_type(name: str) -> AcceleratorType:
    """Make ``AcceleratorType(name)`` accept *name* and return the type. Called by accelerator_table.register."""
    _registered.add(name)
    return AcceleratorType.named(name)


def is_accelerator_type(name: str) -> bool:
    """True if *name* is a type of accelerator that this process knows. NO_ACCEL does not count."""
    return name != AcceleratorType.NO_ACCEL.value and (name in AcceleratorType.__members__ or name in _registered)


@dataclass
class HardwareConfig:
    """One entry of ``hardware.configs`` in a node group. Hardware types add fields by subclassing.

    Attributes:
        node_rank: cluster rank of the node that the hardware is attached to.
    """

    node_rank: int

    def as_values(self) -> dict[str, Any]:
        """Return the fields as plain values, from which the node rebuilds this configuration."""
        return dataclasses.asdict(self)


@dataclass
class HardwareInfo:
    """One piece of hardware: its type and model. Robots add fields by subclassing.

    Attributes:
        type: the registered type, e.g. ``NV_GPU`` or ``Franka``.
        model: the vendor's name of the model.
    """

    type: str
    model: str

    @property
    def identity(self) -> str:
        """Name that is unique among all pieces of this type in the cluster, such as a robot's address.

        "" if the piece has no such name; its node and its rank on that node then identify it. Types with an address
        override this property.
        """
        return ""

    @property
    def claim_keys(self) -> list[str]:
        """Keys of the exclusive lease on this piece. Pieces with an equal key are the same hardware.

        Empty if the piece has no identity; its node and its rank on that node then form the key.
        """
        return [f"{self.type}:{self.identity}"] if self.identity else []


@dataclass
class AcceleratorInfo(HardwareInfo):
    """One accelerator, as its vendor's library describes it.

    Attributes:
        index: the vendor's index on the node, before any visibility variable is applied. AMD's is HIP's index, which
            counts only the devices that ROCR_VISIBLE_DEVICES leaves.
        uuid: the vendor's unique id, "" if it has none.
        pci_bus: PCI address such as ``0000:17:00.0``, "" if unknown.
        memory_bytes: total memory in bytes, 0 if unknown.
        numa_node: NUMA node, -1 if unknown.
        utilization: percent busy, -1 if unknown.
        temperature: degrees Celsius, -1 if unknown.
        parent_uuid: for a slice of a device (MIG), the UUID of that device; "" for a whole device. A slice has the
            index, bus and NUMA node of its device, and only its own UUID makes it visible.
    """

    index: int = 0
    uuid: str = ""
    pci_bus: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    utilization: int = -1
    temperature: int = -1
    parent_uuid: str = ""


@dataclass
class HardwareResource:
    """All pieces of one type on a node, in the order of their local ranks.

    Attributes:
        type: the registered type.
        infos: the pieces.
        registered_by: module that registered the type on that node, for accelerators of a registered type.
    """

    type: str
    infos: Sequence[HardwareInfo] = field(default_factory=list)
    registered_by: str = ""

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.infos)
