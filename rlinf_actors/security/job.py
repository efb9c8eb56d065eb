"""The key pair that all members of a job share, the gate of a worker's listening socket, and join tokens.

A join token is one line of text that an administrator copies to a new machine. The machine makes a key of its own, and
uses the token once to add that key to the head's list.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member, check_name, check_public, fingerprint

_PURPOSE = b"rlinf-actors job pair\0"
_NAME = b"rlinf-actors job name\0"


@functools.lru_cache(maxsize=8)  # a driver makes thousands of links with the same token
def job_pair(token: str) -> KeyPair:
    """Return the key pair that all members of a job share, derived from the job's *token*.

    Every process that has the token can compute the pair. A token has at least 128 random bits, so a plain hash is
    enough.

    Raises:
        ValueError: *token* is empty.
    """
    if not token:
        raise ValueError("a job without a token has no key pair")
    return KeyPair.of_secret(hashlib.sha256(_PURPOSE + token.encode()).digest())


def job_name(token: str) -> str:
    """Return a secret name for objects in torch's stores, derived from the job's *token*.

    torch's stores do not authenticate their clients, but a process without the token cannot guess the name.
    """
    return f"rlinf-actors-{hashlib.sha256(_NAME + token.encode()).hexdigest()[:32]}"


class JobGate:
    """Admits connections to a worker's listening socket: only those with the key of the worker's own job.

    Args:
        public: the public key of the job.
        namespace: the job's namespace.
        on_refused: called on the loop's thread with a description of rejected connections and their number.
    """

    def __init__(self, public: str, namespace: str, on_refused: Callable[[str, int], None]) -> None:
        self._public = public
        self._member = Member("worker", namespace, namespace, public)
        self._on_refused = on_refused

    def admit(self, public_key: str) -> Member | None:
        return self._member if public_key == self._public else None

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        where = f" from {address}" if address else ""
        why = why or f"key {fingerprint(public_key)} is not its job's"
        self._on_refused(f"a connection{where}: {why}", times)


PREFIX = "rlinf-join-"
PATH = "TOKEN"
"""Stands in errors where a file's path would: a join token comes from no file."""
ROLES = ("agent", "driver", "viewer")


class _Content(msgspec.Struct, frozen=True, array_like=True):
    address: str
    head: str
    public: str
    secret: str
    role: str
    name: str


@dataclass(frozen=True)
class JoinToken:
    """A join token: an administrator makes it at the head, and a new machine uses it once to join the cluster.

    Attributes:
        address: HOST:PORT of the head.
        head: the head's public key.
        pair: the key pair of the token. Its only use is to list the new machine's own key at the head before the token
            expires.
        role: "agent", "driver" or "viewer": the role of the new machine's own key.
        name: the name of that node, driver or viewer.
    """

    address: str
    head: str
    pair: KeyPair = field(repr=False)
    role: str
    name: str

    def text(self) -> str:
        """Return the join token as one word that people copy to the new machine. The word is a
        secret until it is used.
        """
        content = _Content(self.address, self.head, self.pair.public, self.pair.secret, self.role, self.name)
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode().rstrip("=")


def parse(text: str) -> JoinToken:
    """Return the join token that a user pasted as *text*.

    Raises:
        ConfigError: *text* is not a whole join token. The error does not quote the text, which is a secret.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        raise ConfigError(f"is no join token (those begin with {PREFIX}): copy the whole line again", path=PATH)
    packed = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        content = msgspec.msgpack.decode(data, type=_Content)
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError):
        raise ConfigError("is damaged or cut off: copy the whole line again", path=PATH) from None
    if content.role not in ROLES:
        raise ConfigError(f"is for a {content.role[:20]!r}: it comes from another version of rlinf-actors", path=PATH)
    check_name(content.name, PATH)
    check_public(content.head, PATH)
    pair = KeyPair.of_text(content.public, content.secret, PATH)
    return JoinToken(content.address, content.head, pair, content.role, content.name)
