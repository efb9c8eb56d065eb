"""Addresses of workers as users give them, and the tree of a broadcast. Pure."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlinf_actors.errors import PlacementError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.wire.protocol import MAX_DEPTH, MAX_SIZE


def address(group: Any, rank: Any) -> WorkerAddress:
    """Return the address of a worker of a group, or of a child of a worker.

    Args:
        group: name of the group.
        rank: its rank, or the path of ranks to a child.

    Raises:
        TypeError: the group is not a str, or the rank not an int or a path of ints.
        ValueError: a rank is below 0, or the path is longer than any child's.
    """
    if type(group) is str and type(rank) is int and group and rank >= 0:
        return _cached_address(group, rank)  # the usual case: every message comes here
    if not isinstance(group, str) or not group:
        raise TypeError(f"the group is {group!r}; it must be the name of a group")
    path = tuple(_rank(part) for part in rank) if isinstance(rank, (list, tuple)) else (_rank(rank),)
    if not path:
        raise TypeError(f"the rank in group {group!r} is an empty path")
    if len(path) > 1 and (len(path) > MAX_DEPTH or not all(0 <= rank <= MAX_SIZE for rank in path)):
        raise ValueError(f"{rank!r} leads to no child: at most {MAX_DEPTH} ranks, each from 0 to {MAX_SIZE}")
    return WorkerAddress(group, path)


@lru_cache(maxsize=4096)
def _cached_address(group: str, rank: int) -> WorkerAddress:
    return WorkerAddress(group, rank)


def addresses(groups: Any) -> list[WorkerAddress]:
    """Return the members that ``groups=[(name, ranks), ...]`` names, in the order given, each once.

    *ranks* is a rank, a tuple that is the path to a child, or a list of these. Raises as `address` does.
    """
    found: dict[WorkerAddress, None] = {}
    for entry in groups:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise TypeError(f"groups holds {entry!r}; each entry must be (name of a group, ranks)")
        name, ranks = entry
        for rank in ranks if isinstance(ranks, (list, range)) else [ranks]:
            found[address(name, rank)] = None
    if not found:
        raise ValueError("groups names no worker: expected [(name, ranks), ...]")
    return list(found)


def source(src: Any, members: Sequence[WorkerAddress]) -> WorkerAddress:
    """Return the source of a broadcast: *src* is ``(name, rank)`` or ``"name:rank"``; None is the first member.

    Raises:
        ValueError: the source is not a member.
    """
    if src is None:
        return members[0]
    if isinstance(src, WorkerAddress):
        found = src
    elif isinstance(src, str):
        found = WorkerAddress.from_name(src)
    elif isinstance(src, (tuple, list)) and len(src) == 2:
        found = address(src[0], src[1])
    else:
        raise TypeError(f"src is {src!r}; it must be (name of a group, rank)")
    if found not in members:
        raise ValueError(f"src {found} is not a member of the broadcast: {', '.join(map(str, members))}")
    return found


def in_order(members: Sequence[WorkerAddress], src: WorkerAddress) -> list[WorkerAddress]:
    """Return the members, the source first, in an order that does not depend on how the caller ordered them."""
    return [src, *sorted(set(members) - {src})]


def tree(nodes: Sequence[int]) -> list[int]:
    """Return the index of each member's parent, -1 for the source.

    The first member of a node is its relay: it forwards to the other members there, which can be lent its memory. The
    relays form a binary tree, so that at most two copies leave each node. All members compute the same tree.

    Args:
        nodes: rank of the node of each member, the source first.
    """
    relays: dict[int, int] = {}
    for index, node in enumerate(nodes):
        relays.setdefault(node, index)
    parents = [relays[node] for node in nodes]
    heap = list(relays.values())
    for place, relay in enumerate(heap):
        parents[relay] = heap[(place - 1) // 2] if place else -1
    return parents


def children(parents: Sequence[int], nodes: Sequence[int], index: int) -> list[int]:
    """Return the children of member *index*, those on other nodes first, since they have children to serve."""
    found = [child for child, parent in enumerate(parents) if parent == index]
    return sorted(found, key=lambda child: nodes[child] == nodes[index])


def stream_name(order: Sequence[WorkerAddress], ids: Sequence[str]) -> str:
    """Return the name of the stream of these members with this source; *ids* tell relaunched groups apart."""
    text = "\n".join(f"{member} {identity}" for member, identity in zip(order, ids, strict=True))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def check_rank(member: WorkerAddress, world_size: int) -> None:
    """Raise PlacementError if the group has no such rank. For a child the rank of its worker counts."""
    rank = member.rank_path[0]
    if not 0 <= rank < world_size:
        raise PlacementError(
            f"rank {rank} is not in group {member.root_group_name!r}, which has ranks 0-{world_size - 1}"
        )


def _rank(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{value!r} is not a rank: expected a whole number, or a list of them") from None
