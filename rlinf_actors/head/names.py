"""Names of groups whose workers may still run where the head cannot see them: nobody else gets one meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.records import Group, Node, Worker


@dataclass(frozen=True)
class _Lost:
    worker: str
    node_id: str
    node: str
    until: float


class HeldNames:
    """Workers that were lost with their nodes hold the names of their groups.

    A name is free again when the last of them is known to have ended, or when none can live any more.

    Args:
        hold_s: how long a lost node's workers may still be running, in seconds.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._lost: dict[tuple[str, str], dict[str, _Lost]] = {}
        self._keys: dict[str, tuple[str, str]] = {}

    def lost(self, group: Group, worker: Worker, node: Node, now: float) -> None:
        """A worker may live on, where nobody hears of it."""
        self._expire(now)
        one = _Lost(f"{group.name}:{worker.spec.rank}", node.id, node.name, now + self._hold_s)
        self._lost.setdefault(group.key, {})[worker.id] = one
        self._keys[worker.id] = group.key

    def ended(self, worker_id: str, node_id: str) -> None:
        """The agent of its node says that it has ended."""
        key = self._keys.get(worker_id)
        if key is not None and self._lost[key][worker_id].node_id == node_id:
            self._free(key, worker_id)

    def node_is_back(self, node_id: str, running: Container[str]) -> None:
        """A node is there again, with these workers: others of it have ended."""
        for key, lost in list(self._lost.items()):
            for id in [id for id, one in lost.items() if one.node_id == node_id and id not in running]:
                self._free(key, id)

    def check(self, namespace: str, name: str, now: float) -> None:
        """Whether a launch may have this name.

        Raises:
            Refused: it is held; says by whom, and for how long at most.
        """
        self._expire(now)
        lost = self._lost.get((namespace, name))
        if lost:
            one = max(lost.values(), key=lambda one: one.until)
            raise Refused(
                "name_in_use",
                f"the name {name!r} of namespace {namespace!r} is held for {one.until - now:.0f} s at most: worker "
                f"{one.worker} was lost with node {one.node} and may still run there. It is free as soon as that node "
                "is back; give this group another name, or launch it later",
            )

    def _expire(self, now: float) -> None:
        for key, lost in list(self._lost.items()):
            for id in [id for id, one in lost.items() if now >= one.until]:
                self._free(key, id)

    def _free(self, key: tuple[str, str], worker_id: str) -> None:
        lost = self._lost[key]
        del lost[worker_id], self._keys[worker_id]
        if not lost:
            del self._lost[key]
