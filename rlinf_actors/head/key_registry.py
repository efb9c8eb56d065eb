"""The keys that a head knows: whose they are, how they come and how they end. Pure.

House rules: a key that has ended stays known, so that a refusal can say why; it is never good again. What is said to
be done is durable: every change is kept before it is answered. Times of keys are the head's wall clock: they count
over restarts.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rlinf_actors.head.commands import KEPT, Answer, Change, Emit, ForgetKey, Keep, Record, Refused, Remembered
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.security.public_key import NAME_RULE, fingerprint, is_key, is_name
from rlinf_actors.wire.client_messages import AddKey, Enroll, KeyState, RevokeKey, RotateKey

TOKEN_S = 900.0
"""How long a join token is good: 15 minutes."""
SET_BACK_S = 60.0
"""By how much a clock may be set back without that being taken for a mistake: NTP steps by less, once it runs."""
RETIRING_S = 86400.0
"""How long a key that was replaced stays good at most, for what runs with it."""
NO_KEYS = (
    "this head has no key pair, and so it lists no keys: run `rlinf-actors keys init` on its machine and start it again"
)


@dataclass(frozen=True)
class OwnKeys:
    """What a head finds beside itself when it starts.

    Attributes:
        public: its own public key, "" for a head without keys.
        driver: public key of the driver on its machine, "" without.
        driver_name: of that driver.
        local: public key of this user, where it is all that a head without keys has; see security.thisuser.
    """

    public: str = ""
    driver: str = ""
    driver_name: str = ""
    local: str = ""


NO_OWN_KEYS = OwnKeys()


class KeyRegistry:
    """All keys.

    Args:
        emit: takes commands.
        before: what an earlier head at this place knew.
        own: the head's own keys.
        on_ended: called with keys that are not good any more, and why: sessions with them end.
    """

    def __init__(
        self, emit: Emit, before: Remembered, own: OwnKeys, on_ended: Callable[[Sequence[KeyState], str], None]
    ) -> None:
        self._emit = emit
        self._on_ended = on_ended
        self._keys = {key.public: key for key in before.keys}
        self._jobs: dict[str, str] = {}
        self._members: dict[str, Member] = {}
        self._changes: list[Change] = []
        self._next = math.inf
        self.own = own
        self._index()

    # --- looking ---

    def admit(self, public: str, wall: float) -> Member | None:
        """Who has this key; None if it is not good. Any thread; *wall* in seconds since the epoch."""
        member = self._members.get(public)
        if member is not None and (wall >= self._next or member.role == "enroll"):
            key = self._keys.get(public)
            if key is not None and _is_over(key, wall):
                return None  # `tick` tells everybody
        return member

    def has(self, role: str, name: str) -> bool:
        """Whether a member has a key that is good."""
        return any(not key.token for key in self._of(role, name))

    def knows(self, public: str) -> bool:
        """Whether a key is, or was, in the list."""
        return public in self._keys

    def why_not(self, public: str, wall: float) -> str:
        """Why a key is not admitted, for people."""
        key = self._keys.get(public)
        if not public:
            return "it has no key"
        if key is None:
            return f"key {fingerprint(public)} is not listed"
        what = _called(key)
        if key.ended_at is not None:
            return f"{what} has ended {wall - key.ended_at:.0f} s ago: {key.why}"
        if _is_over(key, wall):
            return f"{what} has expired"
        return f"{what} is good"

    def all(self) -> list[KeyState]:
        """Every key, the ones that are good first."""
        return sorted(self._keys.values(), key=lambda key: (key.ended_at is not None, key.role, key.name, key.added_at))

    # --- coming ---

    def begin(self, wall: float) -> None:
        """The head starts: the driver beside it may come in, unless its key was revoked."""
        own = self.own
        if own.driver and own.driver not in self._keys:
            self._end(self._of("driver", own.driver_name), "the head's machine has another driver key", wall)
            self._put(KeyState(own.driver, "driver", own.driver_name, wall, "the head's machine"))
            self._emit(Record("key_added", f"the key of this machine's driver {own.driver_name!r} is listed"))

    def add(self, asked: AddKey, who: str, wall: float) -> KeyState:
        """List a key or a join token; *who* asks for it.

        Raises:
            Refused: the name or key cannot be, or the name has a key already.
        """
        if not self.own.public:
            raise Refused("usage", NO_KEYS)
        if not is_name(asked.name):
            raise Refused("usage", f"{asked.name[:100]!r} is no name: {NAME_RULE}")
        self._check_new(asked.public)
        same = self._of(asked.role, asked.name)
        if not all(key.token for key in same):
            raise Refused(
                "usage",
                f"{asked.role} {asked.name!r} has a key already: end that by `rlinf-actors keys revoke {asked.name}`, "
                "or have its machine change it by `rlinf-actors keys rotate`",
            )
        self._end(same, f"{who} asked for a newer one", wall)
        token = asked.token_s is not None
        expires = None if asked.token_s is None else wall + min(max(asked.token_s, 0.0), TOKEN_S)
        key = KeyState(asked.public, asked.role, asked.name, wall, who, token, expires)
        self._put(key)
        self._emit(Record("key_added", f"{who} listed {_called(key)}"))
        return key

    def enroll(self, member: Member, asked: Enroll, wall: float) -> KeyState:
        """Whoever holds a join token lists its own key.

        Raises:
            Refused: that is no new key, or the token is not good any more.
        """
        token = self._keys.get(member.key)
        if token is None or not token.token or self.admit(member.key, wall) is None:
            raise Refused("authentication", "a key is listed by a join token alone: `rlinf-actors keys enroll NODE`")
        self._check_new(asked.public)
        by = f"join token {fingerprint(token.public)} of {token.added_by}"
        key = KeyState(asked.public, token.role, token.name, wall, by)
        self._put(key)
        self._end([token], f"it was used for key {fingerprint(key.public)}", wall)
        self._emit(Record("key_enrolled", f"{_called(key)} is listed, by {by}"))
        return key

    def rotate(self, member: Member, asked: RotateKey, wall: float) -> KeyState:
        """A member has another key from now on.

        Raises:
            Refused: that is no new key, or the member has been given another one already.
        """
        old = self._keys.get(member.key)
        if old is None or old.token:
            raise Refused("usage", f"{member} has no key in the head's list, and so none to change")
        if old.expires_at is not None:
            raise Refused("usage", f"{_called(old)} was replaced already: this machine has an old key file")
        self._check_new(asked.public)
        key = KeyState(asked.public, old.role, old.name, wall, f"rotation of {fingerprint(old.public)}")
        why = f"key {fingerprint(key.public)} has replaced it"
        self._end([other for other in self._of(old.role, old.name) if other is not old], why, wall)
        self._put(key)
        keep_s = min(asked.keep_s, RETIRING_S)
        self._emit(Record("key_rotated", f"{_called(key)} replaces {fingerprint(old.public)}"))
        if keep_s > 0:
            self._put(replace(old, expires_at=wall + keep_s))
        else:
            self._end([old], why, wall)
        return key

    # --- ending ---

    def revoke(self, asked: RevokeKey, who: str, wall: float) -> list[KeyState]:
        """End everything of a name; returns what has ended.

        Raises:
            Refused: nothing has that name.
        """
        good = [key for key in self._keys.values() if key.ended_at is None]
        hit = [key for key in good if key.name == asked.name and asked.role in (None, key.role)]
        if not hit:
            near = difflib.get_close_matches(asked.name, sorted({key.name for key in good}), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise Refused("not_found", f"no key or join token of {asked.name!r} is good{hint}")
        return self._end(hit, f"{who} revoked it", wall)

    def tick(self, wall: float) -> None:
        """Time has passed: keys and tokens expire."""
        if wall >= self._next:
            due = [k for k in self._keys.values() if k.ended_at is None and (k.expires_at or math.inf) <= wall]
            self._end(due, "its time was over", wall)

    def next_expiry(self) -> float:
        """When `tick` has something to do, in seconds since the epoch; infinity for never."""
        return self._next

    def flush(self, then: Answer | None = None, instead: Answer | None = None) -> None:
        """Have what has changed kept, and then answer; *instead* if it cannot be kept now."""
        changes, self._changes = self._changes, []
        for change in changes[:-1]:
            self._emit(Keep(change))
        if changes:
            self._emit(Keep(changes[-1], then, instead))
        elif then is not None:
            self._emit(then)

    # --- jobs ---

    def add_job(self, namespace: str, public: str) -> None:
        """The members of a job have this key; the one before it is not good any more."""
        self.forget_job(namespace)
        self._jobs[namespace] = public
        self._index()

    def forget_job(self, namespace: str) -> None:
        """A job has ended. Unknown ones are ignored."""
        if self._jobs.pop(namespace, None) is not None:
            self._index()

    # --- inside ---

    def _check_new(self, public: str) -> None:
        if not is_key(public):
            raise Refused("usage", f"{public[:60]!r} is no public key")
        if public in self._keys or public == self.own.public or public in self._jobs.values():
            raise Refused("usage", f"key {fingerprint(public)} is known already: make a new one")

    def _of(self, role: str, name: str) -> list[KeyState]:
        """What is good of a member."""
        return [k for k in self._keys.values() if k.ended_at is None and (k.role, k.name) == (role, name)]

    def _put(self, key: KeyState) -> None:
        self._keys[key.public] = key
        self._changes.append(key)
        self._index()

    def _end(self, keys: Iterable[KeyState], why: str, wall: float) -> list[KeyState]:
        ended = [replace(key, ended_at=wall, why=why) for key in keys]
        for key in ended:
            self._put(key)
            self._emit(Record("key_ended", f"{_called(key)} is not good any more: {why}"))
        if ended:
            self._trim()
            self._on_ended(ended, why)
        return ended

    def _trim(self) -> None:
        """Forget ended keys, the oldest of the name that has most: nobody pushes out others' by changing its own."""
        gone = sorted((k for k in self._keys.values() if k.ended_at is not None), key=lambda k: k.ended_at or 0.0)
        counts = Counter((key.role, key.name) for key in gone)
        for _ in range(len(gone) - KEPT):
            most = max(counts.values())
            key = next(key for key in gone if counts[key.role, key.name] == most)
            gone.remove(key)
            counts[key.role, key.name] -= 1
            del self._keys[key.public]
            self._changes.append(ForgetKey(key.public))

    def _index(self) -> None:
        """What `admit` looks at, as of now; a new dict, so that other threads see the one or the other."""
        good = [key for key in self._keys.values() if key.ended_at is None]
        members = {k.public: Member("enroll" if k.token else k.role, k.name, "", k.public) for k in good}
        members.update({public: Member("worker", job, job, public) for job, public in self._jobs.items()})
        if self.own.public:
            members[self.own.public] = Member("head", "head", "", self.own.public)
        if self.own.local:
            members[self.own.local] = LOCAL
        self._next = min((k.expires_at for k in good if k.expires_at is not None), default=math.inf)
        self._members = members


def _is_over(key: KeyState, wall: float) -> bool:
    """Whether a key has expired; a join token also if it has more than it was given: the clock was set back since.

    Keys that were replaced go on then: workers run by them.
    """
    if key.expires_at is None:
        return False
    return wall >= key.expires_at or (key.token and key.expires_at - wall > TOKEN_S + SET_BACK_S)


def _called(key: KeyState) -> str:
    what = "the join token" if key.token else "the key"
    return f"{what} of {key.role} {key.name!r} ({fingerprint(key.public)})"
