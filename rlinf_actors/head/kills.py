"""Kills of single workers, for people and tools. Pure.

The order goes to the agentd of the worker's node, which makes the robots of a robot worker safe first. The request is
answered when the agentd has reported the end of the process, so the answer says what is certain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_actors.head.commands import Answer, Refused, RequestReceived
from rlinf_actors.wire.client_messages import KillWorker, WorkerKilled

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class Kills:
    """The kills whose workers have not ended yet."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._waiting: dict[str, list[tuple[bytes, int]]] = {}  # by worker id

    def ask(self, event: RequestReceived, asked: KillWorker) -> WorkerKilled | None:
        """Kill a worker. The request is answered when the worker has ended, at once if it has ended already.

        Raises:
            Refused: there is no such worker in that group.
        """
        group = self._head.groups.get(asked.namespace, asked.group)
        worker = None if group is None else group.workers.get(asked.worker_id)
        if worker is None:
            name = f"worker {asked.worker_id!r} of group {asked.group!r} in job {asked.namespace!r}"
            raise Refused("not_found", f"{name} is not there (any more); it may have been started again")
        if worker.gone:
            return WorkerKilled(worker.exit)
        self._waiting.setdefault(worker.id, []).append((event.peer, event.id))
        self._head.groups.stop_workers([worker], 0.0, f"{asked.by} killed it: {asked.reason or 'no reason was given'}")
        return None

    def ended(self, worker_id: str) -> None:
        """Answer the requests that wait for the end of this worker."""
        waiting = self._waiting.pop(worker_id, ())
        group = self._head.groups.of_worker(worker_id) if waiting else None
        for peer, id in waiting:
            exit = None if group is None else group.workers[worker_id].exit
            self._head.emit(Answer(peer, id, WorkerKilled(exit)))

    def forget(self, peer: bytes) -> None:
        """Drop the requests of a connection that has ended."""
        if self._waiting:
            kept = {id: [one for one in some if one[0] != peer] for id, some in self._waiting.items()}
            self._waiting = {id: some for id, some in kept.items() if some}
