"""Whose frames a listener hands on: the key behind each is admitted, and an identity belongs to one member. Pure.

libzmq lets a new connection take over the routing id of an old one, whichever keys they have, and cannot end the
connection of one peer. So every frame is judged by the key that its connection proved.
"""

from __future__ import annotations

import collections
import logging

from rlinf_actors.security.members import LOCAL, Gate, Member

log = logging.getLogger(__name__)

KEPT = 65536
"""Identities whose keys are known, those heard of last: 15 MiB at most. Identities have a random part that others do
not know, so that nobody takes over one that was forgotten."""


def known_as(identity: bytes) -> str:
    """What others may read of an identity: not its secret part, which is all that keeps it from being taken over."""
    return identity.partition(b"#")[0].decode(errors="replace")


class Admission:
    """Judges the frames of one listener.

    Args:
        gate: knows the keys.
        kept: how many identities are remembered.

    Attributes:
        dropped: frames of keys that are not admitted any more.
        stolen: frames of members that used another's identity.
    """

    def __init__(self, gate: Gate, kept: int = KEPT) -> None:
        self._admit = gate.admit
        self._kept = kept
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self.dropped = 0
        self.stolen = 0

    def admits(self, peer: bytes, key: str) -> bool:
        """Whether a frame is handed on, now. Loop thread.

        Args:
            peer: the identity that it came from.
            key: that its connection proved to have; "" on a unix socket, which only this user can reach.
        """
        member = self._admit(key) if key else LOCAL
        if member is None:
            self.dropped += 1
            return False
        owner = self._owners.get(peer)
        if owner == key:
            self._owners.move_to_end(peer)
            return True
        if owner is not None and not self._same(owner, member):
            self.stolen += 1
            if self.stolen == 1 or self.stolen % 1000 == 0:
                whose = known_as(peer)
                log.error("%s uses %r, the identity of another (%d times by now): dropped", member, whose, self.stolen)
            return False
        self._owners[peer] = key
        if len(self._owners) > self._kept:
            self._owners.popitem(last=False)
        return True

    def member_of(self, peer: bytes) -> Member | None:
        """Who is behind an identity that was let in; None if its key is not admitted any more, or nobody came."""
        key = self._owners.get(peer)
        if key is None:
            return None
        return self._admit(key) if key else LOCAL

    def _same(self, key: str, member: Member) -> bool:
        """Whether whoever had *key* is that member, who has another one by now, or nobody any more."""
        owner = self._admit(key) if key else LOCAL
        return owner is None or owner.is_same(member)
