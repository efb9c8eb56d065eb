"""Loads: how many unanswered items of a `map` each rank has, and which ranks may get another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class Loads:
    """Counts for `map` how many unanswered items each rank has, at most *limit*. Not thread-safe.

    Ranks whose workers do not serve *rest*: so to look for a free rank costs as much whether few or many start.
    """

    def __init__(self, ranks: Sequence[int], limit: int) -> None:
        self._of = dict.fromkeys(ranks, 0)
        self._awake: list[dict[int, None]] = [dict.fromkeys(ranks), *({} for _ in range(limit))]  # by load
        self._resting: list[dict[int, None]] = [{} for _ in range(limit + 1)]
        self.capacity = len(ranks) * limit

    def free(self) -> Iterator[int]:
        """Return the ranks that may get another item and do not rest. Those with the fewest items come first."""
        return (rank for ranks in self._awake[:-1] for rank in ranks)

    def full(self) -> Iterable[int]:
        """Return the ranks that have the maximum number of items, and so may not get another one now."""
        return self._awake[-1]

    def resting(self) -> Iterator[int]:
        """Return the ranks that rest, and may get another item."""
        return (rank for ranks in self._resting[:-1] for rank in ranks)

    def rest(self, rank: int) -> None:
        """Let *rank*, which does not rest, rest: its worker does not serve."""
        load = self._of[rank]
        del self._awake[load][rank]
        self._resting[load][rank] = None

    def rouse(self, rank: int) -> None:
        """Let *rank* rest no more. Ignored if it does not rest."""
        load = self._of.get(rank, 0)
        if rank in self._resting[load]:
            del self._resting[load][rank]
            self._awake[load][rank] = None

    def change(self, rank: int, by: int) -> None:
        """Count that *rank* got an item (*by* is +1) or has answered one (-1). Ignored for a dropped rank."""
        if rank in self._of:
            loads = self._loads_of(rank)
            del loads[self._of[rank]][rank]
            self._of[rank] += by
            loads[self._of[rank]][rank] = None

    def _loads_of(self, rank: int) -> list[dict[int, None]]:
        return self._resting if rank in self._resting[self._of[rank]] else self._awake

    @property
    def empty(self) -> bool:
        """True if all ranks were dropped, so that no item can be sent."""
        return not self._of

    def drop(self, rank: int) -> None:
        """Remove *rank*, whose worker is gone, so that it gets no more items."""
        del self._loads_of(rank)[self._of[rank]][rank]
        del self._of[rank]
