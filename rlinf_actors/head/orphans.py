"""The reasons of groups that end because their owner ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_actors.head.records import Client, Group, WorkerRecord
from rlinf_actors.head.slices import Sliced
from rlinf_actors.wire.endings import ending

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class Orphans:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._waiting: dict[str, list[Group]] = {}  # by the worker that owned them, until its exit is known

    def end(self, owned: Sequence[Group], client: Client | None) -> Sliced[None]:
        """Stop the groups of an ended owner."""
        yield from self._head.group_slices.stop_groups(owned, lambda group: self._end(group, client))

    def _end(self, group: Group, client: Client | None) -> None:
        self._orphan(group, client)
        self._head.groups.stop_group(group, group.orphaned)
        self._head.groups.look_at(group)

    def _orphan(self, group: Group, client: Client | None) -> None:
        """Set the group's `orphaned` text, which says that the group ends because its owner *client* ended.

        If the owner is a worker, the report on how it ended may come later; `owner_ended` then completes the text.
        """
        group.orphaned = "its owner ended"
        if client is None:
            return
        owners = self._head.groups.of_worker(client.worker_id)
        owner = owners.workers[client.worker_id] if owners is not None else None
        if owner is None:
            group.orphaned += f": {client}, {self._head.clients.ended(client.incarnation)}"
        else:
            group.orphaned += f": {self._named(owner)}"
            self._waiting.setdefault(owner.id, []).append(group)
            if owner.exit is not None:
                self.owner_ended(owner)

    def owner_ended(self, owner: WorkerRecord) -> None:
        how = ending(owner.exit) if owner.exit is not None else "ended"
        for group in self._waiting.pop(owner.id, ()):
            group.orphaned = f"its owner ended: {self._named(owner)} {how}"

    def _named(self, worker: WorkerRecord) -> str:
        return f"worker {worker.spec.group}:{worker.spec.rank} on node {self._head.nodes.named(worker.node_id)[0]}"
