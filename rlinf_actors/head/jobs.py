"""Jobs: the token that proves membership, and the driver whose job it is. Pure.

A job is a namespace and the boundary of trust. Where drivers have keys a job belongs to the driver that opened it, by
the name of its key: another one joins with the job's token only. There the head remembers its jobs when it is
restarted, so that nobody but who knows the token, or had opened it, can say what the job is: not a driver that comes
first, and not the agent of a node.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rlinf_actors.head.commands import Emit, ForgetJob, Keep, KnownJob, Remembered
from rlinf_actors.security.members import Member

KEPT_OWNERS = 4096
"""Of jobs that have ended, for who asks how they did; the oldest of who has most are forgotten."""


@dataclass(frozen=True)
class Job:
    """A namespace. Whoever knows `token` is a member; `owner` is the name of the driver's key, "" without one."""

    namespace: str
    token: str
    owner: str = ""


class Jobs:
    """All jobs.

    Args:
        new_token: makes a secret for a new job.
        emit: takes commands.
        before: what an earlier head at this place knew.
        keyed: whether this head has keys.
        on_token: called with a namespace and its new token, None when the job is forgotten.

    Attributes:
        settled: whether those who were there with an earlier head have come back, or never will.
    """

    def __init__(
        self,
        new_token: Callable[[], str],
        emit: Emit,
        before: Remembered,
        keyed: bool,
        on_token: Callable[[str, str | None], None],
    ) -> None:
        self._new_token = new_token
        self._emit = emit
        self._keyed = keyed
        self._on_token = on_token
        self._before = {job.namespace: job for job in before.jobs} if keyed else {}
        self.settled = False
        self._jobs: dict[str, Job] = {}
        self._owners: dict[str, str] = {}

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._jobs

    def token(self, namespace: str) -> str:
        """The membership token of a job; made on first use."""
        job = self._jobs.get(namespace)
        return job.token if job is not None else self._put(namespace, self._new_token()).token

    def adopt(self, namespace: str, token: str, in_use: bool = True, believed: bool = True) -> None:
        """A member of a job that this head does not know yet proves itself with this token; it stays.

        Args:
            namespace: of the job.
            token: what is said to be its token.
            in_use: whether workers run with it; those that have ended say nothing where the job has a token.
            believed: whether who says so may say it of a job that nobody here knows.
        """
        if not token or not self.vouches(namespace, token, believed):
            return
        if self._keyed and any(job.token == token for job in self._jobs.values() if job.namespace != namespace):
            return  # two jobs with one key would be one
        if namespace not in self._jobs or (in_use and not self._keyed):
            known = self._before.get(namespace)
            self._put(namespace, token, known.owner if known is not None else "")

    def vouches(self, namespace: str, token: str, believed: bool) -> bool:
        """Whether this can be the token of that job; without keys whoever says so is believed. Args as `adopt`."""
        job, known = self._jobs.get(namespace), self._before.get(namespace)
        if not self._keyed:
            return True
        if job is not None:
            return job.token == token
        if known is not None:
            return known.proof == _proof(token)
        return believed

    def forget(self, namespace: str) -> None:
        """Nobody is left. Unknown ones are ignored."""
        known = self._before.pop(namespace, None)
        job = self._jobs.pop(namespace, None)
        if job is not None:
            self._on_token(namespace, None)
        if self._keyed and (job is not None or known is not None):
            self._emit(Keep(ForgetJob(namespace)))

    def settle(self) -> None:
        """Whoever comes back has come back: jobs of an earlier head that nobody spoke of have ended."""
        self.settled = True
        for namespace in [namespace for namespace in self._before if namespace not in self._jobs]:
            self.forget(namespace)
        self._before.clear()

    # --- owners ---

    def may_open(self, namespace: str, driver: str, token: str) -> str:
        """Whether the driver with the key of this name may join; says why not, "" for yes."""
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
        """A driver that may has joined; the first one owns the job."""
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
        """The driver whose job it is, or was; "" if there was none with a key, or too long ago."""
        return self._owners.get(namespace, "")

    def whose(self, namespace: str) -> str:
        """In whose share a job is counted: its driver's, its own without one; "" if it is not there."""
        owner = self.owner_of(namespace)
        return str(Member("driver", owner)) if owner else namespace if namespace in self._jobs else ""

    def of_driver(self, driver: str) -> list[str]:
        """The namespaces of the jobs that belong to the driver with the key of this name."""
        found = [job.namespace for job in self._jobs.values() if job.owner == driver]
        return found + [job.namespace for job in self._before.values() if job.owner == driver]

    def _put(self, namespace: str, token: str, owner: str = "") -> Job:
        before = self._jobs.get(namespace)
        if before is None:
            self._owners.pop(namespace, None)  # of an earlier job of that name
        owner = owner or (before.owner if before is not None else "")
        if owner:
            self._owners[namespace] = owner
        self._jobs[namespace] = job = Job(namespace, token, owner)
        if before is None or before.token != token:
            self._on_token(namespace, token)
        if self._keyed and job != before:
            self._emit(Keep(KnownJob(namespace, _proof(token), owner)))
        return job


def _proof(token: str) -> str:
    """What tells a token from others, and does not give it away."""
    return hashlib.sha256(f"rlinf-actors job\0{token}".encode()).hexdigest()
