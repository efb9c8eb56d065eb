"""Launches that wait for their hardware, first come, first served, and looks at groups that wait for a launch. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlinf_actors.head.claims import ADVICE, IN_USE
from rlinf_actors.head.clients import ClientTable
from rlinf_actors.head.commands import Answer, Emit, Notify, Refuse, Refused
from rlinf_actors.head.records import Client
from rlinf_actors.wire.clients import FindGroup, Launch, Launched, StopGroup, Warn


@dataclass(frozen=True)
class _Waiting:
    client: str
    peer: bytes
    id: int
    asked: Launch
    deadline: float


class WaitingLaunches:
    """They are answered when they can start, when their time is over, or when they are withdrawn.

    Args:
        emit: takes commands.
        clients: who asked; the launch of one that has ended is dropped.
        launch: carries one out, or raises Refused.
        dropped: called with the peer and number of a request that will have no answer: it was asked again.
    """

    def __init__(
        self,
        emit: Emit,
        clients: ClientTable,
        launch: Callable[[Client, Launch, float], Launched],
        dropped: Callable[[bytes, int], None],
    ) -> None:
        self._emit = emit
        self._clients = clients
        self._launch = launch
        self._dropped = dropped
        self._waiting: list[_Waiting] = []

    def add(self, client: Client, peer: bytes, id: int, asked: Launch, why: str, patience_s: float, now: float) -> None:
        """Keep a launch for *patience_s* at most; its client is told *why* it waits."""
        for again in [w for w in self._waiting if (w.client, w.asked) == (client.incarnation, asked)]:
            self._waiting.remove(again)
            self._dropped(again.peer, again.id)
        self._waiting.append(_Waiting(client.incarnation, peer, id, asked, now + patience_s))
        text = f"group {asked.group!r} waits for its hardware, {patience_s:.3g} s at most: {why.removesuffix(ADVICE)}"
        self._emit(Notify(peer, Warn(text)))

    def tick(self, freed: bool, now: float) -> None:
        """Try all of them if something was *freed*, else those whose time is over."""
        for waiting in [w for w in self._waiting if freed or now >= w.deadline]:
            client = self._clients.get(waiting.client)
            try:
                if client is not None:
                    self._emit(Answer(waiting.peer, waiting.id, self._launch(client, waiting.asked, now)))
            except Refused as refused:
                if refused.kind == IN_USE and now < waiting.deadline:
                    continue
                self._emit(Refuse(waiting.peer, waiting.id, refused.kind, refused.text))
            self._waiting.remove(waiting)

    def withdraw(self, client: Client, stop: StopGroup) -> None:
        """The client shuts its group down before it could start."""
        for waiting in [w for w in self._waiting if w.client == client.incarnation and _concerns(stop, w.asked)]:
            self._waiting.remove(waiting)
            text = f"group {stop.group!r} was shut down while it waited for its hardware"
            self._emit(Refuse(waiting.peer, waiting.id, IN_USE, text))

    def refuse_all(self, text: str) -> None:
        """None of them will start any more."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._emit(Refuse(one.peer, one.id, "usage", text))

    def next_deadline(self) -> float:
        """When the next one's time is over, infinity for never."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)


@dataclass(frozen=True)
class _Find:
    client: str
    peer: bytes
    id: int
    asked: FindGroup
    deadline: float


class WaitingFinds:
    """Looks at groups whose launch is on the way; arguments as of WaitingLaunches, with *find* for *launch*."""

    def __init__(
        self,
        emit: Emit,
        clients: ClientTable,
        find: Callable[[Client, FindGroup], Launched],
        dropped: Callable[[bytes, int], None],
    ) -> None:
        self._emit = emit
        self._clients = clients
        self._find = find
        self._dropped = dropped
        self._waiting: list[_Find] = []

    def add(self, client: Client, peer: bytes, id: int, asked: FindGroup, now: float) -> None:
        """Keep a look for as long as it may wait."""
        for again in [w for w in self._waiting if (w.client, w.asked) == (client.incarnation, asked)]:
            self._waiting.remove(again)
            self._dropped(again.peer, again.id)
        self._waiting.append(_Find(client.incarnation, peer, id, asked, now + asked.wait_s))

    def launched(self, key: tuple[str, str]) -> None:
        """Answer those that wait for the group of this namespace and name."""
        self._answer([w for w in self._waiting if (w.asked.namespace, w.asked.group) == key], last=False)

    def tick(self, now: float) -> None:
        """Answer those whose time is over."""
        self._answer([w for w in self._waiting if now >= w.deadline], last=True)

    def next_deadline(self) -> float:
        """When the next one's time is over, infinity for never."""
        return min((waiting.deadline for waiting in self._waiting), default=math.inf)

    def _answer(self, due: list[_Find], last: bool) -> None:
        for one in due:
            client = self._clients.get(one.client)
            try:
                if client is not None:
                    self._emit(Answer(one.peer, one.id, self._find(client, one.asked)))
            except Refused as refused:
                if not last:
                    continue  # it is a namesake
                self._emit(Refuse(one.peer, one.id, refused.kind, refused.text))
            self._waiting.remove(one)


def _concerns(stop: StopGroup, asked: Launch) -> bool:
    """Whether it is this launch that is to stop, and not a namesake's."""
    same = not stop.workers or any(spec.id in stop.workers for spec in asked.workers)
    return stop.group == asked.group and same
