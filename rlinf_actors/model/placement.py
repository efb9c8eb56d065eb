"""Placement, the node and devices of one process of a group, and the merge of a worker's environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_actors.model.hardware import AcceleratorType


@dataclass(frozen=True)
class Placement:
    """One process of a group.

    Attributes:
        rank: rank in the group, 0..world_size-1.
        cluster_node_rank: rank of its node in the cluster.
        placement_node_rank: index of the node among the nodes of this placement, in the order in
            which the processes' ranks reach them (rank 0 is always on 0).
        local_accelerator_rank: position on its node of the process's first accelerator, -1 without.
        accelerator_type: type of the accelerators that the process sees.
        local_rank: the worker's LOCAL_RANK: 0 for a process isolated on accelerators, the accelerator's
            position among the visible ones for a process that is not isolated, the rank among the group's
            processes on the node for others.
        local_world_size: 1 for a process isolated on accelerators, else the number of the group's processes on the
            node.
        visible_accelerators: entries of the vendor's visibility variable: indices or UUIDs.
        isolate_accelerator: True if the process sees only its own accelerators.
        local_hardware_ranks: positions on the node of the process's resources (accelerators or robots);
            empty if the resource is the node itself.
        node_group_label: the group that the process's resources belong to.
        node_id: the node's id ("" if unknown).
    """

    rank: int
    cluster_node_rank: int
    placement_node_rank: int
    local_accelerator_rank: int = -1
    accelerator_type: AcceleratorType = AcceleratorType.NO_ACCEL
    local_rank: int = 0
    local_world_size: int = 1
    visible_accelerators: list[str] = field(default_factory=list)
    isolate_accelerator: bool = True
    local_hardware_ranks: list[int] = field(default_factory=list)
    node_group_label: str = "cluster"
    node_id: str = ""

    @property
    def node_rank(self) -> int:
        """Older name of :attr:`cluster_node_rank`."""
        return self.cluster_node_rank

    @property
    def local_gpu_id(self) -> int:
        """Older name of :attr:`local_accelerator_rank`."""
        return self.local_accelerator_rank

    @property
    def cuda_visible_devices(self) -> list[str]:
        """Older name of :attr:`visible_accelerators`."""
        return self.visible_accelerators

    @property
    def isolate_gpu(self) -> bool:
        """Older name of :attr:`isolate_accelerator`."""
        return self.isolate_accelerator


PATH_LIKE = frozenset(
    {
        "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
        "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "CMAKE_MODULE_PATH", "ACLOCAL_PATH", "MANPATH", "INFOPATH",
        "XDG_DATA_DIRS", "XDG_CONFIG_DIRS", "CLASSPATH", "NODE_PATH", "PERL5LIB", "GI_TYPELIB_PATH", "QT_PLUGIN_PATH",
        "QML2_IMPORT_PATH", "ROS_PACKAGE_PATH", "AMENT_PREFIX_PATH", "COLCON_PREFIX_PATH", "GAZEBO_MODEL_PATH",
        "GAZEBO_PLUGIN_PATH", "GAZEBO_RESOURCE_PATH", "GZ_SIM_RESOURCE_PATH", "IGN_GAZEBO_RESOURCE_PATH",
    }
)  # fmt: skip
"""Variables that contain a list of directories. Listed by name because others, such as MODEL_PATH, contain one path."""


def merge_path(first: str, then: str) -> str:
    """Return the directories of *first*, then those of *then*, as one list without duplicates or empty entries."""
    return ":".join(dict.fromkeys(entry for entry in f"{first}:{then}".split(":") if entry))


def merge_paths(node: Mapping[str, str], ours: Mapping[str, str], mode: str = "append") -> dict[str, str]:
    """Return the node's environment, overridden by *ours*.

    Args:
        node: variables of the node.
        ours: variables of the configuration and the placement; they take precedence.
        mode: "append": a variable in PATH_LIKE gets the entries of *ours* first, then the node's; "override": such a
            variable is replaced like any other.

    Raises:
        ValueError: *mode* is neither.
    """
    if mode not in ("append", "override"):
        raise ValueError(f"path_env_merge_mode is {mode!r}; it must be 'append' or 'override'")
    merged = {**node, **ours}
    if mode == "append":
        for name in PATH_LIKE & node.keys() & ours.keys():
            merged[name] = merge_path(ours[name], node[name])
    return merged
