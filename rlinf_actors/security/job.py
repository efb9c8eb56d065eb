"""The key pair that the members of a job share, its workers and its drivers on the links to them; and its gate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member
from rlinf_actors.security.publickey import fingerprint

_PURPOSE = b"rlinf-actors job pair\0"
_NAME = b"rlinf-actors job name\0"


def job_pair(token: str) -> KeyPair:
    """The pair of the job with this token.

    It is derived, so that it is made, handed to members, kept over restarts of the head and forgotten with the token:
    whoever has the one has the other. A token has 128 random bits at least, so a plain hash is enough.

    Raises:
        ValueError: there is no token.
    """
    if not token:
        raise ValueError("a job without a token has no key pair")
    return KeyPair.of_secret(hashlib.sha256(_PURPOSE + token.encode()).digest())


def job_name(token: str) -> str:
    """What the members of the job with this token call what torch lets anybody see: its stores ask nobody who he is."""
    return f"rlinf-actors-{hashlib.sha256(_NAME + token.encode()).hexdigest()[:32]}"


class JobGate:
    """At a worker's listening socket: lets in who has its job's pair, and nobody else.

    Args:
        public: the job's public key.
        namespace: of the job.
        on_refused: told whom it turns away, as what follows "refused" in a line for people, and how often. Loop thread.
    """

    def __init__(self, public: str, namespace: str, on_refused: Callable[[str, int], None]) -> None:
        self._public = public
        self._member = Member("worker", namespace, namespace, public)
        self._on_refused = on_refused

    def admit(self, public_key: str) -> Member | None:
        """See Gate."""
        return self._member if public_key == self._public else None

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        """See Gate."""
        where = f" from {address}" if address else ""
        why = why or f"key {fingerprint(public_key)} is not its job's"
        self._on_refused(f"a connection{where}: {why}", times)
