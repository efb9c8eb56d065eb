"""The hardware of a node as plain values: accelerators, robots and their configuration entries."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rlinf_actors.wire.values import Identity


class AcceleratorType(str, enum.Enum):
    """The types of accelerators, one for each vendor. The value is the name in messages and output.

    ``AcceleratorType(name)`` also accepts the name of a type that a package has registered in this process
    (``AcceleratorUtil.register_accelerator``) and returns the same object each time. Iteration over the class does not
    include such types. :meth:`named` also makes types that only other machines know. All types print, compare and
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
        """Return the type called *name*, which may be a type that only another machine knows."""
        member = cls._value2member_map_.get(name) or _named.get(name)
        if member is None:
            member = str.__new__(cls, name)
            member._name_ = member._value_ = name
            _named[name] = member
        assert isinstance(member, AcceleratorType)
        return member


_named: dict[str, AcceleratorType] = {}
"""The types that are not members of the class, by name, so that each exists once."""
_registered: set[str] = set()
"""The names that AcceleratorType(name) accepts in addition to the members of the class."""


def register_accelerator_type(name: str) -> AcceleratorType:
    """Make ``AcceleratorType(name)`` accept *name*, and return that type. Called by accelerator_table.register."""
    _registered.add(name)
    return AcceleratorType.named(name)


def is_accelerator_type(name: str) -> bool:
    """True if *name* is an accelerator type, built in or registered in this process. False for NO_ACCEL."""
    return name != AcceleratorType.NO_ACCEL.value and (name in AcceleratorType.__members__ or name in _registered)


@dataclass
class HardwareConfig:
    """Configuration of one piece of hardware: an entry of ``hardware.configs``. Each hardware type has a subclass.

    Attributes:
        node_rank: cluster rank of the node that the piece is attached to.
    """

    node_rank: int

    def as_values(self) -> dict[str, Any]:
        """Return the fields as plain values, from which the node makes the same configuration."""
        return dataclasses.asdict(self)


@dataclass
class HardwareInfo:
    """One piece of hardware: an accelerator, robot or other device. Hardware types add fields by subclassing.

    Attributes:
        type: the registered hardware type, such as ``NV_GPU`` or ``Franka``.
        model: the vendor's name of the model.
        identities: what tells this piece from all others, whatever a job calls it. The type's ``enumerate`` sets it;
            one group at a time holds the pieces that have an equal identity. If it is empty, `identity` counts; if that
            is empty too, all such pieces of a node count as one.
    """

    type: str
    model: str
    identities = cast("Sequence[Identity]", ())

    @property
    def identity(self) -> str:
        """Name of this piece for people; "" if it has none.

        If ``enumerate`` sets no `identities`, no other piece of the type in the cluster may have the name: a serial
        number is such a name, an address is not.
        """
        return ""


@dataclass
class AcceleratorInfo(HardwareInfo):
    """One accelerator, as the vendor's library or tool describes it.

    Attributes:
        index: the vendor's index of the device on the node, counted before a visibility variable hides devices. AMD's
            is HIP's index, which counts only the devices that ROCR_VISIBLE_DEVICES leaves.
        uuid: the vendor's unique id, "" if there is none.
        pci_bus: PCI address such as ``0000:17:00.0``, "" if unknown.
        memory_bytes: total memory in bytes, 0 if unknown.
        numa_node: NUMA node, -1 if unknown.
        utilization: percent of time that the device was busy, -1 if unknown.
        temperature: degrees Celsius, -1 if unknown.
        memory_used_bytes: memory in use in bytes, -1 if unknown. Only `measure` of a vendor's module finds it.
        parent_uuid: for a slice of a device (MIG), the UUID of that device; "" for a whole device. A slice has the
            index, PCI bus and NUMA node of its device; only the slice's own UUID makes the slice visible.
        egl_index: index of the device in EGL, by which renderers choose it; -1 if unknown.
    """

    index: int = 0
    uuid: str = ""
    pci_bus: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    utilization: int = -1
    temperature: int = -1
    parent_uuid: str = ""
    egl_index: int = -1
    memory_used_bytes: int = -1


@dataclass
class HardwareResource:
    """All pieces of one hardware type on a node, in the order in which the node numbers them.

    Attributes:
        type: the registered hardware type.
        infos: the pieces.
        registered_by: module that registered the type on the node, if it is an accelerator type that is not built in;
            else "".
    """

    type: str
    infos: Sequence[HardwareInfo] = field(default_factory=list)
    registered_by: str = ""

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.infos)
