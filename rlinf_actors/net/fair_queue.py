"""Decides whose message is handled next, so that one member's messages do not delay those of others. Pure.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels: first among members, then among the
connections of a member. The next message is that of the member that has used the least time. A member that was idle
starts level with the others, unless it used more than its share before. The caller measures the cost of each message
after it was handled, so a member with few expensive messages gets no more than one with many cheap ones. If no other
member has messages, a member gets all the time. The messages of one connection keep their order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar, Union

from rlinf_actors.errors import RemoteWireError

K = TypeVar("K", bound=Hashable)

Holder = Union[str, bytes]
"""A member: its public key, or the identity of a connection that needs no key."""
KEPT = 1024
"""Keys without messages whose used time a `Turns` remembers before it drops those that others have caught up with."""


class Turns(Generic[K]):
    """Keys that wait for their turns. The first is the one that has used the least time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._waiting: set[K] = set()  # the keys in `_heap`: each is there once
        self._used: dict[K, float] = {}  # of keys that do not wait
        self._owed: dict[K, float] = {}  # time used outside of turns, which the next turn pays for
        self._kept = KEPT
        self._now = 0.0  # time used by the key that had the last turn, before it
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def join(self, key: K) -> None:
        """Let a key wait for a turn. A key that waits already keeps its place."""
        if key not in self._waiting:
            self._waiting.add(key)
            heapq.heappush(self._heap, (max(self._used.pop(key, 0.0), self._now), next(self._numbers), key))

    def first(self) -> K:
        """Return the key whose turn it is. The caller ends its turn by `charge`."""
        used, _, key = self._heap[0]
        while self._owed and key in self._owed:
            heapq.heapreplace(self._heap, (used + self._owed.pop(key), next(self._numbers), key))
            used, _, key = self._heap[0]
        self._now = used
        return key

    def owe(self, key: K, cost: float) -> None:
        """Charge *cost* seconds to a key, whether it waits or not. Not between `first` and `charge`."""
        self._owed[key] = self._owed.get(key, 0.0) + cost
        if len(self._owed) > KEPT:
            del self._owed[next(iter(self._owed))]

    def charge(self, cost: float, again: bool) -> None:
        """End the turn of the first key, which has used *cost* seconds. The key waits for another turn if *again*."""
        used, _, key = self._heap[0]
        if again:
            heapq.heapreplace(self._heap, (used + cost, next(self._numbers), key))
            return
        heapq.heappop(self._heap)
        self._waiting.discard(key)
        self._used[key] = used + cost
        if len(self._used) > self._kept:
            self._used = {key: used for key, used in self._used.items() if used > self._now}
            self._kept = max(KEPT, 2 * len(self._used))  # so that a turn costs the same however many keys there are


class Chunk:
    """Messages of one connection that arrived together.

    Attributes:
        peer: identity of the connection.
        size: bytes that the chunk takes in memory.
        cost: seconds to charge for the chunk with its next message.
        next: the next message; None if all were taken.
        taken: bytes of the message that was taken last.
    """

    __slots__ = ("_rest", "cost", "next", "peer", "size", "taken")

    def __init__(self, peer: bytes, messages: Iterator[bytes | memoryview], size: int, cost: float = 0.0) -> None:
        self.peer = peer
        self.size = size
        self.cost = cost
        self.taken = 0
        self._rest = messages
        self.next = next(messages, None)

    def take(self) -> tuple[bytes, RemoteWireError | None]:
        """Return the next message, and the error if the bytes behind it are malformed."""
        message, error = bytes(self.next or b""), None
        self.taken = len(message)
        try:
            self.next = next(self._rest, None)
        except RemoteWireError as wrong:
            self.next, error = None, wrong
        return message, error


class _Member:
    """The chunks of one member, by connection."""

    __slots__ = ("held", "of_peer", "queues", "turns")

    def __init__(self) -> None:
        self.turns: Turns[bytes] = Turns()
        self.queues: dict[bytes, deque[Chunk]] = {}
        self.of_peer: dict[bytes, int] = {}  # bytes held, of the connections in `queues`
        self.held = 0


class FairQueue:
    """Chunks that wait to be handled, in fair order. Those of connections in *held_back* wait until `release`."""

    def __init__(self, held_back: Container[bytes] = ()) -> None:
        self._held_back = held_back
        self._skipped: dict[bytes, Holder] = {}  # connections with chunks that had no turn because they are held back
        self._at_work: dict[bytes, tuple[Holder, int]] = {}  # the bytes for which a connection is held back
        self._in_work: Counter[Holder] = Counter()  # the same by member
        self._members: dict[Holder, _Member] = {}  # those with chunks
        self._turns: Turns[Holder] = Turns()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def held(self, holder: Holder) -> int:
        """Return the number of bytes of a member that wait, or are at work for a connection that is held back."""
        member = self._members.get(holder)
        return self._in_work[holder] + (0 if member is None else member.held)

    def waits(self, holder: Holder, peer: bytes) -> bool:
        """Return True if chunks of the connection *peer* of a member wait."""
        member = self._members.get(holder)
        return member is not None and peer in member.queues

    def heavy(self, holder: Holder) -> list[bytes]:
        """Return the connections of a member of which more bytes wait than half of their equal share."""
        member = self._members.get(holder)
        if member is None:  # all its bytes are at work
            return []
        share = member.held / len(member.of_peer)
        return [peer for peer, held in member.of_peer.items() if held > share / 2]

    def put(self, holder: Holder, chunk: Chunk) -> None:
        """Add a chunk, which must have a next message."""
        member = self._members.get(holder)
        if member is None:
            member = self._members[holder] = _Member()
        peer = chunk.peer
        queue = member.queues.get(peer)
        if queue is None:
            queue = member.queues[peer] = deque()
            member.of_peer[peer] = 0
            self._join(holder, member, peer)
        queue.append(chunk)
        member.of_peer[peer] += chunk.size
        member.held += chunk.size

    def _join(self, holder: Holder, member: _Member, peer: bytes) -> None:
        member.turns.join(peer)
        self._turns.join(holder)

    def release(self, peer: bytes) -> None:
        """Let a connection take turns again that was held back."""
        if peer in self._at_work:
            worker, size = self._at_work.pop(peer)
            self._in_work.subtract({worker: size})
            if not self._in_work[worker]:
                del self._in_work[worker]
        holder = self._skipped.pop(peer, None)
        member = self._members.get(holder) if holder is not None else None
        if holder is not None and member is not None and peer in member.queues:
            self._join(holder, member, peer)

    def first(self) -> Chunk | None:
        """Return the chunk whose next message is to be handled, None if the queue is empty.

        The caller takes the message, handles it, and then calls `charge`.
        """
        while self._turns:
            holder = self._turns.first()
            member = self._members.get(holder)
            while member is not None and member.turns:
                peer = member.turns.first()
                queue = member.queues.get(peer)
                if queue is not None and peer not in self._held_back:
                    return queue[0]
                if queue is not None:
                    self._skipped[peer] = holder
                member.turns.charge(0.0, again=False)  # it was dropped, or is held back
            self._turns.charge(0.0, again=False)  # all its connections are held back, or it has no chunks any more
        return None

    def charge(self, chunk: Chunk, seconds: float) -> None:
        """Charge *seconds* for a message of *chunk*, which `first` has returned and which may have been dropped."""
        holder = self._turns.first()
        if chunk.peer in self._held_back and chunk.peer not in self._at_work:
            self._at_work[chunk.peer] = holder, chunk.taken
            self._in_work[holder] += chunk.taken
        member = self._members.get(holder)
        if member is not None:
            queue = member.queues.get(chunk.peer)
            if queue is not None and queue[0] is chunk and chunk.next is None:
                queue.popleft()
                member.held -= chunk.size
                member.of_peer[chunk.peer] -= chunk.size
                if not queue:
                    self._forget(member, chunk.peer)
            member.turns.charge(seconds, again=chunk.peer in member.queues)
            if not member.queues:
                del self._members[holder]
                member = None
        self._turns.charge(seconds, again=member is not None)

    def owe(self, holder: Holder, seconds: float) -> None:
        """Charge *seconds* to a member for work that was done for it outside of its turns."""
        self._turns.owe(holder, seconds)

    def drop(self, holder: Holder, peer: bytes) -> None:
        """Drop all chunks of the connection *peer* of a member."""
        member = self._members.get(holder)
        if member is not None and peer in member.queues:
            member.held -= member.of_peer[peer]
            self._forget(member, peer)
            if not member.queues:
                del self._members[holder]

    def _forget(self, member: _Member, peer: bytes) -> None:
        del member.queues[peer], member.of_peer[peer]
        self._skipped.pop(peer, None)
