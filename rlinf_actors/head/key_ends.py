"""The end of keys: sessions with keys that are no longer valid, and the jobs whose tokens their members know. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_actors.head.client_table import abandoned
from rlinf_actors.head.commands import Notify
from rlinf_actors.head.records import Client
from rlinf_actors.head.slices import PIECE, Sliced
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import StopWorkers
from rlinf_actors.wire.key_messages import KeyState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class KeyEnds:
    """Ends what depends on keys that are not valid any more, in slices."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head

    def begin(self, ended: Sequence[KeyState], why: str) -> None:
        """End all sessions with these keys, which are no longer valid; *why* is for people.

        If a member has no valid key left, its jobs end too, because the member knows their tokens and could still use
        them. Between two slices messages with these keys are refused.
        """
        self._head.slices.start(self._end_sessions(ended, why), speaker=self._head.speaker)

    def _end_sessions(self, ended: Sequence[KeyState], why: str) -> Sliced[None]:
        keys = {key.public for key in ended}
        reason = f"its key is not valid any more: {why}"
        self._head.log.forget_keys(keys)
        for node in [node for public in sorted(keys) for node in self._head.nodes.of_key(public)]:
            if self._head.nodes.get(node.id) is not node:
                continue
            running = [worker.id for _, workers in self._head.groups.on_node(node.id) for worker in workers]
            self._head.emit(Notify(node.peer, StopWorkers(running, self._head.timing.orphan_grace_s, reason)))
            self._head.early.forget(node.peer)
            self._head.nodes.revoked(node, reason)
            yield
        yield from self._end_clients(
            [one for public in sorted(keys) for one in self._head.clients.of_key(public)], reason
        )
        for key in ended:
            if not key.token and not self._head.keys.has(key):
                yield from self._end_jobs_known_to(key, why)
                yield

    def _end_clients(self, clients: Sequence[Client], reason: str) -> Sliced[None]:
        for number, client in enumerate(clients, 1):
            if self._head.clients.get(client.incarnation) is client:  # ending one client may have ended this one too
                self._head.emit(Notify(client.peer, abandoned(reason)))
                self._head.clients.gone(client, reason)
            if not number % PIECE:
                yield

    def _end_jobs_known_to(self, key: KeyState, why: str) -> Sliced[None]:
        member = Member(key.role, key.name, user=key.limits.user)
        if key.role == "driver":
            for namespace in self._head.jobs.of_driver(key.name):
                yield from self._end_job(namespace, f"the key of its driver is not valid any more: {why}")
        for node in self._head.nodes.of_member(member):
            for namespace in sorted(node.jobs):
                text = f"node {node.name} knows its token, and has no valid key any more: {why}"
                yield from self._end_job(namespace, text)

    def _end_job(self, namespace: str, reason: str) -> Sliced[None]:
        yield from self._end_clients(self._head.clients.of_job(namespace), reason)
        running = [group for group in self._head.groups.of_job(namespace) if not group.stopping]
        yield from self._head.group_slices.stop_groups(
            running, lambda group: self._head.groups.stop_group(group, reason)
        )
        self._head.jobs.forget(namespace)
