"""Long work of the head in slices, so that beats and messages of other members are handled in between. Pure.

A handler whose work grows with a list in a message or with a table is a generator that yields after each PIECE of
elements. `start` runs it to its first yield; `step`, at each SliceDue event, runs one generator to its next one.
Generators take turns. A short list therefore is done at once, as before.

A generator holds keys until it ends: the connection that asked for the work, and the group or node that must not be
seen half done. A message that has one of these keys waits, and so do later messages with a key of that message. So the
messages of one member are handled in their order. Beats and emergency stops have no keys, so they never wait. The
connection is held back (HoldBack): the listener hands out no further messages of it, except beats and emergency stops.
So one message of a connection waits here, and the others undecoded in the listener, which bounds their bytes.

House rules for a generator: between two slices everything may have changed. So it looks up again what it has looked up
before, and what must be done together (granting robots) is done without a yield.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import TypeVar

import msgspec

from rlinf_actors.head.commands import Emit, HoldBack, LongMessage, Message
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.agent_messages import AgentHello, Beat
from rlinf_actors.wire.client_messages import EndGroup, EStop, KillWorker

PIECE = 100
"""Elements of a slice. One element takes 5 to 50 us, so a slice takes less than 5 ms."""

T = TypeVar("T")
Sliced = Generator[None, None, T]
"""Work in slices with a result."""


class _Work(msgspec.Struct, eq=False):
    generator: Generator[None, None, object]
    keys: tuple[Hashable, ...]
    speaker: Member


class _Held(msgspec.Struct, eq=False):
    event: Message | LongMessage
    keys: tuple[Hashable, ...]


class Slices:
    """Runs long work, and holds back the messages that must wait for its end.

    Attributes:
        worked_for: the public key of the member for which `step` has worked last, or the connection of a member without
            one; "" if the head worked for itself.
    """

    def __init__(self, emit: Emit = lambda command: None) -> None:
        self.worked_for: str | bytes = ""
        self._emit = emit
        self._works: dict[Member, deque[_Work]] = {}  # by speaker; the member whose turn it is comes first
        self._busy: set[bytes] = set()  # connections that are held back
        self._running: dict[Hashable, int] = {}  # number of generators by key
        self._queues: dict[Hashable, deque[_Held]] = {}  # the messages that wait, by key, in the order of arrival
        self._free: deque[Hashable] = deque()  # keys whose first message may be ready

    @property
    def idle(self) -> bool:
        """True if no message has to wait."""
        return not (self._running or self._queues)

    @property
    def pending(self) -> bool:
        """True if there is something to do at the next SliceDue."""
        return bool(self._works or self._free)

    def start(
        self, generator: Generator[None, None, object], keys: Sequence[Hashable] = (), speaker: Member = LOCAL
    ) -> None:
        """Run *generator* to its first yield, and the rest by `step`. It holds the *keys* until it ends.

        *speaker* is the member for which the work is done.
        """
        if _has_ended(generator):
            return  # most work is short
        work = _Work(generator, tuple(keys), speaker)
        for key in work.keys:
            self._running[key] = self._running.get(key, 0) + 1
        self._works.setdefault(speaker, deque()).append(work)
        self._hold_back(work.keys)

    def step(self, set_speaker: Callable[[Member], object] = lambda member: None) -> None:
        """Run the next slice of the member that has waited longest."""
        self.worked_for = ""
        if self._works:
            speaker, works = next(iter(self._works.items()))
            del self._works[speaker]
            if len(works) > 1:
                self._works[speaker] = works  # behind the other members
            work = works.popleft()
            set_speaker(speaker)
            self.worked_for = speaker.key or next((key for key in work.keys if isinstance(key, bytes)), "")
            self._run(work)

    def _run(self, work: _Work) -> None:
        ended = True
        try:
            ended = _has_ended(work.generator)
        finally:
            if ended:
                for key in work.keys:
                    self._running[key] -= 1
                    if not self._running[key]:
                        del self._running[key]
                        self._free.extend([key] if key in self._queues else [])
            else:
                self._works.setdefault(work.speaker, deque()).append(work)
            self._hold_back(work.keys)

    def _hold_back(self, keys: Sequence[Hashable]) -> None:
        """Have the listener hold back those of *keys* that are connections, or go on with them."""
        for key in keys:
            busy = key in self._running or key in self._queues
            if isinstance(key, bytes) and busy != (key in self._busy):
                (self._busy.add if busy else self._busy.discard)(key)
                self._emit(HoldBack(key, busy))

    def holds(self, event: Message | LongMessage, keys: tuple[Hashable, ...], first: bool = False) -> bool:
        """Hold back a message with these *keys* until the work is done that must come before it.

        Returns:
            False if it can be handled now.

        *first*: True to put it before the messages that wait already: it arrived before those of its connection.
        """
        if not any(key in self._running or key in self._queues for key in keys):
            return False
        self._wait(event, keys, first)
        return True

    def queue(self, event: Message, keys: tuple[Hashable, ...]) -> None:
        """Have `take` return a message soon: thousands of messages may have waited for one thing."""
        self._wait(event, keys)
        self._free.extend(keys)

    def _wait(self, event: Message | LongMessage, keys: tuple[Hashable, ...], first: bool = False) -> None:
        held = _Held(event, keys)
        for key in keys:
            queue = self._queues.setdefault(key, deque())
            (queue.appendleft if first else queue.append)(held)
        self._hold_back(keys)

    def take(self) -> Message | LongMessage | None:
        """Return a held message that can be handled now, None if there is none."""
        while self._free:
            queue = self._queues.get(self._free.popleft())
            if not queue:
                continue
            held = queue[0]
            if all(self._queues[key][0] is held and key not in self._running for key in held.keys):
                for key in held.keys:
                    self._queues[key].popleft()
                    if self._queues[key]:
                        self._free.append(key)
                    else:
                        del self._queues[key]
                self._hold_back(held.keys)
                return held.event
        return None

    def forget(self, peer: bytes) -> None:
        """Drop the held messages of a connection."""
        for held in list(self._queues.get(peer, ())):
            for key in held.keys:
                self._queues[key].remove(held)
                if not self._queues[key]:
                    del self._queues[key]
                self._free.append(key)
            self._hold_back(held.keys)


def _has_ended(generator: Generator[None, None, object]) -> bool:
    """Run *generator* to its next yield. Return True if it has none."""
    try:
        next(generator)
    except StopIteration:
        return True
    return False


def keys_of(event: Message, namespace: str | None) -> tuple[Hashable, ...]:
    """Return the keys of a message: its connection, and the group or node that it names.

    *namespace* is that of the sender's session, None without one. A message that names a group of another namespace is
    refused when its turn comes. It must not wait in the queue of that group, where it would delay the group's members.
    """
    body = event.body
    if isinstance(body, (Beat, EStop)):
        return ()
    if isinstance(body, AgentHello):
        return event.peer, node_key(body.node.node_id)
    group, of = getattr(body, "group", None), getattr(body, "namespace", "")
    if isinstance(group, str) and (
        of == namespace or isinstance(body, (EndGroup, KillWorker))
    ):  # Authority has checked these
        return event.peer, group_key(of, group)
    return (event.peer,)


def node_key(node_id: str) -> Hashable:
    return "node", node_id


def group_key(namespace: str, name: str) -> Hashable:
    return "group", namespace, name


def pieces(items: Sequence[T], size: int = PIECE) -> Iterator[tuple[Sequence[T], bool]]:
    """Yield *items* in pieces of *size*, each with True if more follow: the caller then yields between them."""
    return ((items[start : start + size], start + size < len(items)) for start in range(0, len(items), size))
