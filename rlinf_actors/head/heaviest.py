"""Weights by key, and the key with the largest weight. Pure.

A table that is full drops something of the member that has most. To compare all members each time would cost more with
each member; here a change of a weight and a look at the largest cost a few steps of a heap.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

K = TypeVar("K")

STALE = 64
"""Number of entries that are not present weights which the heap of a small table may have."""


class Heaviest(Generic[K]):
    """Weights by key. Of keys with equal weights, the one that was added first counts as the heavier one."""

    def __init__(self) -> None:
        self._weights: dict[K, tuple[float, int]] = {}  # with the number of the key's addition
        self._heap: list[tuple[float, int, K]] = []  # of all weights that were set; most are not the present ones
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._weights)

    def set(self, key: K, weight: float) -> None:
        """Set the weight of a key. A weight of 0 removes the key."""
        before = self._weights.pop(key, None)
        if not weight:
            return
        number = next(self._numbers) if before is None else before[1]
        self._weights[key] = weight, number
        heapq.heappush(self._heap, (-weight, number, key))
        if len(self._heap) > STALE + 4 * len(self._weights):
            self._heap = [(-weight, number, key) for key, (weight, number) in self._weights.items()]
            heapq.heapify(self._heap)

    def get(self, key: K) -> float:
        return self._weights.get(key, (0.0, 0))[0]

    def top(self, apart_from: K | None = None) -> K | None:
        """Return the heaviest key other than *apart_from*, None if there is no other."""
        top = self._top()
        if top is None or top != apart_from:
            return top
        entry = heapq.heappop(self._heap)
        second = self._top()
        heapq.heappush(self._heap, entry)
        return second

    def _top(self) -> K | None:
        while self._heap:
            weight, number, key = self._heap[0]
            if self._weights.get(key) == (-weight, number):
                return key
            heapq.heappop(self._heap)
        return None
