"""What a node has, as plain values: accelerators, robots, and their groups."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class AcceleratorType(str, enum.Enum):
    """Vendors of accelerators; the value is what travels and what the user sees.

    ``AcceleratorType(name)`` also takes the name of a type that a package has registered in this process
    (``AcceleratorUtil.register_accelerator``), and gives the same object each time; the loop over the class does not
    list those. A type that only another machine knows is made by :meth:`named`. All print, compare and pickle alike.
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
        """The type called *name*, whether or not this process knows more of it; for what other machines report."""
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
    """Let ``AcceleratorType(name)`` know the type; see accelerator_table.register, which is what calls it."""
    _registered.add(name)
    return AcceleratorType.named(name)


def is_accelerator_type(name: str) -> bool:
    """Whether *name* is a type of accelerator that this process knows; NO_ACCEL is none."""
    return name != AcceleratorType.NO_ACCEL.value and (name in AcceleratorType.__members__ or name in _registered)


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
        index: the vendor's index on the node, before any visibility variable; AMD's is HIP's, which counts what
            ROCR_VISIBLE_DEVICES leaves.
        uuid: the vendor's unique id, "" where there is none.
        pci_bus: e.g. ``0000:17:00.0``, "" where unknown.
        memory_bytes: total memory in bytes, 0 where unknown.
        numa_node: NUMA node, -1 where unknown.
        utilization: percent busy, -1 where unknown.
        temperature: degrees Celsius, -1 where unknown.
        parent_uuid: of the device that this is a slice of (MIG), "" for a whole one. A slice has the index, bus and
            NUMA node of its device, and is made visible by its UUID only.
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
        registered_by: for accelerators of a type that a package has registered on that node: the module to load.
    """

    type: str
    infos: Sequence[HardwareInfo] = field(default_factory=list)
    registered_by: str = ""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.infos)
