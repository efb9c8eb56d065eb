"""The registry of hardware types: the class that finds a type's pieces, and the class of its configuration.

The built-in types are in hardware.robots and are imported when they are needed. A user's types register themselves when
their module is imported, or by the ``register()`` of an extension (hardware.extensions).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, TypeVar

from rlinf_actors.config.config_values import build
from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import AcceleratorType, HardwareConfig, HardwareResource, is_accelerator_type
from rlinf_actors.model.node import ANY_ACCELERATOR
from rlinf_actors.settings import EXT_MODULE

_RESERVED = frozenset({ANY_ACCELERATOR, AcceleratorType.NO_ACCEL.value})

_HardwareClass = TypeVar("_HardwareClass", bound="type[Hardware]")
_ConfigClass = TypeVar("_ConfigClass", bound="type[HardwareConfig]")


class Hardware:
    """Base class of hardware types. ``enumerate`` of a subclass finds the pieces of its type on a node.

    Example::

        @Hardware.register()
        class MyArm(Hardware):
            HW_TYPE = "MyArm"

            @classmethod
            def enumerate(cls, node_rank, configs=None):
                infos = [HardwareInfo(cls.HW_TYPE, "v2") for _ in configs or ()]
                return HardwareResource(cls.HW_TYPE, infos) if infos else None

    Attributes:
        HW_TYPE: name of the type, as in ``hardware: {type: ...}``; by default the name of the class.
        EXCLUSIVE: True if only one group at a time may use a piece, as with a robot. A worker then holds the piece by a
            lease, and its ``on_lease_lost`` makes the piece safe if the lease ends while the worker runs.
    """

    HW_TYPE: ClassVar[str] = ""
    EXCLUSIVE: ClassVar[bool] = True

    @classmethod
    def register(cls) -> Callable[[_HardwareClass], _HardwareClass]:
        """Return a class decorator that registers a subclass under its ``HW_TYPE``.

        Raises:
            TypeError: the class is not a subclass of Hardware, or does not define ``enumerate``.
            ValueError: another class is registered for that type, or an accelerator type has the name.
        """

        def decorate(found: _HardwareClass) -> _HardwareClass:
            if not (isinstance(found, type) and issubclass(found, Hardware)):
                raise TypeError(f"{found!r} is not a subclass of Hardware")
            if found.enumerate.__func__ is Hardware.enumerate.__func__:  # type: ignore[attr-defined]
                raise TypeError(f"{found.__name__} has no classmethod enumerate(node_rank, configs)")
            _enter(_hardware, found.HW_TYPE or found.__name__, found, "a Hardware class")
            return found

        return decorate

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[Any] | None = None) -> HardwareResource | None:
        """Return the pieces of this type on a node. Runs on the node, in a child process that is killed after 10 s.

        Args:
            node_rank: cluster rank of the node.
            configs: the configuration's entries for that node, as instances of the config class; None if the
                configuration has no entries for any node.

        Returns:
            The pieces, numbered on the node in this order, each with its `identities`; None if there are none.

        Raises:
            ConfigError: an entry does not fit the machine. ``path`` may name a field, such as ``configs[0].port``. Any
                other exception becomes a ConfigError in the driver too.
        """
        raise NotImplementedError(f"{cls.__name__} has no enumerate(node_rank, configs)")


@dataclass
class NodeHardwareConfig:
    """The ``hardware`` section of a node group.

    Attributes:
        type: the registered hardware type that the group owns.
        configs: one entry for each piece; mappings become instances of the type's config dataclass.
    """

    type: str
    configs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Convert mappings in ``configs`` to the config dataclass of the type. Raises ConfigError."""
        self.type = str(self.type)
        self.configs = [
            build(lookup(self.type), entry, f"configs[{index}]") if isinstance(entry, Mapping) else entry
            for index, entry in enumerate(self.configs or ())
        ]

    @classmethod
    def register_hardware_config(cls, type: str) -> Callable[[_ConfigClass], _ConfigClass]:
        """Return a class decorator that registers the config dataclass of hardware type *type*.

        Write it above ``@dataclass``.

        Raises:
            TypeError: the class is not a dataclass that derives from HardwareConfig.
            ValueError: another class is registered for that type, or an accelerator type has the name.
        """

        def decorate(found: _ConfigClass) -> _ConfigClass:
            if not (isinstance(found, _class) and issubclass(found, HardwareConfig)):
                raise TypeError(f"{found!r} is not a subclass of HardwareConfig")
            if "__dataclass_fields__" not in vars(found):
                raise TypeError(f"{found.__name__} is no dataclass yet: put @dataclass below the registration")
            _enter(_configs, type, found, "a config class")
            return found

        return decorate


_class = type  # NodeHardwareConfig has a field, and its decorator a parameter, of that name
_hardware: dict[str, type[Hardware]] = {}
_configs: dict[str, type[HardwareConfig]] = {}
_BUILT_IN: Mapping[str, str] = MappingProxyType(
    {"Franka": "franka", "DualFranka": "franka", "GimArm": "gim_arm", "DOSW1": "dosw1", "Turtle2": "turtle2"}
)
"""Each built-in type to its module in hardware.robots, which has the classes TYPE (a Hardware) and TYPEConfig."""


def _built_in(kind: str) -> ModuleType:
    """Import and return the module of a built-in hardware type. Raise KeyError for other types."""
    return importlib.import_module(f"rlinf_actors.hardware.robots.{_BUILT_IN[kind]}")


def _enter(table: dict[str, Any], kind: str, found: type, what: str) -> None:
    if kind in _RESERVED or is_accelerator_type(kind):
        raise ValueError(f"{kind!r} is a type of accelerator; choose another name for {found.__name__}")
    earlier = table.get(kind)
    # A module that is imported again, or a register() that runs again, makes a new class of the same name.
    if earlier is not None and (earlier.__module__, earlier.__qualname__) != (found.__module__, found.__qualname__):
        raise ValueError(
            f"hardware type {kind!r} has {what} already: {earlier.__module__}.{earlier.__qualname__}; "
            f"{found.__module__}.{found.__qualname__} needs another name"
        )
    table[kind] = found


class _Types(Mapping[str, type[HardwareConfig]]):
    """A mapping of each hardware type to its config dataclass. It imports a built-in type's module at the first
    look-up.
    """

    def __getitem__(self, kind: str) -> type[HardwareConfig]:
        if kind in _configs:
            return _configs[kind]
        found: type[HardwareConfig] = getattr(_built_in(kind), f"{kind}Config")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_BUILT_IN, *_configs}))

    def __len__(self) -> int:
        return len({*_BUILT_IN, *_configs})


def hardware_types() -> Mapping[str, type[HardwareConfig]]:
    """Return a mapping of each built-in and registered hardware type to its config dataclass."""
    return _Types()


def registered_types() -> list[str]:
    """Return the names of the hardware types that were registered in this process; built-in types are not included."""
    return sorted({*_configs, *_hardware})


def lookup(kind: str) -> type[HardwareConfig]:
    """Return the config dataclass of a hardware type.

    If there is no such type, raise ConfigError, which names the most similar type.
    """
    known = hardware_types()
    if kind in known:
        return known[kind]
    raise ConfigError(
        f"there is no hardware type {kind!r}; did you mean {nearest(kind, known)!r}? Known types: {', '.join(known)}. "
        f"A type of your own is registered by an installed package, or by the module that {EXT_MODULE} names"
    )


def hardware_classes(kind: str) -> list[type[Hardware]]:
    """Return the Hardware classes whose ``enumerate`` may find pieces of a type.

    If the type has a Hardware class of its own, return only that; otherwise all classes without a HW_TYPE.
    """
    if kind in _hardware:
        return [_hardware[kind]]
    if kind in _BUILT_IN and kind not in _configs:  # a config registered under this name has its own class
        return [getattr(_built_in(kind), kind)]
    return [found for found in _hardware.values() if not found.HW_TYPE]


def is_exclusive(kind: str) -> bool:
    """Return True if only one group at a time may use a piece of hardware type *kind*.

    If this process has no Hardware class that may find such pieces, the answer is True.
    """
    classes = hardware_classes(kind)
    return not classes or any(found.EXCLUSIVE for found in classes)
