"""The head's decisions: an event and the time in, commands out. No sockets, no clock, no loop.

What peers ask is answered in `head.handlers`, what they tell is taken in `head.handlers`; what the head knows is in
`head.cluster_state`. House rules: a Request gets exactly one answer, now or later; what is not expected of a peer is
counted and dropped, and a peer that is not known is asked to say hello.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_actors.head.cluster_state import ClusterState
from rlinf_actors.head.commands import (
    Command,
    ConnectionRejected,
    Event,
    HeadStalled,
    LogEvent,
    NoticeReceived,
    Notify,
    PeerUnreachable,
    Refusal,
    Refuse,
    RequestReceived,
    StoreStatus,
)
from rlinf_actors.head.handlers import NoticeHandlers, RequestHandlers
from rlinf_actors.head.records import Client, Node, NodeLife
from rlinf_actors.wire.agent_messages import Beat, Goodbye, LogCredit, LogLines
from rlinf_actors.wire.client_messages import Status


class Coordinator:
    """What a head decides.

    Args:
        tables: what it knows; changed by nobody else.

    Attributes:
        admit: whose key this is, see KeyRegistry.admit; any thread. Asked about every frame, so without a detour.
    """

    def __init__(self, tables: ClusterState) -> None:
        self.identity = tables.identity
        self._deadline: float | None = None
        self._tables = tables
        self._requests = RequestHandlers(tables)
        self._notices = NoticeHandlers(tables)
        self.admit = tables.keys.admit

    @property
    def unexpected(self) -> int:
        """How many notices did not fit what the head knows."""
        return self._notices.unexpected

    @property
    def refused(self) -> int:
        """How many messages and connections were refused."""
        return self._tables.refusals.count

    def started(self, endpoints: Sequence[str], wall: float) -> list[Command]:
        """The head listens at *endpoints*: the first event, and no line in its own log. *wall* as in `handle`."""
        tables = self._tables
        text = f"the head has started: rlinf-actors {self.identity.version}"
        tables.journal.add(LogEvent("head_started", text), wall)
        tables.begin(tables.now, wall)
        tables.listens = [endpoint for endpoint in endpoints if endpoint.startswith("tcp://")]
        if tables.settling.over:
            tables.jobs.settle()
        tables.keys.begin(wall)
        tables.keys.flush()
        return tables.out

    def handle(self, event: Event, now: float, wall: float = 0.0) -> list[Command]:
        """What to do about *event*, in order.

        Args:
            event: what happened.
            now: the observer's monotonic time, in seconds.
            wall: seconds since the epoch, for the event log alone.
        """
        tables = self._tables
        tables.begin(now, wall)
        if wall >= tables.keys.next_expiry():
            tables.expire_keys()
            self._deadline = None
        if not self._is_routine(event):
            self._deadline = None
        held = False
        if isinstance(event, (RequestReceived, NoticeReceived)):
            if self._passes(event) and self._has_room(event):
                held = tables.settling.holds(event)
                if not held:
                    self._said(event)
        elif isinstance(event, ConnectionRejected):
            self._turned_away(event)
        elif isinstance(event, StoreStatus):
            tables.trouble = [event.trouble] if event.trouble else []
        elif isinstance(event, PeerUnreachable):
            tables.nodes.unreachable(event.peer, now)
            tables.clients.unreachable(event.peer)
        elif isinstance(event, HeadStalled):
            tables.stalled(event.seconds)
        else:
            tables.tick()
        tables.look_settled()
        waiting = [] if held else tables.settling.take([event])
        while waiting:
            for one in waiting:
                if self._passes(one):  # once more: whose job it is may have come out meanwhile
                    self._said(one)
                else:
                    tables.dropped(one)
            waiting = tables.settling.take(waiting)  # what one says may be what another waits for
        tables.groups.restart_due(now)
        tables.journal.tick(now, wall)
        tables.groups.flush()
        tables.launches.tick(now)
        self._requests.answer_ending()
        tables.drains.flush()
        tables.journal.flush(wall)
        tables.underway.wait()
        return tables.out

    def _passes(self, event: RequestReceived | NoticeReceived) -> bool:
        """Whether a peer may say this; if not it is refused, and that is noted."""
        tables = self._tables
        try:
            if event.member.key and tables.keys.admit(event.member.key, tables.wall) is None:  # ended while it was held
                raise Refusal("authentication", tables.keys.why_not(event.member.key, tables.wall))
            tables.authority.check(event)
        except Refusal as error:
            self._refuse(event, error)
            return False
        return True

    def _has_room(self, event: RequestReceived | NoticeReceived) -> bool:
        """Whether a peer may have one more request wait; if not it is refused, and that is noted."""
        if not isinstance(event, RequestReceived):
            return True
        try:
            self._tables.underway.begin(event.peer, event.id, event.member)
        except Refusal as error:
            self._refuse(event, error)
            return False
        return True

    def _refuse(self, event: RequestReceived | NoticeReceived, error: Refusal) -> None:
        """A request that was not let in: its number may be that of another, which still waits."""
        tables = self._tables
        if isinstance(event, RequestReceived):
            text = f"{error.text}: {error.advice}" if error.advice else error.text
            tables.out.append(Refuse(event.peer, event.id, error.kind, text))
        tables.refusals.note(str(event.member), type(event.body).__name__, f"refused: {error.text}", tables.now)

    def _turned_away(self, event: ConnectionRejected) -> None:
        tables = self._tables
        why = event.why or tables.keys.why_not(event.public, tables.wall)
        text = f"refused a connection from {event.address or 'somebody'}: {why}"
        kind = event.why or (event.public if tables.keys.knows(event.public) else "")  # else: anybody makes new keys
        tables.refusals.note(event.address, f"connection {kind}", text, tables.now, event.times)
        if self._deadline is not None:
            self._deadline = min(self._deadline, tables.refusals.next_deadline())

    def _said(self, event: RequestReceived | NoticeReceived) -> None:
        """A peer said something, now or when it was too early to answer."""
        self._tables.speaker = event.member
        if isinstance(event, NoticeReceived):
            self._notices.take(event)
        else:
            self._requests.answer(event)

    def next_deadline(self) -> float:
        """When a tick is due, infinity for never; may be too early: a beat, or a stranger, costs no look at all."""
        if self._deadline is None:
            self._deadline = self._tables.next_deadline()
        return self._deadline

    def _is_routine(self, event: Event) -> bool:
        """Whether an event can only put deadlines off, or says itself which one it brings: a beat of somebody who is
        well, a stranger who was turned away.
        """
        if isinstance(event, ConnectionRejected):
            return True
        if not isinstance(event, NoticeReceived) or not isinstance(event.body, (Beat, LogLines, LogCredit)):
            return False
        node = self._tables.nodes.of_peer(event.peer)
        return node is None or node.life is NodeLife.READY

    def status(self, now: float) -> Status:
        """Everything, for people."""
        return self._tables.status(now)

    def farewell(self, reason: str) -> list[Command]:
        """The head ends on purpose, and the cluster with it: tell the clients."""
        return [Notify(client.peer, Goodbye(reason)) for client in self._tables.clients.alive()]

    def restarting(self, reason: str) -> list[Command]:
        """The head ends and is expected back: tell agents and clients that nothing of theirs ends."""
        sessions: list[Node | Client] = [*self._tables.nodes.alive(), *self._tables.clients.alive()]
        goodbye = Goodbye(reason, restarting=True)
        return [Notify(session.peer, goodbye) for session in sessions]
