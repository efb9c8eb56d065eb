"""Jobs: their tokens and owners, and which driver may join which job. Pure.

A job is a namespace and a boundary of trust; its token proves membership. On a head with keys, a job belongs to the
driver key that opened it, and another driver needs the job's token to join. Such a head writes its jobs to disk. So
after a restart no other driver and no agentd can claim a job without its token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head import commands
from rlinf_actors.head.owners import drivers_clause
from rlinf_actors.head.slices import Sliced, pieces
from rlinf_actors.security.members import Member

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

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
        if self._keyed and before.events is not None:  # a driver may read the events of its ended jobs
            for past in before.events.events:
                if past.owner:
                    self._owners.pop(past.event.namespace, None)
                    self._owners[past.event.namespace] = past.owner
            for namespace in list(self._owners)[:-KEPT_OWNERS]:
                del self._owners[namespace]

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

    def settle(self) -> Sliced[None]:
        """Drop each job that the earlier head left if none of the job's members has come back in time."""
        self.settled = True
        for some, more in pieces([namespace for namespace in self._before if namespace not in self._jobs]):
            for namespace in some:
                if namespace not in self._jobs:
                    self.forget(namespace)
            if more:
                yield
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
        whose = f"the job of driver {owner!r}" if owner else "another's job"
        return f"it is {whose}{drivers_clause(self._head, namespace)}"

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
        job = self._jobs.get(namespace)
        return job.owner if job is not None and job.owner else self._owners.get(namespace, "")

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
