"""Which parts of an arena are in use. Pure; the caller holds a lock.

First fit from the lowest address: what was used last and lies low is used again first, since a page
that was touched before costs a tenth of a new one.
"""

from __future__ import annotations

import bisect

PAGE = 4096
"""Extents begin and end at pages, so that one can be given back to the kernel without its neighbours."""


class Extents:
    """Ranges of bytes inside ``0 .. size``.

    Args:
        size: bytes to divide, a multiple of PAGE.

    Attributes:
        used: bytes in use, in whole pages.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._starts = [0]
        self._lengths = [size]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The offset of *size* bytes (1 or more) that nobody else has, None where no gap is that long."""
        need = -(-size // PAGE) * PAGE
        for n, length in enumerate(self._lengths):
            if length >= need:
                start = self._starts[n]
                if length == need:
                    del self._starts[n], self._lengths[n]
                else:
                    self._starts[n] += need
                    self._lengths[n] -= need
                self._taken[start] = need
                self.used += need
                return start
        return None

    def give(self, start: int) -> None:
        """The extent at *start*, as `take` returned it, is free again."""
        length = self._taken.pop(start)
        self.used -= length
        n = bisect.bisect(self._starts, start)
        if n < len(self._starts) and start + length == self._starts[n]:
            length += self._lengths[n]
            del self._starts[n], self._lengths[n]
        if n > 0 and self._starts[n - 1] + self._lengths[n - 1] == start:
            self._lengths[n - 1] += length
        else:
            self._starts.insert(n, start)
            self._lengths.insert(n, length)

    def free(self) -> list[tuple[int, int]]:
        """(start, length) of every gap, in order."""
        return list(zip(self._starts, self._lengths, strict=True))
