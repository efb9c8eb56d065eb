"""The ``hardware`` part of a node group: one registered type and its configs.

Which types there are is not known here: callers pass the registry's table, name to config dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors.config.fields import check_keys, mapping, nearest, sequence, text, whole_number
from rlinf_actors.config.typed import build
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import AcceleratorType, is_accelerator_type

_EXAMPLE = "{type: Franka, configs: [{node_rank: 0, robot_ip: 10.10.10.1}]}"


@dataclass(frozen=True)
class HardwareSection:
    """What a node group owns.

    Attributes:
        type: the registered type, e.g. ``Franka``.
        configs: one entry a piece of hardware: instances of the type's dataclass, or plain mappings
            where no table of types was given. Each has ``node_rank``.
        node_ranks: the node of each entry.
    """

    type: str
    configs: tuple[Any, ...] = ()
    node_ranks: tuple[int, ...] = ()

    def for_node(self, node_rank: int) -> list[Any]:
        """The entries for one node, in order."""
        return [config for config, rank in zip(self.configs, self.node_ranks, strict=True) if rank == node_rank]


def parse_hardware(
    value: Any, label: str, group_ranks: Sequence[int], types: Mapping[str, type] | None, path: str
) -> HardwareSection | None:
    """Check a ``hardware`` section; None if there is none.

    Raises:
        ConfigError: unknown type or key, a node outside the group, or the type refuses the values.
    """
    if value is None:
        return None
    section = mapping(value, path, _EXAMPLE)
    check_keys(section, ("type", "configs"), path)
    if "type" not in section:
        raise ConfigError(f"has no type; it looks like {_EXAMPLE}", path=path)
    kind = text(section["type"], f"{path}.type", "the name of a registered hardware type")
    _check_type(kind, types, f"{path}.type")
    configs: list[Any] = []
    ranks: list[int] = []
    entries = section.get("configs")
    for index, raw in enumerate(sequence([] if entries is None else entries, f"{path}.configs", "[{node_rank: 0}]")):
        where = f"{path}.configs[{index}]"
        entry = mapping(raw, where, "{node_rank: 0}")
        if "node_rank" not in entry:
            raise ConfigError("has no node_rank; say which node of the group it is attached to", path=where)
        rank = whole_number(entry["node_rank"], f"{where}.node_rank")
        if rank not in group_ranks:
            raise ConfigError(
                f"is {rank}, which is not in group {label!r} (its nodes: {', '.join(map(str, group_ranks))})",
                path=f"{where}.node_rank",
            )
        config = dict(entry, node_rank=rank)
        configs.append(config if types is None else build(types[kind], config, where))
        ranks.append(rank)
    return HardwareSection(kind, tuple(configs), tuple(ranks))


def _check_type(kind: str, types: Mapping[str, type] | None, path: str) -> None:
    if is_accelerator_type(kind) or kind in (AcceleratorType.NO_ACCEL.value, "Accelerator"):
        raise ConfigError(
            f"{kind!r} is a type of accelerator: those are found by themselves, so leave the hardware section out",
            path=path,
        )
    if types is not None and kind not in types:
        known = ", ".join(sorted(types)) or "none"
        hint = f"did you mean {nearest(kind, types)!r}? " if types else ""
        raise ConfigError(
            f"there is no hardware type {kind!r}; {hint}Known types: {known}. "
            "A type of your own is registered by an installed package, or by the module that RLINF_EXT_MODULE names",
            path=path,
        )
