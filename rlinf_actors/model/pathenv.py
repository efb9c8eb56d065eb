"""How a worker's environment comes from its node's and the configuration's. Pure."""

from __future__ import annotations

from collections.abc import Mapping

PATH_LIKE = frozenset(
    {
        "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
        "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "CMAKE_MODULE_PATH", "ACLOCAL_PATH", "MANPATH", "INFOPATH",
        "XDG_DATA_DIRS", "XDG_CONFIG_DIRS", "CLASSPATH", "NODE_PATH", "PERL5LIB", "GI_TYPELIB_PATH", "QT_PLUGIN_PATH",
        "QML2_IMPORT_PATH", "ROS_PACKAGE_PATH", "AMENT_PREFIX_PATH", "COLCON_PREFIX_PATH", "GAZEBO_MODEL_PATH",
        "GAZEBO_PLUGIN_PATH", "GAZEBO_RESOURCE_PATH", "GZ_SIM_RESOURCE_PATH", "IGN_GAZEBO_RESOURCE_PATH",
    }
)  # fmt: skip
"""Variables that hold a list of directories. By name: MODEL_PATH and the like hold one path, not a list."""


def merge_path(first: str, then: str) -> str:
    """Both lists of directories in one, in this order, without duplicates or empty entries."""
    return ":".join(dict.fromkeys(entry for entry in f"{first}:{then}".split(":") if entry))


def merge_paths(node: Mapping[str, str], ours: Mapping[str, str], mode: str = "append") -> dict[str, str]:
    """The node's environment with *ours* on top.

    Args:
        node: what the node has.
        ours: what the configuration and the placement ask for; wins.
        mode: "append": variables in PATH_LIKE get our entries first, then the node's;
            "override": they are replaced like any other.

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
