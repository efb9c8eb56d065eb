"""The shared memory of this process: whether it has any, and when idle memory goes back to the system."""

from __future__ import annotations

import logging
import os

from rlinf_actors.net.arena import Arena
from rlinf_actors.net.loop import IoThread

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""Seconds without a new block after which free memory is given back."""


def shared_memory(limit: int, io: IoThread) -> Arena | None:
    """An arena of at most *limit* bytes, and of at most a quarter of the machine's memory; None for 0."""
    limit = min(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    if limit <= 0:
        return None
    try:
        arena = Arena(limit)
    except OSError as error:
        log.warning("no shared memory, so large arrays are copied through sockets: %s", error)
        return None
    trimmer = _Trimmer(arena, io)
    arena.on_store = trimmer.stored
    return arena


class _Trimmer:
    """One timer while blocks are made, none while the process is idle."""

    def __init__(self, arena: Arena, io: IoThread) -> None:
        self._arena = arena
        self._io = io
        self._armed = False

    def stored(self) -> None:
        """A block was made. Any thread."""
        if not self._armed:
            self._armed = True
            self._io.call(self._arm, self._arena.stores)

    def _arm(self, seen: int) -> None:
        self._io.loop.call_later(IDLE_S, self._look, seen)

    def _look(self, seen: int) -> None:
        if self._arena.stores != seen:
            self._arm(self._arena.stores)
            return
        self._armed = False
        self._arena.trim()
