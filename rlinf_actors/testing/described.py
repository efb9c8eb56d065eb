"""What a test says of a node, as the file that agentd reads instead of looking for hardware. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.model.hardware import AcceleratorType

NodeHardware = Union[Mapping[str, Any], int, None]
"""One node's description; see LocalCluster. A number stands for that many accelerators."""

KEYS = (
    "accelerators", "type", "model", "memory_bytes", "numa_nodes", "robots", "cpus", "env", "labels", "interfaces",
)  # fmt: skip
EXAMPLE = '{"accelerators": 8, "type": "NV_GPU", "model": "A800"}'


def per_node(hardware: NodeHardware | Sequence[NodeHardware], num_nodes: int) -> list[dict[str, Any]]:
    """For each node what its agentd is told.

    Args:
        hardware: one description for all nodes, or a list with one for each.
        num_nodes: how many nodes there are.

    Raises:
        ConfigError: a key or value is wrong, or the list has another length.
    """
    if isinstance(hardware, (list, tuple)):
        if len(hardware) != num_nodes:
            raise ConfigError(f"describes {len(hardware)} nodes; the cluster has {num_nodes}", path="hardware")
        return [_node(one, rank, f"hardware[{rank}]") for rank, one in enumerate(hardware)]
    return [_node(hardware, rank, "hardware") for rank in range(num_nodes)]  # type: ignore[arg-type]


def _node(given: NodeHardware, rank: int, path: str) -> dict[str, Any]:
    if given is None or isinstance(given, int):
        given = {"accelerators": given or 0}
    if not isinstance(given, Mapping):
        raise ConfigError(f"is {given!r}; it must be a mapping such as {EXAMPLE}", path=path)
    unknown = sorted(set(given) - set(KEYS))
    if unknown:
        raise ConfigError(f"has no key {unknown[0]!r}; keys: {', '.join(KEYS)}", path=path)
    described: dict[str, Any] = {"resources": [*_accelerators(given, rank, path), *_robots(given, path)]}
    if "cpus" in given:
        described["num_cpus"] = given["cpus"]
    for key, name in (("env", "env_vars"), ("labels", "labels")):
        described[name] = {str(k): str(v) for k, v in (given.get(key) or {}).items()}
    if "interfaces" in given:
        described["interfaces"] = dict(given["interfaces"])
    return described


def _accelerators(given: Mapping[str, Any], rank: int, path: str) -> list[dict[str, Any]]:
    number = given.get("accelerators", 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(f"is {number!r}; it must be a number of accelerators", path=f"{path}.accelerators")
    kind, known = str(given.get("type", "NV_GPU")), [member.value for member in ACCELERATOR_TABLE]
    known.remove(AcceleratorType.NO_ACCEL.value)
    if kind not in known:
        raise ConfigError(f"is {kind!r}; it must be one of {', '.join(known)}", path=f"{path}.type")
    model = str(given.get("model", ""))
    numa_nodes = list(given.get("numa_nodes", [-1] * number))
    if len(numa_nodes) != number or not all(isinstance(node, int) for node in numa_nodes):
        raise ConfigError(f"is {numa_nodes!r}; it must list a number for each accelerator", path=f"{path}.numa_nodes")
    infos = [
        {
            "type": kind,
            "model": model,
            "detail": {
                "index": index,
                "uuid": f"described-{rank}-{index}",
                "memory_bytes": int(given.get("memory_bytes", 0)),
                "numa_node": numa_nodes[index],
            },
        }
        for index in range(number)
    ]
    return [{"type": kind, "infos": infos}] if infos else []


def _robots(given: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for index, robot in enumerate(given.get("robots") or ()):
        if not isinstance(robot, Mapping) or "type" not in robot:
            raise ConfigError(f'is {robot!r}; it must be such as {{"type": "Franka"}}', path=f"{path}.robots[{index}]")
        kind = str(robot["type"])
        detail = {str(key): value for key, value in robot.items() if key not in ("type", "model")}
        info = {"type": kind, "model": str(robot.get("model", kind)), "detail": detail}
        by_type.setdefault(kind, []).append(info)
    return [{"type": kind, "infos": infos} for kind, infos in by_type.items()]
