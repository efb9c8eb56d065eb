"""What is asked about keys: members for themselves, the administrator for all. Pure.

Who may ask is decided before (head.authority): members change their own key, join tokens list one, and the rest is for
who sits at the head's machine: on its unix socket, or with its own key.
"""

from __future__ import annotations

from rlinf_actors.head.commands import Answer, Asked
from rlinf_actors.head.tables import Tables
from rlinf_actors.security.members import Member
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.keys import AddKey, Enroll, Enrolled, GetKeys, Keys, KeyState, RevokeKey, RotateKey

NOT_KEPT = (
    "the head could not write that down: one that is restarted will not know it. Its log and `rlinf-actors status` "
    "say why"
)


class KeyRequests:
    """Answers them.

    Args:
        tables: of the head.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def answer(self, event: Asked) -> Keys | None:
        """The answer, or None when it comes once what was changed is durable.

        Raises:
            Refused: it cannot be, and why.
        """
        tables, body = self._tables, event.body
        if isinstance(body, GetKeys):
            return self._keys(tables.keys.all())
        if isinstance(body, AddKey):
            self._done(event, [tables.keys.add(body, who(event.member, body.by), tables.wall)])
        elif isinstance(body, RevokeKey):
            self._done(event, tables.keys.revoke(body, who(event.member, body.by), tables.wall))
        elif isinstance(body, Enroll):
            self._enrolled(event, tables.keys.enroll(event.member, body, tables.wall))
        elif isinstance(body, RotateKey):
            self._enrolled(event, tables.keys.rotate(event.member, body, tables.wall))
        return None

    def _done(self, event: Asked, changed: list[KeyState]) -> None:
        self._tables.keys.flush(
            Answer(event.peer, event.id, self._keys(changed)),
            Answer(event.peer, event.id, self._keys(changed, NOT_KEPT)),
        )

    def _enrolled(self, event: Asked, key: KeyState) -> None:
        self._tables.keys.flush(
            Answer(event.peer, event.id, Enrolled(key.role, key.name)),
            Answer(event.peer, event.id, Enrolled(key.role, key.name, NOT_KEPT)),
        )

    def _keys(self, keys: list[KeyState], warning: str = "") -> Keys:
        own, listens = self._tables.keys.own.public, self._tables.listens
        return Keys(keys, own, listens, self._tables.wall, warning)


def who(member: Member, said: str) -> str:
    """Who asks, for people: what it says of itself, and what its key says."""
    said = printable(said)
    return said if member.role == "local" else f"{said} ({member})"
