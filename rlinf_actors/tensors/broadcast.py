"""Broadcast: one object from one member to all; see `ring` for who they are and how the bytes go.

A source that cannot send, because its object cannot be pickled, says so in its turn, and the others
raise; so the turns of all members stay in step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tensors import contents, members
from rlinf_actors.tensors.cargo import Arriving, Hold
from rlinf_actors.tensors.directory import named
from rlinf_actors.tensors.mailbox import Arrived
from rlinf_actors.tensors.messenger import Messenger
from rlinf_actors.tensors.options import CollectiveGroupOptions
from rlinf_actors.tensors.receive import Body, Received, Slot
from rlinf_actors.tensors.ring import Ring, Turn


class Broadcaster:
    """The broadcasts of one worker. Any thread.

    Args:
        messenger: carries them.
        me: this worker's address.
    """

    def __init__(self, messenger: Messenger, me: WorkerAddress) -> None:
        self._messenger = messenger
        self._me = me
        self._lock = threading.Lock()
        self._rings: dict[tuple[WorkerAddress, ...], Ring] = {}
        messenger.peer_gone = self._gone

    def broadcast(
        self,
        value: Any,
        groups: Any,
        src: Any,
        problem: Exception | None = None,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork[Any]:
        """Take part in a broadcast; see Worker.broadcast.

        Args:
            value, groups, src: as there.
            problem: raised once this member has done its part for the others: the source tells them, another
                member passes on.
            options: how tensors travel that go by a collective library.

        Raises:
            ValueError, TypeError, UsageError: the members are not named well: nobody hears of it.
            Exception: *problem*; or, at the source, what keeps its object from being sent. The others raise too.
        """
        everyone = members.addresses(groups)
        order = tuple(members.in_order(everyone, members.source(src, everyone)))
        if self._me not in order:
            raise ValueError(f"{self._me} is not a member of the broadcast: {', '.join(map(str, order))}")
        error: BaseException | None = problem
        turn: Turn
        if order[0] != self._me:
            turn = Receiving(order, options)
        else:
            parts: list[Buffer] = []
            large = False
            hold = self._messenger.freight.hold()
            try:
                if problem is not None:
                    raise problem
                contents.check_contiguous(value)
                parts, large = contents.encode(value, None, hold)
                hold.seal()
            except BaseException as failed:  # noqa: BLE001 - raised below: the others must not wait for ever
                error = failed
                hold.clear()
                parts, large = contents.encode_failure(failed)
            turn = Sending(value, parts, large, hold, options)
        turn.work._seen = error is not None  # nobody will look at it
        self._ring(order).start(turn)
        if error is not None:
            raise error
        return turn.work

    def _ring(self, order: tuple[WorkerAddress, ...]) -> Ring:
        with self._lock:
            ring = self._rings.get(order)
            if ring is not None:
                return ring
            ring = self._rings[order] = Ring(self._messenger, self._me, order, self._ended)
        ring.find()
        return ring

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            rings = list(self._rings.values())
        for ring in rings:
            ring.gone(peer)

    def _ended(self, ring: Ring) -> None:
        with self._lock:
            if self._rings.get(ring.order) is ring:
                del self._rings[ring.order]


class Sending(Turn):
    """At the source; ends with its own object when its children have it."""

    def __init__(
        self,
        value: Any,
        parts: Sequence[Buffer],
        large: bool,
        hold: Hold,
        options: CollectiveGroupOptions | None,
    ) -> None:
        self.work = AsyncWork("broadcast()")
        self._hold = hold
        self._options = options
        self._value = value
        self._parts = parts
        self._large = large

    def begin(self, ring: Ring) -> None:
        """Send to the children."""
        done = lambda: self.work.resolve(self._value)  # noqa: E731
        ring.forward(self._parts, self._large, done, self._hold, self._options)


class Receiving(Turn):
    """At another member: receive, pass on as it came, end when the children have it."""

    def __init__(self, order: tuple[WorkerAddress, ...], options: CollectiveGroupOptions | None) -> None:
        self.options = options
        self.source = order[0]
        self.work = _Passed(self, f"broadcast() from {order[0]}")
        self.ring: Ring | None = None

    def begin(self, ring: Ring) -> None:
        """Wait for the parent."""
        self.ring = ring
        self.slot = Slot(ring.key, self.work)  # type: ignore[arg-type]
        ring.post(self.slot)


class _Passed(Received):
    """The work of a member that passes on. It stays while its turn does: others depend on it."""

    def __init__(self, turn: Receiving, what: str) -> None:
        super().__init__(what, _Fixed())
        self._turn: Receiving | None = turn
        self._source = turn.source
        self._source_node = ""

    waits_for_cargo = False  # who passes on keeps the order, and waits for it elsewhere

    def take(self, message: Arrived) -> bool:
        """Pass on; the object is ours when the children have it, since both are the same memory."""
        assert self._turn is not None
        ring = self._turn.ring
        assert ring is not None
        ring.in_order(lambda: self._pass_on(ring, message), message.body.cargo is not None)
        return True

    def _pass_on(self, ring: Ring, message: Arrived) -> None:
        """In the order of the turns; not on the loop's thread if there is a cargo."""
        assert self._turn is not None
        options = self._turn.options
        cargo: Arriving | None = message.body.cargo
        hold, raw = Hold(), message.body.parts
        if cargo is not None:
            raw = cargo.parts
            try:
                cargo.wait()
                if ring.passes_on:
                    hold = cargo.hold()
            except Exception as error:  # noqa: BLE001 - it reaches this member's waiter, and the children's
                failed = error
                parts, large = contents.encode_failure(error)
                ring.forward(parts, large, lambda: self.reject(failed))
                return
        parts, large = contents.settled(raw)
        ring.forward(parts, large, lambda: self._passed(message, ring), hold, options)

    def _passed(self, message: Arrived, ring: Ring) -> None:
        self._message = message
        self._source_node = ring.source_node
        self._turn = None  # it has us: what we give would wait for the garbage collector, and be lent meanwhile
        self.resolve(None)

    def _read(self, body: Body) -> Any:
        error = contents.failure_in(body.parts, self._source, self._source_node)
        if error is not None:
            raise named(error, self._what)
        return super()._read(body)

    def _fall_asleep(self) -> None:
        pass  # cancelled or not, the others depend on it


class _Fixed:
    """The place of a member in a broadcast: it is not left."""

    def enter(self) -> None:
        raise AssertionError("a place that is not left is not entered again")

    def leave(self) -> None:
        raise AssertionError("a place in a broadcast is not left")

    def unread(self, message: Arrived) -> None:
        pass  # it was passed on; this member did not want it
