"""Placement (node and devices of one worker), and `merge_paths`, by which agentd makes a worker's environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_actors.model.hardware import AcceleratorType


@dataclass
class Placement:
    """The node and the devices of one worker of a group.

    Attributes:
        rank: rank of the worker in the group, 0 to world_size - 1.
        cluster_node_rank: rank of the worker's node in the cluster.
        placement_node_rank: index of that node among the nodes of the group, counted in the order of the workers'
            ranks, so that the node of rank 0 has index 0.
        local_accelerator_rank: position on the node of the worker's first accelerator; -1 if the worker was not placed
            on accelerators.
        accelerator_type: type of the accelerators that the worker sees; NO_ACCEL if it sees none.
        local_rank: index of the worker among the group's workers on its node, in the order of ranks.
        local_world_size: number of the group's workers on the node.
        visible_accelerators: the accelerators that the worker sees, as the vendor's visibility variable lists them:
            indices or UUIDs.
        isolate_accelerator: True if the worker sees only its own accelerators.
        local_hardware_ranks: positions on the node of the worker's resources (accelerators or robots); empty if the
            worker was placed on a whole node.
        node_group_label: label of the node group whose resources the worker has.
        node_id: id of the node, "" if unknown.
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

    def __post_init__(self) -> None:
        self.accelerator_type = AcceleratorType.named(self.accelerator_type)

    @property
    def node_rank(self) -> int:
        """Older name of :attr:`cluster_node_rank`, the rank of the worker's node."""
        return self.cluster_node_rank

    @property
    def local_gpu_id(self) -> int:
        """Older name of :attr:`local_accelerator_rank`, the position on the node of the worker's first accelerator."""
        return self.local_accelerator_rank

    @property
    def cuda_visible_devices(self) -> list[str]:
        """Older name of :attr:`visible_accelerators`, the accelerators that the worker sees."""
        return self.visible_accelerators

    @property
    def isolate_gpu(self) -> bool:
        """Older name of :attr:`isolate_accelerator`: True if the worker sees only its own accelerators."""
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


def merge_paths(node: Mapping[str, str], ours: Mapping[str, str], mode: str = "append") -> dict[str, str]:
    """Return the environment of a worker: the node's variables, overridden by *ours*.

    Args:
        node: environment of the node, from agentd.
        ours: variables of the configuration and the placement, which take precedence.
        mode: how to merge variables that list directories (PATH_LIKE) if both mappings have them: "append" puts the
            directories of *ours* before the node's; "override" replaces the node's value.

    Raises:
        ValueError: *mode* is neither.
    """
    if mode not in ("append", "override"):
        raise ValueError(f"path_env_merge_mode is {mode!r}; it must be 'append' or 'override'")
    merged = {**node, **ours}
    if mode == "append":
        for name in PATH_LIKE & node.keys() & ours.keys():
            entries = f"{ours[name]}:{node[name]}".split(":")
            merged[name] = ":".join(dict.fromkeys(entry for entry in entries if entry))  # no duplicates, no empty ones
    return merged
