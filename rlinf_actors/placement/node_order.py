"""Assign ranks to nodes. Pure.

The head calls `order_nodes` whenever a node registers; `rlinf-actors plan` calls it to predict ranks.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.settings import NODE_RANK

_BUILT_IN = [kind.value for kind in AcceleratorType if kind is not AcceleratorType.NO_ACCEL]


class RegisteredNode(msgspec.Struct, frozen=True):
    """The properties of a registered node from which `order_nodes` computes its rank."""

    key: str  # id of the node
    explicit: int | None = None  # the node's RLINF_NODE_RANK, None if it has none
    is_head: bool = False  # True if the head runs on the node
    accelerator_type: str = AcceleratorType.NO_ACCEL.value
    ip: str = ""


def order_nodes(
    nodes: Sequence[RegisteredNode], fixed: Mapping[str, int] | None = None, *, complete: bool = True
) -> dict[str, int]:
    """Return the rank of every node, by the node's id (``key``). The result does not depend on the order of *nodes*.

    If every node has RLINF_NODE_RANK, those are the ranks. If no node has it, the nodes are sorted: the head's node
    first, then by accelerator type (built-in types, then registered types by name, then nodes without accelerators),
    then by IP address as a number.

    Args:
        nodes: the registered nodes.
        fixed: ranks that were assigned earlier, by the node's id; they do not change. Without RLINF_NODE_RANK, new
            nodes get the lowest free ranks.
        complete: True if all nodes have registered, so that ranks from RLINF_NODE_RANK must be 0 to N-1.

    Raises:
        ConfigError: only some nodes have RLINF_NODE_RANK, two nodes have the same, it contradicts a fixed rank, or
            (with *complete*) the ranks have a gap. The message names the nodes.
    """
    taken = dict(fixed or {})
    stated = [node for node in nodes if node.explicit is not None]
    if not stated:
        return _by_hardware(nodes, taken)
    silent = [node for node in nodes if node.explicit is None]
    if silent:
        raise ConfigError(
            f"set on {_names(stated)} but not on {_names(silent)}; set it on all nodes or on none", path=NODE_RANK
        )
    return _by_statement(stated, taken, complete)


def missing_ranks(ranks: Mapping[str, int], num_nodes: int) -> list[int]:
    """Return the ranks from 0 to *num_nodes* - 1 that are not among the values of *ranks*."""
    present = set(ranks.values())
    return [rank for rank in range(num_nodes) if rank not in present]


def _by_hardware(nodes: Sequence[RegisteredNode], taken: Mapping[str, int]) -> dict[str, int]:
    used = set(taken.values())
    free = (rank for rank in itertools.count() if rank not in used)
    new = sorted((node for node in nodes if node.key not in taken), key=_sort_key)
    return {node.key: taken[node.key] for node in nodes if node.key in taken} | {node.key: next(free) for node in new}


def _by_statement(nodes: Sequence[RegisteredNode], taken: Mapping[str, int], complete: bool) -> dict[str, int]:
    holders: dict[int, str] = {rank: key for key, rank in taken.items()}
    result: dict[str, int] = {}
    for node in sorted(nodes, key=lambda node: (node.explicit or 0, node.key)):
        rank = node.explicit or 0
        if node.key in taken and taken[node.key] != rank:
            raise ConfigError(
                f"is {rank} on node {_name(node)}, which has rank {taken[node.key]} in this cluster already; "
                "ranks stay as they are until the head is started anew",
                path=NODE_RANK,
            )
        holder = holders.setdefault(rank, node.key)
        if holder != node.key:
            raise ConfigError(f"is {rank} on two nodes, {holder} and {_name(node)}; ranks are unique", path=NODE_RANK)
        result[node.key] = rank
    gaps = missing_ranks({**taken, **result}, len(result.keys() | taken.keys()))
    if complete and gaps:
        raise ConfigError(
            f"gives ranks {sorted(result.values())} to {_names(nodes)}, and none has {gaps[0]}; "
            f"{len(nodes)} nodes have ranks 0-{len(nodes) - 1}",
            path=NODE_RANK,
        )
    return result


def _sort_key(node: RegisteredNode) -> tuple[bool, tuple[int, str], tuple[int, int, str], str]:
    kind = node.accelerator_type
    if kind in _BUILT_IN:
        order = _BUILT_IN.index(kind), ""
    else:
        order = len(_BUILT_IN) + (kind == AcceleratorType.NO_ACCEL.value), kind
    place: tuple[int, int, str]
    try:
        address = ipaddress.ip_address(node.ip)
        place = address.version, int(address), ""
    except ValueError:  # a host name
        place = 9, 0, node.ip
    return not node.is_head, order, place, node.key


def _name(node: RegisteredNode) -> str:
    return f"{node.key} ({node.ip})" if node.ip else node.key


def _names(nodes: Sequence[RegisteredNode]) -> str:
    return ", ".join(map(_name, nodes))
