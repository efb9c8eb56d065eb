"""How many requests of one member wait for their answers. Pure.

What waits is looked at again and again, and kept: so nobody may have more of it than an honest process ever has.
"""

from __future__ import annotations

from collections import Counter

from rlinf_actors.head.commands import Refused
from rlinf_actors.security.members import Member

MAX_OF_ONE = 1024
"""By one key, or by one connection of a key that many share: the workers of a job have one."""
MAX_OF_JOB = 32768
"""By all workers of a job: more than one a worker of the largest."""


class Underway:
    """The requests that were let in and not answered yet; not those of local peers, who may do everything.

    The one at hand is counted by `wait` only, if it has no answer by then: most are answered at once.
    """

    def __init__(self) -> None:
        self._of_peer: dict[bytes, dict[int, list[str]]] = {}
        self._counts: Counter[bytes] = Counter()
        self._of_key: Counter[str] = Counter()
        self._at_hand: tuple[bytes, int, str] | None = None

    def begin(self, peer: bytes, id: int, member: Member) -> None:
        """A request comes, or comes again: its answer may have been lost, and it will have another.

        Raises:
            Refused: too many wait already.
        """
        if not member.key:
            return
        if self._of_peer:
            limit = MAX_OF_JOB if member.role == "worker" else MAX_OF_ONE
            if self._counts[peer] >= MAX_OF_ONE or self._of_key[member.key] >= limit:
                raise Refused("usage", f"too many requests of {member} wait for their answers already")
        self._at_hand = (peer, id, member.key)

    def wait(self) -> None:
        """The request at hand has no answer yet, if there is one at hand still."""
        if self._at_hand is not None:
            peer, id, key = self._at_hand
            self._at_hand = None
            self._of_peer.setdefault(peer, {}).setdefault(id, []).append(key)
            self._counts[peer] += 1
            self._of_key[key] += 1

    def done(self, peer: bytes, id: int) -> None:
        """It has its answer, or needs none. Unknown ones are ignored."""
        if self._at_hand is not None and self._at_hand[:2] == (peer, id):
            self._at_hand = None
            return
        waiting = self._of_peer.get(peer, {})
        if id not in waiting:
            return
        self._drop(peer, waiting[id].pop())
        if not waiting[id]:
            del waiting[id]
        if not waiting:
            del self._of_peer[peer]

    def forget(self, peer: bytes) -> None:
        """Whoever asked has ended."""
        if self._at_hand is not None and self._at_hand[0] == peer:
            self._at_hand = None
        for keys in self._of_peer.pop(peer, {}).values():
            for key in keys:
                self._drop(peer, key)

    def _drop(self, peer: bytes, key: str) -> None:
        self._counts[peer] -= 1
        self._of_key[key] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
        if not self._of_key[key]:
            del self._of_key[key]
