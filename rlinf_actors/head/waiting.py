"""Launches and lookups that wait, and the order in which they came. `head.launches` decides about them. Pure."""

from __future__ import annotations

import msgspec

from rlinf_actors.head.records import Index
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.wire.client_messages import FindGroup, Launch


class Waiting(msgspec.Struct, eq=False):
    """A launch or lookup that waits until `deadline`, in monotonic seconds. `client` identifies the sender."""

    client: str
    peer: bytes
    id: int
    asked: Launch | FindGroup
    deadline: float
    number: int
    robot: str = ""  # key of the robot that was in use at the last try
    why: str = ""  # the refusal of that try
    timer: HeapTimer | None = None
    trying: bool = False
    last: bool = False  # it is refused if it cannot be answered now


class WaitingQueue:
    """Waiting requests in the order of their arrival."""

    def __init__(self) -> None:
        self._all: dict[Waiting, None] = {}
        self._of_group: Index[Waiting] = Index()
        self._of_client: Index[Waiting] = Index()

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting in self._all

    def all(self) -> list[Waiting]:
        return list(self._all)

    def of_group(self, namespace: str, name: str) -> list[Waiting]:
        return self._of_group.of((namespace, name))

    def of_client(self, incarnation: str) -> list[Waiting]:
        return self._of_client.of(incarnation)

    def add(self, waiting: Waiting) -> None:
        self._all[waiting] = None
        self._of_group.add((waiting.asked.namespace, waiting.asked.group), waiting, waiting)
        self._of_client.add(waiting.client, waiting, waiting)

    def remove(self, waiting: Waiting) -> None:
        del self._all[waiting]
        self._of_group.discard((waiting.asked.namespace, waiting.asked.group), waiting)
        self._of_client.discard(waiting.client, waiting)
