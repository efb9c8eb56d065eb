"""The hardware of a node as plain values: accelerators, robots, and the configuration entries that describe them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class AcceleratorType(str, enum.Enum):
    """Vendors of accelerators; the value is the name on the wire and in output.

    ``AcceleratorType(name)`` also takes the name of a type that a package has registered in this process
    (``AcceleratorUtil.register_accelerator``), and returns the same object each time; a loop over the class does not
    list those. :meth:`named` makes a type that only another machine knows. All print, compare and pickle alike.
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
        """Return the type called *name*, known to this process or not; for the reports of other machines."""
        member = cls._value2member_map_.get(name) or _named.get(name)
        if member is None:
            member = str.__new__(cls, name)
            member._name_ = member._value_ = name
            _named[name] = member
        assert isinstance(member, AcceleratorType)
        return member


_named: dict[str, AcceleratorType] = {}
"""Types that are not members of the class, so that each is one object."""
_registered: set[str] = set()
"""Names that AcceleratorType(name) takes besides its members'."""


def register_accelerator_type(name: str) -> AcceleratorType:
    """Let ``AcceleratorType(name)`` accept a type; accelerator_table.register calls this."""
    _registered.add(name)
    return AcceleratorType.named(name)


def is_accelerator_type(name: str) -> bool:
    """True if this process knows a type of accelerator called *name*; NO_ACCEL is none."""
    return name != AcceleratorType.NO_ACCEL.value and (name in AcceleratorType.__members__ or name in _registered)


@dataclass
class HardwareConfig:
    """One entry of ``hardware.configs`` in a node group. Hardware types add fields by subclassing.

    Attributes:
        node_rank: cluster rank of the node that the hardware is attached to.
    """

    node_rank: int

    def as_values(self) -> dict[str, Any]:
        """Return the fields as plain values, from which the node makes the same configuration."""
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
        """Name that is unique among all pieces of the type in the cluster, such as a robot's address.

        "" if only the node and the rank there identify the piece. Types with an address override this.
        """
        return ""

    @property
    def claim_keys(self) -> list[str]:
        """Keys of the exclusive lease on this piece: equal keys mean the same hardware.

        Empty if the node and the rank there are the key.
        """
        return [f"{self.type}:{self.identity}"] if self.identity else []


@dataclass
class AcceleratorInfo(HardwareInfo):
    """One accelerator, as its vendor's library describes it.

    Attributes:
        index: the vendor's index on the node, before any visibility variable; AMD's is HIP's, which counts the devices
            that ROCR_VISIBLE_DEVICES leaves.
        uuid: the vendor's unique id, "" without.
        pci_bus: e.g. ``0000:17:00.0``, "" if unknown.
        memory_bytes: total memory in bytes, 0 if unknown.
        numa_node: NUMA node, -1 if unknown.
        utilization: percent busy, -1 if unknown.
        temperature: degrees Celsius, -1 if unknown.
        parent_uuid: UUID of the device that this is a slice of (MIG), "" for a whole device. A slice has the index, bus
            and NUMA node of its device, and only its UUID makes it visible.
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
