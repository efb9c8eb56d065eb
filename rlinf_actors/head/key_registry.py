"""Keys: which keys are valid, what each is limited to, and how keys are added and ended. Pure.

House rules of keys: an ended key stays in the list, so that a refusal can say why it ended; it never becomes valid
again. A request that changes keys is answered when the change is on disk. Times of keys are wall-clock times of the
head, so that they stay meaningful over restarts.

A member is a role and a name; for an agent whose key is limited to a user, the user too. So two users of one node have
two members, each with keys of its own.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from rlinf_actors.head import commands
from rlinf_actors.head.records import Index
from rlinf_actors.plurals import counted
from rlinf_actors.security.members import (
    LOCAL,
    NAME_RULE,
    USER_RULE,
    Member,
    fingerprint,
    is_key,
    is_name,
    is_user,
)
from rlinf_actors.wire.key_messages import AddKey, Enroll, KeyLimits, KeyState, RevokeKey, RotateKey

TOKEN_S = 900.0
"""Longest time in seconds for which a join token is valid."""
SET_BACK_S = 60.0
"""Seconds by which the clock may be set back without ending join tokens; larger than the steps of a running NTP."""
RETIRING_S = 86400.0
"""Longest time in seconds for which a replaced key stays valid, for the processes that still run with it."""
DAY_S = 86400.0
WARNINGS_S = (14 * DAY_S, 7 * DAY_S, 3 * DAY_S, DAY_S)
"""Times before a key expires at which the head writes a warning to the event log, in seconds."""
NO_KEYS = (
    "this head has no key pair, and so it lists no keys: run `rlinf-actors keys init` on its machine and start it again"
)


class OwnKeys(msgspec.Struct, frozen=True):
    """The keys that a head finds on its machine when it starts.

    Attributes:
        public: the head's own public key, "" for a head without keys.
        driver: public key of the driver on the head's machine, "" without a driver's key.
        driver_name: name of that driver.
        local: on a head without keys, the public key by which processes of the head's own user prove that they are
            local (security.keyfile.key); else "".
        nodes: names of the nodes of an `rlinf-actors run`, by public key.
    """

    public: str = ""
    driver: str = ""
    driver_name: str = ""
    local: str = ""
    nodes: Mapping[str, str] = msgspec.field(default_factory=dict)


NO_OWN_KEYS = OwnKeys()


class KeyRegistry:
    """The list of all keys and join tokens. Times are the head's wall clock, in seconds since the epoch.

    Args:
        emit: called with each command that a change causes, such as a Persist command.
        before: the persistent state that the earlier head left.
        own: the head's own keys.
        on_ended: called with the keys that have ended and the reason, to end the sessions of their members.
    """

    def __init__(
        self,
        emit: commands.Emit,
        before: commands.Snapshot,
        own: OwnKeys,
        on_ended: Callable[[Sequence[KeyState], str], None],
    ) -> None:
        self._emit = emit
        self._on_ended = on_ended
        self._keys = {key.public: key for key in before.keys}
        self._jobs: dict[str, str] = {}
        # Other threads read it: they look up single keys, and each change of an entry is atomic.
        self._members: dict[str, Member] = {}
        self._good: Index[KeyState] = Index()  # keys and join tokens that have not ended, by member
        self._drivers: dict[str, KeyState] = {}  # the newest key of each driver, also if it has ended
        self._changes: list[commands.Change] = []
        self._next = math.inf
        self._warned: dict[str, float] = {}  # by key: the last of WARNINGS_S that was written
        self.own = own
        for key in before.keys:
            self._note(key)
        if own.public:
            self._members[own.public] = Member("head", "head", "", own.public)
        if own.local:
            self._members[own.local] = LOCAL

    # --- looking ---

    def admit(self, public: str, wall: float) -> Member | None:
        """Return the member that has this public key; None if the key is not valid. May be called on any thread."""
        member = self._members.get(public)
        if member is not None and (wall >= self._next or member.role == "enroll"):
            key = self._keys.get(public)
            if key is not None and _is_over(key, wall):
                return None  # `tick` ends the sessions
        return member

    def has(self, key: KeyState) -> bool:
        """Return True if the member whose key this is has a valid key; join tokens do not count."""
        return any(not other.token for other in self._of(key.role, key.name, key.limits.user))

    def end_of(self, public: str) -> float | None:
        """Return when the key ends by itself, in seconds since the epoch; None for never, or for an unknown key."""
        key = self._keys.get(public)
        return None if key is None or math.isinf(ends_at(key)) else ends_at(key)

    def limits_of(self, public: str) -> KeyLimits:
        """Return what the key is limited to; no limits for a key that the list does not have."""
        key = self._keys.get(public)
        return key.limits if key is not None else KeyLimits()

    def driver_limits(self, name: str) -> KeyLimits:
        """Return what the newest key of this driver is limited to; no limits for a driver without a listed key."""
        key = self._drivers.get(name)
        return key.limits if key is not None else KeyLimits()

    def knows(self, public: str) -> bool:
        return public in self._keys

    def why_not(self, public: str, wall: float) -> str:
        """Return a clause for people that says why this key is not admitted."""
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
        return f"{what} is valid"

    def all(self) -> list[KeyState]:
        """Return every key and join token, the valid ones first."""
        return sorted(self._keys.values(), key=lambda key: (key.ended_at is not None, key.role, key.name, key.added_at))

    # --- coming ---

    def begin(self, wall: float) -> None:
        """Add the keys of a run's nodes, and the key of the driver on the head's machine, if the list lacks them.

        Called when the head starts.
        """
        own = self.own
        for public, name in own.nodes.items():
            self._put(KeyState(public, "agent", name, wall, "rlinf-actors run"))
        if own.driver and own.driver not in self._keys:
            self._end(self._of("driver", own.driver_name, ""), "the head's machine has another driver key", wall)
            self._put(KeyState(own.driver, "driver", own.driver_name, wall, "the head's machine"))
            self._emit(
                commands.LogEvent("key_added", f"the key of this machine's driver {own.driver_name!r} is listed")
            )

    def add(self, asked: AddKey, who: str, wall: float) -> KeyState:
        """Add a key or a join token at the request of *who* (text for people), and return it."""
        if not self.own.public:
            raise commands.Refused("usage", NO_KEYS)
        if not is_name(asked.name):
            raise commands.Refused("usage", f"{asked.name[:100]!r} is no name: {NAME_RULE}")
        self._check_new(asked.public)
        limits = asked.limits
        if limits.user and not is_user(limits.user):
            raise commands.Refused("usage", f"{limits.user[:100]!r} is no user: {USER_RULE}")
        _check_driver_limits(asked.role, limits)
        if asked.valid_s is not None:
            limits = replace(limits, until=wall + asked.valid_s)
        same = self._of(asked.role, asked.name, limits.user)
        if asked.replaces and asked.role == "driver":
            before = self.driver_limits(asked.name) if any(not key.token for key in same) else KeyLimits()
            limits = replace(limits, nodes=limits.nodes or before.nodes, groups=limits.groups or before.groups)
        if not asked.replaces:
            self._check_free(same)
        token = asked.token_s is not None
        self._end((key for key in same if key.token), f"{who} asked for a newer one", wall)
        expires = None if asked.token_s is None else wall + min(max(asked.token_s, 0.0), TOKEN_S)
        key = KeyState(
            asked.public, asked.role, asked.name, wall, who, token, expires, limits=limits, replaces=asked.replaces
        )
        if not token:
            self._retire(same, key, wall)
        self._put(key)
        self._emit(commands.LogEvent("key_added", f"{who} listed {_called(key)}"))
        return key

    def enroll(self, member: Member, asked: Enroll, wall: float) -> KeyState:
        """Add the key of a member that has connected with a join token; return the new key. The join token ends."""
        token = self._keys.get(member.key)
        if token is None or not token.token or self.admit(member.key, wall) is None:
            raise commands.Refused(
                "authentication", "a key is listed by a join token alone: `rlinf-actors keys enroll NODE`"
            )
        self._check_new(asked.public)
        by = f"join token {fingerprint(token.public)} of {token.added_by}"
        limits = _joined(token, asked)
        same = self._of(token.role, token.name, limits.user)
        if not token.replaces:
            self._check_free(same)
        key = KeyState(asked.public, token.role, token.name, wall, by, limits=limits)
        self._retire(same, key, wall)
        self._put(key)
        self._end([token], f"it was used for key {fingerprint(key.public)}", wall)
        self._emit(commands.LogEvent("key_enrolled", f"{_called(key)} is listed, by {by}"))
        return key

    def rotate(self, member: Member, asked: RotateKey, wall: float) -> KeyState:
        """Replace a member's key by the key in the request, and return the new key.

        The old key stays valid for the requested `keep_s` seconds, at most RETIRING_S.
        """
        old = self._keys.get(member.key)
        if old is None or old.token:
            raise commands.Refused("usage", f"{member} has no key in the head's list, and so none to change")
        if old.expires_at is not None:
            raise commands.Refused("usage", f"{_called(old)} was replaced already: this machine has an old key file")
        self._check_new(asked.public)
        by = f"rotation of {fingerprint(old.public)}"
        key = KeyState(asked.public, old.role, old.name, wall, by, limits=old.limits)
        why = f"key {fingerprint(key.public)} has replaced it"
        same = self._of(old.role, old.name, old.limits.user)
        self._end([other for other in same if other is not old], why, wall)
        self._put(key)
        keep_s = min(asked.keep_s, RETIRING_S)
        self._emit(commands.LogEvent("key_rotated", f"{_called(key)} replaces {fingerprint(old.public)}"))
        if keep_s > 0:
            self._put(replace(old, expires_at=wall + keep_s))
        else:
            self._end([old], why, wall)
        return key

    # --- ending ---

    def revoke(self, asked: RevokeKey, who: str, wall: float) -> list[KeyState]:
        """End all valid keys and join tokens of the requested name, and return them.

        Raises:
            Refused: no valid key or join token has that name.
        """
        good = [key for key in self._keys.values() if key.ended_at is None]
        hit = [key for key in good if key.name == asked.name and asked.role in (None, key.role)]
        if asked.user is not None:
            hit = [key for key in hit if key.limits.user == asked.user]
        if not hit:
            near = difflib.get_close_matches(asked.name, sorted({key.name for key in good}), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise commands.Refused("not_found", f"no key or join token of {asked.name!r} is good{hint}")
        return self._end(hit, f"{who} revoked it", wall)

    def tick(self, wall: float) -> None:
        """End the keys and join tokens whose time is over, and warn of the keys that expire soon."""
        if wall < self._next:
            return
        good = [key for key in self._keys.values() if key.ended_at is None]
        self._end([key for key in good if ends_at(key) <= wall], "its time was over", wall)
        for key in good:
            left = ends_at(key) - wall
            due = [before for before in _warnings(key) if 0 < left <= before]
            if due and min(due) < self._warned.get(key.public, math.inf):
                self._warned[key.public] = min(due)
                self._emit(commands.LogEvent("key_ended", f"{_called(key)} expires in {_days(left)}: {_renewal(key)}"))
        self._warned = {public: at for public, at in self._warned.items() if self._keys[public].ended_at is None}
        self._next = min((self._due(key) for key in self._keys.values() if key.ended_at is None), default=math.inf)

    def next_expiry(self) -> float:
        return self._next

    def flush(self, then: commands.Answer | None = None, instead: commands.Answer | None = None) -> None:
        """Write the changes of the list of keys to disk, then send *then*; if that fails for now, send *instead*."""
        changes, self._changes = self._changes, []
        for change in changes[:-1]:
            self._emit(commands.Persist(change))
        if changes:
            self._emit(commands.Persist(changes[-1], then, instead))
        elif then is not None:
            self._emit(then)

    # --- jobs ---

    def add_job(self, namespace: str, public: str) -> None:
        """Let the workers of a job connect with this public key, which replaces the job's previous key."""
        self.forget_job(namespace)
        self._jobs[namespace] = public
        self._members[public] = Member("worker", namespace, namespace, public)

    def forget_job(self, namespace: str) -> None:
        public = self._jobs.pop(namespace, None)
        if public is not None and self._members.get(public) == Member("worker", namespace, namespace, public):
            del self._members[public]

    # --- inside ---

    def _check_new(self, public: str) -> None:
        if not is_key(public):
            raise commands.Refused("usage", f"{public[:60]!r} is no public key")
        if public in self._keys or public == self.own.public or public in self._jobs.values():
            raise commands.Refused("usage", f"key {fingerprint(public)} is known already: make a new one")

    def _check_free(self, same: Sequence[KeyState]) -> None:
        """Raise Refused if one of these keys of a member is no join token."""
        taken = next((key for key in same if not key.token), None)
        if taken is None:
            return
        user = f" --user {taken.limits.user}" if taken.limits.user else ""
        raise commands.Refused(
            "usage",
            f"{_member(taken)} has a key already: end that by `rlinf-actors keys revoke {taken.name}{user}`, replace "
            "it by `rlinf-actors keys enroll --replace`, or have its machine change it by `rlinf-actors keys rotate`",
        )

    def _retire(self, same: Sequence[KeyState], by: KeyState, wall: float) -> None:
        """Let a member's other keys expire after a day, because the key *by* replaces them."""
        for old in same:
            if not old.token and old.expires_at is None:
                self._put(replace(old, expires_at=wall + RETIRING_S))
                self._emit(commands.LogEvent("key_rotated", f"{_called(by)} replaces {fingerprint(old.public)}"))

    def _of(self, role: str, name: str, user: str) -> list[KeyState]:
        """Return the keys and join tokens of a member that have not ended."""
        return self._good.of((role, name, user))

    def _put(self, key: KeyState) -> None:
        self._keys[key.public] = key
        self._changes.append(key)
        self._note(key)

    def _note(self, key: KeyState) -> None:
        """Enter a new or changed key into the tables by which keys are found."""
        member = key.role, key.name, key.limits.user
        if key.ended_at is None:
            role = "enroll" if key.token else key.role
            self._members[key.public] = Member(role, key.name, "", key.public, key.limits.user)
            self._good.add(member, key.public, key)
            self._next = min(self._next, self._due(key))
        else:
            self._members.pop(key.public, None)
            self._good.discard(member, key.public)
        if key.role == "driver" and not key.token:
            newest = self._drivers.get(key.name, key)
            if newest.public == key.public or newest.added_at <= key.added_at:
                self._drivers[key.name] = key

    def _end(self, keys: Iterable[KeyState], why: str, wall: float) -> list[KeyState]:
        ended = [replace(key, ended_at=wall, why=why) for key in keys]
        for key in ended:
            self._put(key)
            self._emit(commands.LogEvent("key_ended", f"{_called(key)} is not valid any more: {why}"))
        if ended:
            self._trim()
            self._on_ended(ended, why)
        return ended

    def _trim(self) -> None:
        """If more than KEPT ended keys are listed, drop some: each time the oldest of the member that has most of them.

        So no member can push out the ended keys of another member.
        """
        gone = sorted((k for k in self._keys.values() if k.ended_at is not None), key=lambda k: k.ended_at or 0.0)
        of_member: dict[str, deque[KeyState]] = {}
        for key in gone:
            of_member.setdefault(_member(key), deque()).append(key)
        heap = [(-len(keys), number, keys) for number, keys in enumerate(of_member.values())]
        heapq.heapify(heap)
        for _ in range(len(gone) - commands.KEPT):
            _, number, keys = heap[0]
            key = keys.popleft()
            heapq.heapreplace(heap, (-len(keys), number, keys))
            del self._keys[key.public]
            if self._drivers.get(key.name) is key:
                del self._drivers[key.name]
            self._changes.append(commands.ForgetKey(key.public))

    def _due(self, key: KeyState) -> float:
        """Return when `tick` has something to do for a key."""
        warned = self._warned.get(key.public, math.inf)
        return ends_at(key) - max((before for before in _warnings(key) if before < warned), default=0.0)


def _is_over(key: KeyState, wall: float) -> bool:
    """Return True if a key or join token has expired.

    If the clock was set back, a join token may have much more time left than TOKEN_S. Such a token counts as expired. A
    replaced key stays valid in that case, because workers run with it.
    """
    ends = ends_at(key)
    return wall >= ends or (key.token and ends - wall > TOKEN_S + SET_BACK_S)


def ends_at(key: KeyState) -> float:
    """Return when a key or join token ends by itself, in seconds since the epoch; infinity for never."""
    times = (key.expires_at, key.limits.until)
    return min((time for time in times if time is not None), default=math.inf)


def _warnings(key: KeyState) -> Sequence[float]:
    """Return how long before the end of this key the head warns. A replaced key and a join token need no warning."""
    return WARNINGS_S if key.expires_at is None else ()


def _days(seconds: float) -> str:
    return counted(round(seconds / DAY_S), "day") if seconds >= 2 * DAY_S else counted(round(seconds / 3600), "hour")


def _renewal(key: KeyState) -> str:
    """Return the command that replaces a key before it expires."""
    more = f" --user {key.limits.user}" if key.limits.user else ""
    more += " --driver" if key.role == "driver" else ""
    return f"`rlinf-actors keys enroll {key.name}{more} --replace` makes its successor"


def _check_driver_limits(role: str, limits: KeyLimits) -> None:
    if role != "driver" and (limits.nodes or limits.groups):
        raise commands.Refused("usage", "nodes and groups are for the keys of drivers")
    wrong = next((group for group in limits.groups if not is_name(group) or group == "local"), None)
    if wrong is not None:
        raise commands.Refused("usage", f"{wrong[:100]!r} is no group of drivers: {NAME_RULE}, and none is 'local'")
    if "" in limits.nodes:
        raise commands.Refused("usage", "a pattern of nodes is empty")


def _joined(token: KeyState, asked: Enroll) -> KeyLimits:
    """Return the limits of the key that a join token lists. The token's own limits stand above those of *asked*."""
    limits, said = token.limits, {"user": asked.user, "node_id": asked.node_id}
    for name, value in said.items():
        fixed = getattr(limits, name)
        if fixed and value and fixed != value:
            what = "user" if name == "user" else "node id"
            raise commands.Refused(
                "usage", f"{_called(token)} is for {what} {fixed!r}, and this machine says that it is {value!r}"
            )
    if asked.user and not is_user(asked.user):
        raise commands.Refused("usage", f"{asked.user[:100]!r} is no user: {USER_RULE}")
    if token.role != "agent":
        return limits
    return replace(limits, user=limits.user or asked.user, node_id=limits.node_id or asked.node_id)


def _member(key: KeyState) -> str:
    return str(Member(key.role, key.name, user=key.limits.user))


def _called(key: KeyState) -> str:
    what = "the join token" if key.token else "the key"
    return f"{what} of {_member(key)} ({fingerprint(key.public)})"
