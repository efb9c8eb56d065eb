"""Control messages about keys: joining a cluster, and what the administrator asks. Secrets never ride in one."""

from __future__ import annotations

from typing import Literal, Union

from rlinf_actors.wire.bounds import Number
from rlinf_actors.wire.protocol import Message
from rlinf_actors.wire.values import Value

KeyRole = Literal["agent", "driver"]
"""What keys are listed for."""


class KeyState(Value, frozen=True):
    """One key that the head knows; times are in seconds since the epoch, by the head's clock.

    Attributes:
        public: 40 characters of Z85.
        role: what its holder is; for a join token, what its holder will be.
        name: of that node or driver.
        added_at: when it was listed.
        added_by: by whom.
        token: whether it is a join token's: all that it is good for is listing another.
        expires_at: when it ends by itself, None for never.
        ended_at: when it ended, None for one that is good.
        why: it ended.
    """

    public: str
    role: KeyRole
    name: str
    added_at: Number
    added_by: str
    token: bool = False
    expires_at: Union[Number, None] = None
    ended_at: Union[Number, None] = None
    why: str = ""


class Enroll(Message, frozen=True):
    """The one thing that the holder of a join token may say: list this key of mine. Answered by Enrolled, and the
    token is used up.
    """

    public: str


class RotateKey(Message, frozen=True):
    """An agent or driver has another key from now on. The one that it says this with stays good for `keep_s` seconds,
    for what runs with it. Answered by Enrolled.
    """

    public: str
    keep_s: Number = 0.0


class Enrolled(Message, frozen=True):
    """The key is listed. `warning`: it is, but a head that is restarted would not know."""

    role: KeyRole
    name: str
    warning: str = ""


class AddKey(Message, frozen=True):
    """List a key, or, with `token_s`, a join token for one that is made later, good for so many seconds. A name has
    one key: the token before it is void. `by` is who asks, for people. Answered by Keys, with that key.
    """

    public: str
    role: KeyRole
    name: str
    by: str
    token_s: Union[Number, None] = None


class RevokeKey(Message, frozen=True):
    """End all keys and tokens of a name, and the sessions that have come with them. `role` None: whatever it is.
    Answered by Keys, with those that ended.
    """

    name: str
    by: str
    role: Union[KeyRole, None] = None


class GetKeys(Message, frozen=True):
    """Answered by Keys."""


class Keys(Message, frozen=True):
    """`head` is the head's public key ("" for one without keys), `listens` its TCP endpoints, `at` its clock.
    `warning`: it is so, but a head that is restarted would not know.
    """

    keys: list[KeyState]
    head: str
    listens: list[str]
    at: Number
    warning: str = ""
