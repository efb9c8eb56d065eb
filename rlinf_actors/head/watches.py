"""Which agents watch the processes of which clients, and what their word is worth. Pure.

House rule: no agent's word alone ends a client. The kernel closes the connections of a process before anybody can see
its end, so what an agent says is tried on the client's own connection: if that is closed the client has ended, else it
lives by its beats, whatever that agent says. Every agent of a client's host watches it, so that one which says nothing
hides no end from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlinf_actors.head.commands import Emit, Notify
from rlinf_actors.head.records import Client, Node
from rlinf_actors.wire.agents import Unwatch, Watch
from rlinf_actors.wire.session import Beat

PING = ""
"""The `incarnation` of a Beat that asks for nothing: whoever is not connected any more shows."""
FIRST_S = 0.05
"""When a connection is tried again after the first time: its end comes by another way than the agent's word, and may be
behind that. Twice as long before each further try.
"""
LAST_S = 1.0
"""No longer than this before a try; a connection that stands even then is a living process's."""


@dataclass
class _Doubt:
    client: Client
    at: float
    pause: float = FIRST_S


class Watches:
    """Asks agents to watch, and tries what they say.

    Args:
        emit: takes commands.
        on_dead: called with a client whose process has ended.
    """

    def __init__(self, emit: Emit, on_dead: Callable[[Client], None]) -> None:
        self._emit = emit
        self._on_dead = on_dead
        self._doubts: dict[bytes, _Doubt] = {}

    def ask(self, client: Client, nodes: Iterable[Node]) -> None:
        """Have the agents of the client's host among *nodes* watch it, those that do not yet."""
        for node in nodes:
            if client.pid_start and node.report.host == client.host and node.id not in client.watchers:
                client.watchers[node.id] = node.peer
                self._emit(Notify(node.peer, Watch(client.incarnation, client.pid, client.pid_start)))

    def forget(self, client: Client) -> None:
        """It has ended."""
        self._doubts.pop(client.peer, None)
        for peer in client.watchers.values():
            self._emit(Notify(peer, Unwatch(client.incarnation)))

    def moved(self, client: Client) -> None:
        """It said hello over another connection: it is there."""
        self._doubts.pop(client.peer, None)

    def said_gone(self, node: Node, client: Client, now: float) -> None:
        """The agent of *node* says that a client's process has ended. Ignored of one that was not asked."""
        if client.watchers.pop(node.id, None) is not None:
            client.last_seen = now  # it may have been silent as long as it was watched
            self._doubts[client.peer] = _Doubt(client, now)
            self.tick(now)

    def unreachable(self, peer: bytes) -> None:
        """Something was sent to a peer that is not connected."""
        doubt = self._doubts.pop(peer, None)
        if doubt is not None:
            self._on_dead(doubt.client)

    def tick(self, now: float) -> None:
        """Try the connections that are due."""
        for peer, doubt in [(peer, doubt) for peer, doubt in self._doubts.items() if now >= doubt.at]:
            self._emit(Notify(peer, Beat(PING)))
            doubt.at, doubt.pause = now + doubt.pause, 2 * doubt.pause
            if doubt.pause > 2 * LAST_S:
                del self._doubts[peer]

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((doubt.at for doubt in self._doubts.values()), default=math.inf)
