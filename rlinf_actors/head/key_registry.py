"""Keys and jobs: which keys are valid, how keys are added and ended, and which members belong to which job. Pure.

House rules of keys: an ended key stays in the list, so that a refusal can say why it ended; it never becomes valid
again. A request that changes keys is answered when the change is on disk. Times of keys are wall-clock times of the
head, so that they stay meaningful over restarts.

A job is a namespace and a boundary of trust; its token proves membership. On a head with keys, a job belongs to the
driver key that opened it, and another driver needs the job's token to join. Such a head writes its jobs to disk. So
after a restart no other driver and no agentd can claim a job without its token.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head import commands
from rlinf_actors.security.members import LOCAL, NAME_RULE, Member, fingerprint, is_key, is_name
from rlinf_actors.wire.client_messages import AddKey, Enroll, KeyState, RevokeKey, RotateKey

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

TOKEN_S = 900.0
"""Longest time in seconds for which a join token is valid."""
SET_BACK_S = 60.0
"""Seconds by which the clock may be set back without ending join tokens; larger than the steps of a running NTP."""
RETIRING_S = 86400.0
"""Longest time in seconds for which a replaced key stays valid, for the processes that still run with it."""
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
    """

    public: str = ""
    driver: str = ""
    driver_name: str = ""
    local: str = ""


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
        self._members: dict[str, Member] = {}
        self._changes: list[commands.Change] = []
        self._next = math.inf
        self.own = own
        self._index()

    # --- looking ---

    def admit(self, public: str, wall: float) -> Member | None:
        """Return the member that has this public key; None if the key is not valid. May be called on any thread."""
        member = self._members.get(public)
        if member is not None and (wall >= self._next or member.role == "enroll"):
            key = self._keys.get(public)
            if key is not None and _is_over(key, wall):
                return None  # `tick` ends the sessions
        return member

    def has(self, role: str, name: str) -> bool:
        """True if the member with this role and name has a valid key; join tokens do not count."""
        return any(not key.token for key in self._of(role, name))

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
        """If the list lacks the key of the driver on the head's machine, add it. Called when the head starts."""
        own = self.own
        if own.driver and own.driver not in self._keys:
            self._end(self._of("driver", own.driver_name), "the head's machine has another driver key", wall)
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
        same = self._of(asked.role, asked.name)
        if not all(key.token for key in same):
            raise commands.Refused(
                "usage",
                f"{asked.role} {asked.name!r} has a key already: end that by `rlinf-actors keys revoke {asked.name}`, "
                "or have its machine change it by `rlinf-actors keys rotate`",
            )
        self._end(same, f"{who} asked for a newer one", wall)
        token = asked.token_s is not None
        expires = None if asked.token_s is None else wall + min(max(asked.token_s, 0.0), TOKEN_S)
        key = KeyState(asked.public, asked.role, asked.name, wall, who, token, expires)
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
        key = KeyState(asked.public, token.role, token.name, wall, by)
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
        key = KeyState(asked.public, old.role, old.name, wall, f"rotation of {fingerprint(old.public)}")
        why = f"key {fingerprint(key.public)} has replaced it"
        self._end([other for other in self._of(old.role, old.name) if other is not old], why, wall)
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
        if not hit:
            near = difflib.get_close_matches(asked.name, sorted({key.name for key in good}), 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise commands.Refused("not_found", f"no key or join token of {asked.name!r} is good{hint}")
        return self._end(hit, f"{who} revoked it", wall)

    def tick(self, wall: float) -> None:
        if wall >= self._next:
            due = [k for k in self._keys.values() if k.ended_at is None and (k.expires_at or math.inf) <= wall]
            self._end(due, "its time was over", wall)

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
        # one entry of the dict that other threads read: they look up single keys, and each change is atomic
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

    def _of(self, role: str, name: str) -> list[KeyState]:
        """Return the keys and join tokens of a member that have not ended."""
        return [k for k in self._keys.values() if k.ended_at is None and (k.role, k.name) == (role, name)]

    def _put(self, key: KeyState) -> None:
        self._keys[key.public] = key
        self._changes.append(key)
        self._index()

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
        counts = Counter((key.role, key.name) for key in gone)
        for _ in range(len(gone) - commands.KEPT):
            most = max(counts.values())
            key = next(key for key in gone if counts[key.role, key.name] == most)
            gone.remove(key)
            counts[key.role, key.name] -= 1
            del self._keys[key.public]
            self._changes.append(commands.ForgetKey(key.public))

    def _index(self) -> None:
        """Rebuild the dict that `admit` reads. It is replaced by a complete one, because other threads read it."""
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
    """Return True if a key or join token has expired.

    If the clock was set back, a join token may have much more time left than TOKEN_S. Such a token counts as expired. A
    replaced key stays valid in that case, because workers run with it.
    """
    if key.expires_at is None:
        return False
    return wall >= key.expires_at or (key.token and key.expires_at - wall > TOKEN_S + SET_BACK_S)


def _called(key: KeyState) -> str:
    what = "the join token" if key.token else "the key"
    return f"{what} of {key.role} {key.name!r} ({fingerprint(key.public)})"


KEPT_OWNERS = 4096
"""Largest number of jobs, ended ones included, whose driver the head remembers so that it may read their events.

Beyond this number the head forgets an ended job: the oldest of the driver that has the most ended jobs.
"""


class Job(msgspec.Struct, frozen=True):
    """A job. `token` proves membership; `owner` is the name of the driver key that opened the job, "" without a key."""

    namespace: str
    token: str
    owner: str = ""


class Jobs:
    """All jobs with their tokens and owners. Decides which drivers may join a job.

    Args:
        head: the coordinator.
        new_token: returns a secret for a new job.
        job_key: returns the public key of a job for the job's token.
        before: the persistent state that the earlier head left.

    Attributes:
        settled: True once the head no longer waits for members of an earlier head to come back.
    """

    def __init__(
        self, head: Coordinator, new_token: Callable[[], str], job_key: Callable[[str], str], before: commands.Snapshot
    ) -> None:
        self._head = head
        self._new_token = new_token
        self._job_key = job_key
        self._keyed = bool(head.keys.own.public)
        self._before = {job.namespace: job for job in before.jobs} if self._keyed else {}
        self.settled = False
        self._jobs: dict[str, Job] = {}
        self._of_token: dict[str, str] = {}  # namespaces
        self._owners: dict[str, str] = {}

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._jobs

    def token(self, namespace: str) -> str:
        """Return the token of a job. The first call for a namespace makes the job."""
        job = self._jobs.get(namespace)
        return job.token if job is not None else self._put(namespace, self._new_token()).token

    def adopt(self, namespace: str, token: str, in_use: bool = True, believed: bool = True) -> None:
        """If a job is from before this head started, use the token that a member reports as the job's token.

        A token that cannot be the job's is ignored.

        Args:
            namespace: the job's namespace.
            token: the token that the member reports.
            in_use: True if living workers run with the token. A token of ended workers does not replace a known token.
            believed: True to use the token also if this head has no record of the job by which to check it.
        """
        if not token or not self.vouches(namespace, token, believed):
            return
        if self._keyed and self._of_token.get(token, namespace) != namespace:
            return  # two jobs with one key would be one
        if namespace not in self._jobs or (in_use and not self._keyed):
            known = self._before.get(namespace)
            self._put(namespace, token, known.owner if known is not None else "")

    def vouches(self, namespace: str, token: str, believed: bool) -> bool:
        """Return True if *token* may be the token of the job *namespace*. A head without keys accepts every token.

        *believed* is returned for a job of which the head has no record, because it cannot check the token then.
        """
        job, known = self._jobs.get(namespace), self._before.get(namespace)
        if not self._keyed:
            return True
        if job is not None:
            return job.token == token
        if known is not None:
            return known.proof == _proof(token)
        return believed

    def forget(self, namespace: str) -> None:
        """Drop a job that has neither clients nor groups any more. An unknown job is ignored."""
        known = self._before.pop(namespace, None)
        job = self._jobs.pop(namespace, None)
        if job is not None:
            self._of_token.pop(job.token, None)
            self._head.keys.forget_job(namespace)
        if self._keyed and (job is not None or known is not None):
            self._head.emit(commands.Persist(commands.ForgetJob(namespace)))

    def settle(self) -> None:
        """Drop each job that the earlier head left if none of the job's members has come back in time."""
        self.settled = True
        for namespace in [namespace for namespace in self._before if namespace not in self._jobs]:
            self.forget(namespace)
        self._before.clear()

    # --- owners ---

    def may_open(self, namespace: str, driver: str, token: str) -> str:
        """Return why the driver whose key has the name *driver* may not join this job with *token*, "" if it may."""
        job, known = self._jobs.get(namespace), self._before.get(namespace)
        if job is not None:
            owner, member = job.owner, job.token == token
        elif known is not None:
            owner, member = known.owner, known.proof == _proof(token)
        else:
            return ""
        if owner == driver or member:
            return ""
        return f"it is the job of driver {owner!r}" if owner else "it is another's job"

    def opened(self, namespace: str, driver: str) -> None:
        """Record that a driver has joined a job. The first driver with a key becomes the job's owner."""
        job = self._jobs.get(namespace)
        if job is None or not job.owner:
            self._put(namespace, job.token if job is not None else self._new_token(), driver)
            self._owners.pop(namespace, None)
            self._owners[namespace] = driver
            if len(self._owners) > KEPT_OWNERS:
                ended = [name for name in self._owners if name not in self._jobs] or [namespace]
                counts = Counter(self._owners[name] for name in ended)
                self._owners.pop(max(ended, key=lambda name: counts[self._owners[name]]))  # the first of who has most

    def owner_of(self, namespace: str) -> str:
        """Return the name of the driver key that owns, or owned, this job; "" if none is known."""
        return self._owners.get(namespace, "")

    def whose(self, namespace: str) -> str:
        """Return the share of the event log in which the entries of a job count.

        The share is that of the driver that owns the job, else the job's own; "" if the job is unknown.
        """
        owner = self.owner_of(namespace)
        return str(Member("driver", owner)) if owner else namespace if namespace in self._jobs else ""

    def of_driver(self, driver: str) -> list[str]:
        found = [job.namespace for job in self._jobs.values() if job.owner == driver]
        return found + [job.namespace for job in self._before.values() if job.owner == driver]

    def _put(self, namespace: str, token: str, owner: str = "") -> Job:
        before = self._jobs.get(namespace)
        if before is None:
            self._owners.pop(namespace, None)  # drop the owner of an earlier job of this name
        owner = owner or (before.owner if before is not None else "")
        if owner:
            self._owners[namespace] = owner
        if before is not None:
            self._of_token.pop(before.token, None)
        self._jobs[namespace] = job = Job(namespace, token, owner)
        self._of_token[token] = namespace
        own = self._head.keys.own
        if (before is None or before.token != token) and (own.public or own.local):
            self._head.keys.add_job(namespace, self._job_key(token))
        if self._keyed and job != before:
            self._head.emit(commands.Persist(commands.KnownJob(namespace, _proof(token), owner)))
        return job


def _proof(token: str) -> str:
    """Return a hash of a token, which can be kept on disk without revealing the token."""
    return hashlib.sha256(f"rlinf-actors job\0{token}".encode()).hexdigest()
