"""Notices about changed workers, to the clients that hold handles of their groups. Pure.

A thousand agentds may report in one turn of the loop. So the tables only note what has changed, and `flush`, once a
turn, sends one WorkerChanged for each changed group and each holder of its handle. Holders that are served in one turn
get the same message object, which the server therefore encodes once. A message is made when it is sent: so none has an
older state of a worker than a message or answer before it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head.commands import Notify
from rlinf_actors.head.records import Client, Group, WorkerRecord
from rlinf_actors.head.slices import Sliced, pieces
from rlinf_actors.wire.client_messages import WorkerChanged
from rlinf_actors.wire.values import WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


MOST_STATES = 10_000
"""Most workers in one message to a client: a state has about 250 bytes, and a control message 16 MiB at most."""
SENT_AT_ONCE = 500
"""Most notices, or states in a notice, that the head makes in one slice."""


def worker_changes(namespace: str, name: str, states: Sequence[WorkerState], world_size: int) -> list[WorkerChanged]:
    """Return the notices that tell a client of these states of workers of one group."""
    slices = [states[start : start + MOST_STATES] for start in range(0, len(states) or 1, MOST_STATES)]
    return [WorkerChanged(namespace, name, list(part), world_size) for part in slices]


class _Batch(msgspec.Struct, eq=False):
    """Workers of a group that have changed, and the clients that have not been told yet."""

    group: Group
    workers: dict[str, WorkerRecord]
    receivers: deque[str]
    redescribed: bool


class GroupNotices:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._changed: dict[tuple[str, str], Group] = {}
        self._more = False
        self._due: deque[_Batch] = deque()

    def changed(self, group: Group, worker: WorkerRecord) -> None:
        """Note that this worker's state has changed."""
        group.changed[worker.id] = worker
        for ranks in group.watches:
            ranks.add(worker.spec.rank)
        self._changed[group.key] = group

    def replaced(self, group: Group, id: str) -> None:
        """Drop the notice about a worker whose rank is started again: the notice about its successor tells of both."""
        group.changed.pop(id, None)
        for batch in self._due:
            if batch.group is group:
                batch.workers.pop(id, None)

    @property
    def pending(self) -> bool:
        """True if `flush` must be called again, after other events had their turn."""
        return bool(self._due) or self._more

    def send_all(self, group: Group, client: Client) -> Sliced[None]:
        """Send a client the state of all workers of a group."""
        for some, more in pieces(list(group.workers.values()), SENT_AT_ONCE):
            states = [worker.state() for worker in some]
            if self._head.clients.get(client.incarnation) is client:
                message = WorkerChanged(group.namespace, group.name, states, group.world_size)
                self._head.emit(Notify(client.peer, message))
            if more:
                yield

    def flush(self) -> None:
        """Send the changes since the last flush: SENT_AT_ONCE states and notices at most, the others later."""
        self._more, room = False, SENT_AT_ONCE
        for group in list(self._changed.values()) if self._changed else ():
            if group.launching:
                continue
            if room <= 0:
                self._more = True
                break
            room -= self._take(group, room)
            self._more = self._more or group.key in self._changed
        self._send()

    def flush_group(self, group: Group) -> Sliced[None]:
        """Send all changes of one group now, because the group is about to be dropped."""
        while group.key in self._changed:
            self._take(group, SENT_AT_ONCE)
            self._send()
            if self._due or group.key in self._changed:
                yield
        while self._due:
            self._send()
            yield

    def _send(self) -> None:
        room = SENT_AT_ONCE
        while self._due and room > 0:
            batch = self._due[0]
            receivers = [batch.receivers.popleft() for _ in range(min(room, len(batch.receivers)))]
            room -= len(receivers) + len(batch.workers)
            if not batch.receivers:
                self._due.popleft()
            group, states = batch.group, [worker.state() for worker in batch.workers.values()]
            if not states:
                continue
            detail = group.detail if batch.redescribed else ""
            message = WorkerChanged(group.namespace, group.name, states, group.world_size, detail)
            for incarnation in receivers:
                client = self._head.clients.get(incarnation)
                if client is not None:
                    self._head.emit(Notify(client.peer, message))

    def _take(self, group: Group, most: int) -> int:
        """Take at most *most* changed workers of a group for the notices, and return the number of these workers."""
        taken = dict(itertools.islice(group.changed.items(), most))
        for id in taken:
            del group.changed[id]
        if not group.changed:
            del self._changed[group.key]
        if taken:
            self._due.append(_Batch(group, taken, deque([group.owner, *group.subscribers]), group.redescribed))
            group.redescribed = False
        return len(taken)
