"""Checks of what `execute_on`, `on_node` and `with_retries` are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_actors.errors import PlacementError, UsageError

if TYPE_CHECKING:
    from rlinf_actors.group.control import GroupControl


def chosen_ranks(given: Sequence[int | Sequence[int]], control: GroupControl) -> tuple[int, ...]:
    """Return the ranks that were given to ``execute_on``. Raises PlacementError for ranks that the group lacks."""
    flat: list[int] = []
    for item in given:
        flat.extend(item if isinstance(item, (list, tuple, range)) else [item])  # type: ignore[list-item]
    if len(set(flat)) < len(flat):
        raise PlacementError(f"execute_on() was given a rank of group {control.name!r} more than once: {flat}")
    if not flat:
        raise PlacementError(f"execute_on() needs at least one rank of group {control.name!r}")
    for rank in flat:
        if not isinstance(rank, int) or not 0 <= rank < control.world_size:
            raise PlacementError(
                f"rank {rank!r} is not in group {control.name!r}, which has ranks 0-{control.world_size - 1}"
            )
    return tuple(flat)


def checked_retries(n: int, control: GroupControl) -> int:
    """Return the number that was given to ``with_retries``, if it is valid and the group is restarted."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"with_retries({n!r}): it takes a whole number, 1 or more")
    if not control.restarts:
        raise UsageError(
            f"with_retries() on group {control.name!r}, whose workers are not started again: no try could succeed. "
            "Launch it with restart=RestartPolicy.on_failure()"
        )
    return n


def ranks_on_node(node_rank: int, among: Sequence[int] | None, control: GroupControl) -> tuple[int, ...]:
    """Return the ranks whose workers are on a node. *among* has the ranks of the view, None for all of the group."""
    nodes = control.node_ranks
    ranks = range(len(nodes)) if among is None else among
    found = tuple(rank for rank in ranks if rank < len(nodes) and nodes[rank] == node_rank)
    if found:
        return found
    there = ", ".join(map(str, sorted({nodes[rank] for rank in ranks if rank < len(nodes)}))) or "none"
    raise PlacementError(
        f"on_node({node_rank!r}): no rank of group {control.name!r} that this call is for is on that node; nodes with "
        f"such ranks: {there}"
    )
