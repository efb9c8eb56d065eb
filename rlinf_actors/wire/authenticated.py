"""The parts of a message whose sender is known to be a member of this process's job: all that `wire.payload` unpickles.

Made in four places, and a test holds that there is no fifth (tests/security/test_one_unpickler.py):

* `worker.server`: the peer's Join had the job's token, on a socket that only this user, or the job's key, can reach;
* `runtime.peer`: a worker's answer, on a link to the unix socket or the key that the head named as that worker's;
* `worker.membership`: what a worker gives to its child, over a unix socket of this user;
* `wire.failure`: what this very process has just pickled, read again to see whether that can be done.
"""

from __future__ import annotations

from rlinf_actors.model.buffers import Buffer


class AuthenticatedParts(list[Buffer]):
    """Parts that may be unpickled. Whoever makes one says by that: a member of this job sent it."""

    __slots__ = ()

    def cut(self, start: int, stop: int | None = None) -> AuthenticatedParts:
        """Some of the parts, in order: vouched for as all of them are."""
        return AuthenticatedParts(self[start:stop])
