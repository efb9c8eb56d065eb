"""The key pair that the members of a job share: its workers, and its drivers on the links to them."""

from __future__ import annotations

import hashlib

from rlinf_actors.security.keypair import KeyPair

_PURPOSE = b"rlinf-actors job pair\0"


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
