"""Jobs: the token that proves membership, and the driver whose job it is. Pure.

A job is a namespace and the boundary of trust. Where drivers have keys a job belongs to the driver that opened it, by
the name of its key: another one joins with the job's token only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KEPT_OWNERS = 4096
"""Of jobs that have ended, for who asks how they did; the oldest are forgotten."""


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
        on_token: called with a namespace and its new token, None when the job is forgotten.
    """

    def __init__(
        self, new_token: Callable[[], str], on_token: Callable[[str, str | None], None] = lambda namespace, token: None
    ) -> None:
        self._new_token = new_token
        self._on_token = on_token
        self._jobs: dict[str, Job] = {}
        self._owners: dict[str, str] = {}

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._jobs

    def token(self, namespace: str) -> str:
        """The membership token of a job; made on first use."""
        job = self._jobs.get(namespace)
        return job.token if job is not None else self._put(namespace, self._new_token()).token

    def adopt(self, namespace: str, token: str, in_use: bool = True) -> None:
        """Running workers of a job prove membership with this token; it stays. Not *in_use*: they have ended, so that
        it counts only where the job has no other. A job that a driver with a key has opened keeps its own: an agent
        must not choose it.
        """
        job = self._jobs.get(namespace)
        if token and (job is None or (in_use and not job.owner)):
            self._put(namespace, token)

    def forget(self, namespace: str) -> None:
        """Nobody is left. Unknown ones are ignored."""
        if self._jobs.pop(namespace, None) is not None:
            self._on_token(namespace, None)

    # --- owners ---

    def has(self, namespace: str, token: str) -> bool:
        """Whether this is the token of that job."""
        job = self._jobs.get(namespace)
        return job is not None and job.token == token

    def denies(self, namespace: str, token: str) -> bool:
        """Whether a worker with this token is none of that job's, whatever its agent says: a driver with a key has
        opened the job, and the token is another.
        """
        job = self._jobs.get(namespace)
        return job is not None and job.owner != "" and job.token != token

    def may_open(self, namespace: str, driver: str, token: str) -> str:
        """Whether the driver with the key of this name may join; says why not, "" for yes."""
        job = self._jobs.get(namespace)
        if job is None or job.owner == driver or token == job.token:
            return ""
        return f"it is the job of driver {job.owner!r}" if job.owner else "it is another's job"

    def opened(self, namespace: str, driver: str) -> None:
        """A driver that may has joined; the first one owns the job."""
        job = self._jobs.get(namespace)
        if job is None or not job.owner:
            self._put(namespace, job.token if job is not None else self._new_token(), driver)
            self._owners.pop(namespace, None)
            self._owners[namespace] = driver
            if len(self._owners) > KEPT_OWNERS:
                ended = (name for name in self._owners if name not in self._jobs)
                self._owners.pop(next(ended, namespace))

    def owner_of(self, namespace: str) -> str:
        """The driver whose job it is, or was; "" if there was none with a key, or too long ago."""
        return self._owners.get(namespace, "")

    def _put(self, namespace: str, token: str, owner: str = "") -> Job:
        before = self._jobs.get(namespace)
        if before is None:
            self._owners.pop(namespace, None)  # of an earlier job of that name
        owner = owner or (before.owner if before is not None else "")
        self._jobs[namespace] = job = Job(namespace, token, owner)
        if before is None or before.token != token:
            self._on_token(namespace, token)
        return job
