"""The robots and other hardware that node groups are configured to own, as their types enumerate them.

Pure but for what a type's ``enumerate`` does; runs in the driver, which has the configuration and the nodes' ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlinf_actors.config.cluster import ClusterConfig
from rlinf_actors.config.hardware import HardwareSection
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.registry import hardware_classes
from rlinf_actors.model.hardware import HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeInfo


def with_enumerated_hardware(config: ClusterConfig, nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """*nodes* with the hardware that their groups own, in place of what they report of those types.

    Nothing changes for a type without a Hardware class here whose pieces a node reports itself.

    Raises:
        ConfigError: a type is not registered, or its ``enumerate`` raises or returns something else than its pieces.
    """
    return [_with_owned(config, node) for node in nodes]


def _with_owned(config: ClusterConfig, node: NodeInfo) -> NodeInfo:
    resources = list(node.hardware_resources)
    for kind, configs in config.get_hardware_configs(node.node_rank).items():
        if not hardware_classes(kind) and node.get_hw_resource_count(kind):
            continue
        found = enumerate_type(kind, node.node_rank, configs, _path(config, kind, node.node_rank))
        resources = [resource for resource in resources if resource.type != kind]
        if found is not None:
            resources.append(found)
    return replace(node, hardware_resources=resources)


def enumerate_section(
    section: HardwareSection, node_ranks: Sequence[int], path: str = "hardware"
) -> dict[int, HardwareResource]:
    """Node rank to what a node group's ``hardware`` section gives that node; nodes without any are left out.

    Args:
        section: the section, its configs instances of the type's dataclass.
        node_ranks: the nodes of the group.
        path: config path of the section, for messages.

    Raises:
        ConfigError: as :func:`enumerate_type`.
    """
    found = {rank: enumerate_type(section.type, rank, section.for_node(rank), path) for rank in node_ranks}
    return {rank: resource for rank, resource in found.items() if resource is not None}


def enumerate_type(kind: str, node_rank: int, configs: Sequence[Any], path: str = "") -> HardwareResource | None:
    """The pieces of one type on one node, None if there is none.

    Args:
        kind: the registered type.
        node_rank: cluster rank of the node.
        configs: the configuration's entries for that node.
        path: config path of the section, for messages.

    Raises:
        ConfigError: no Hardware class of that type; or its ``enumerate`` raised, or returned no HardwareResource of it.
    """
    classes = hardware_classes(kind)
    for cls in classes:
        try:
            found = cls.enumerate(node_rank, list(configs) or None)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{cls.__name__}.enumerate raised {type(error).__name__} for node {node_rank}: {error}", path=path
            ) from error
        if found is None:
            continue
        if not isinstance(found, HardwareResource) or not all(isinstance(info, HardwareInfo) for info in found.infos):
            raise ConfigError(
                f"{cls.__name__}.enumerate returned {found!r}; it must be a HardwareResource of HardwareInfos, or None",
                path=path,
            )
        if found.type == kind:
            return found if found.infos else None
        if cls.HW_TYPE:  # a class without one may have found another type's pieces
            raise ConfigError(
                f"{cls.__name__}.enumerate returned pieces of type {found.type!r}, not {kind!r}", path=path
            )
    if not classes:
        raise ConfigError(
            f"hardware type {kind!r} has no Hardware class: register one that has HW_TYPE = {kind!r}, "
            "with @Hardware.register()",
            path=f"{path}.type" if path else "",
        )
    return None


def _path(config: ClusterConfig, kind: str, node_rank: int) -> str:
    for index, group in enumerate(config.node_groups):
        if group.hardware is not None and group.hardware.type == kind and node_rank in group.node_ranks:
            return f"cluster.node_groups[{index}].hardware"
    return "cluster.node_groups"
