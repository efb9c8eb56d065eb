"""Environment variables that are lists of directories, and how two environments become one."""

from __future__ import annotations

import os
from collections.abc import Mapping

APPEND = "append"
"""Ours first, then the node's."""
OVERRIDE = "override"
"""Ours alone, where there is any."""

PATH_VARIABLES = frozenset(
    {
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "PKG_CONFIG_PATH",
        "CMAKE_PREFIX_PATH",
        "MANPATH",
        "XDG_DATA_DIRS",
        "AMENT_PREFIX_PATH",
        "COLCON_PREFIX_PATH",
        "ROS_PACKAGE_PATH",
        "GZ_SIM_RESOURCE_PATH",
        "MUJOCO_PLUGIN_PATH",
    }
)
"""Variables that are merged, not replaced."""


def merge_paths(ours: str | None, nodes: str | None, mode: str = APPEND) -> str:
    """One list of directories from ours and the node's.

    Empty entries are dropped: they would mean the current directory, which nobody chose.

    Args:
        ours: what the configuration says, None if nothing.
        nodes: what the node's environment has, None if nothing.
        mode: "append" (ours first, then the node's, none twice) or "override" (ours, if there is any).
    """
    if mode == OVERRIDE and ours is not None:
        return ours
    entries = [entry for value in (ours, nodes) if value for entry in value.split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(entries))


def merge_environment(ours: Mapping[str, str], nodes: Mapping[str, str], mode: str = APPEND) -> dict[str, str]:
    """The node's environment with ours on top; path-like variables are merged by *mode*."""
    merged = {**nodes, **ours}
    for name in PATH_VARIABLES & ours.keys() & nodes.keys():
        merged[name] = merge_paths(ours[name], nodes[name], mode)
    return merged
