"""Groups that have ended: how their workers did, for who names one too late. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from rlinf_actors.wire.values import GroupState


class EndedGroups:
    """The last groups that ended, by namespace and name.

    Args:
        limit: workers of all of them together; beyond that the oldest groups of the job that has most are forgotten,
            the last one never.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._states: dict[tuple[str, str], GroupState] = {}
        self._workers: Counter[str] = Counter()

    def add(self, state: GroupState) -> None:
        """Remember a group whose last worker is gone."""
        key = (state.namespace, state.name)
        self.forget(key)
        self._states[key] = msgspec.structs.replace(state, detail="")
        self._workers[state.namespace] += len(state.workers)
        while sum(self._workers.values()) > self._limit and len(self._states) > 1:
            older = list(self._states)[:-1]
            self.forget(max(older, key=lambda key: self._workers[key[0]]))  # the first of the job that has most

    def get(self, key: tuple[str, str], token: str) -> GroupState | None:
        """How it ended; None if there was none of that name, or too long ago."""
        state = self._states.get(key)
        return None if state is None else msgspec.structs.replace(state, token=token)

    def forget(self, key: tuple[str, str]) -> None:
        """The name is used again."""
        state = self._states.pop(key, None)
        if state is not None:
            self._workers[key[0]] -= len(state.workers)
            if not self._workers[key[0]]:
                del self._workers[key[0]]

    def forget_job(self, namespace: str) -> None:
        """Nobody is left in this namespace: who comes next has nothing to do with it."""
        for key in [key for key in self._states if key[0] == namespace]:
            self.forget(key)
