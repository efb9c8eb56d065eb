"""Parse the worker addresses that users give, and compute the tree of a broadcast. Nothing here does I/O."""

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
    """Return the address of a worker, or of a child member if *rank* is a list or tuple of several ranks.

    Such a list or tuple is the path to the child: the rank of the worker, then the ranks below that worker.

    Raises:
        TypeError: *group* is not a non-empty str, or *rank* is neither an int nor a list or tuple of ints.
        ValueError: a rank is negative, or a path of several ranks is too long or holds too large a rank.
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
    """Return the addresses of all workers in ``groups=[(name, ranks), ...]``, in that order, without duplicates.

    *ranks* is one rank, a tuple of ranks that is the path to a child member, or a list of these.

    Raises:
        TypeError: a name is not a non-empty str, or a rank is not an int.
        ValueError: *groups* names no worker, or a rank is negative or too large.
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
    """Return the address of the worker that broadcasts its object: *src*, or the first member if *src* is None.

    Raises:
        ValueError: *src* is not a member.
        TypeError: *src* is no ``(name, rank)``, ``"name:rank"`` or WorkerAddress.
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
    """Return the members with the source first and the others sorted. Every member computes the same order."""
    return [src, *sorted(set(members) - {src})]


def tree(nodes: Sequence[int]) -> list[int]:
    """Return for each member of a broadcast the index of its parent in the tree, -1 for the source.

    Members receive the object from their parent and forward the object to their children. The first member on each node
    is the node's relay, the parent of the other members on the node. The relays form a binary tree, so at most two
    copies leave each node. *nodes* holds the rank of each member's node; the source comes first.
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
    """Return the indexes of the children of member *index* in the tree of a broadcast.

    Children on other nodes come first, because they forward the object to more members. *parents* is the result of
    ``tree(nodes)``.
    """
    found = [child for child, parent in enumerate(parents) if parent == index]
    return sorted(found, key=lambda child: nodes[child] == nodes[index])


def stream_name(order: Sequence[WorkerAddress], ids: Sequence[str]) -> str:
    """Return the name of the mailbox stream for the messages of a broadcast tree. All members compute the same name.

    *order* holds the members, the source first; *ids* holds their worker ids, which change when a group is launched
    again.
    """
    text = "\n".join(f"{member} {identity}" for member, identity in zip(order, ids, strict=True))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def check_rank(member: WorkerAddress, world_size: int) -> None:
    """Raise PlacementError if *member*, or the worker above a child member, has a rank of *world_size* or more."""
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
