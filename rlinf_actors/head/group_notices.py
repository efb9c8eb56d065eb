"""Notices about changed workers, to the clients that hold handles of their groups. Pure.

A thousand agentds may report in one turn of the loop. So the tables only note what has changed, and `flush`, once a
turn, sends one WorkerChanged for each changed group and each holder of its handle. All holders get the same message
object, which the server therefore encodes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.head.commands import Notify
from rlinf_actors.head.records import Client, Group, WorkerRecord
from rlinf_actors.wire.client_messages import WorkerChanged
from rlinf_actors.wire.values import WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


MOST_STATES = 10_000
"""Most workers in one message to a client: a state has about 250 bytes, and a control message 16 MiB at most."""


def worker_changes(
    namespace: str, name: str, states: Sequence[WorkerState], world_size: int, detail: str = ""
) -> list[WorkerChanged]:
    """Return the notices that tell a client of these states of workers of one group."""
    slices = [states[start : start + MOST_STATES] for start in range(0, len(states) or 1, MOST_STATES)]
    return [WorkerChanged(namespace, name, list(part), world_size, detail) for part in slices]


class GroupNotices:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._changed: dict[tuple[str, str], Group] = {}

    def changed(self, group: Group, worker: WorkerRecord) -> None:
        """Note that this worker's state has changed."""
        group.changed[worker.id] = worker
        self._changed[group.key] = group

    def send_all(self, group: Group, client: Client) -> None:
        """Send a client the state of all workers of a group."""
        states = [worker.state() for worker in group.workers.values()]
        self._send([client.incarnation], worker_changes(group.namespace, group.name, states, group.world_size))

    def flush(self) -> None:
        """Send the changes since the last flush."""
        for group in list(self._changed.values()):
            self.flush_group(group)

    def flush_group(self, group: Group) -> None:
        """Send the changes of one group now; before the group is dropped, for example."""
        if self._changed.pop(group.key, None) is None:
            return
        states = [worker.state() for worker in group.changed.values()]
        group.changed.clear()
        detail, group.redescribed = group.detail if group.redescribed else "", False
        if states:
            messages = worker_changes(group.namespace, group.name, states, group.world_size, detail)
            self._send([group.owner, *group.subscribers], messages)

    def _send(self, incarnations: Iterable[str], messages: Sequence[WorkerChanged]) -> None:
        for incarnation in incarnations:
            client = self._head.clients.get(incarnation)
            if client is not None:
                for message in messages:
                    self._head.emit(Notify(client.peer, message))
