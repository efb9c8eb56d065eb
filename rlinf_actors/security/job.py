"""The key pair that the members of a job share, the gate of a worker's socket, and join tokens.

A join token is all that a machine needs to list its own key, once, as one word that can be copied.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member, check_name, check_public, fingerprint

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


PREFIX = "rlinf-join-"
PATH = "TOKEN"
"""Where a token was written, for errors."""
ROLES = ("agent", "driver")


class _Content(msgspec.Struct, frozen=True, array_like=True):
    address: str
    head: str
    public: str
    secret: str
    role: str
    name: str


@dataclass(frozen=True)
class JoinToken:
    """What a token says.

    Attributes:
        address: HOST:PORT of the head.
        head: the head's public key.
        pair: it serves to list another key, once and soon.
        role: agent or driver: what its holder will be.
        name: of that node or driver.
    """

    address: str
    head: str
    pair: KeyPair = field(repr=False)
    role: str
    name: str

    def text(self) -> str:
        """As people copy it. It is a secret until it is used."""
        content = _Content(self.address, self.head, self.pair.public, self.pair.secret, self.role, self.name)
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode().rstrip("=")


def parse(text: str) -> JoinToken:
    """What somebody pasted.

    Raises:
        ConfigError: it is no join token, or only a part of one. The message does not repeat it.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        raise ConfigError(f"is no join token (those begin with {PREFIX}): copy the whole line again", path=PATH)
    packed = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        content = msgspec.msgpack.decode(data, type=_Content)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise ConfigError("is damaged or cut off: copy the whole line again", path=PATH) from None
    if content.role not in ROLES:
        raise ConfigError(f"is for a {content.role[:20]!r}: it comes from another version of rlinf-actors", path=PATH)
    check_name(content.name, PATH)
    check_public(content.head, PATH)
    pair = KeyPair.of_text(content.public, content.secret, PATH)
    return JoinToken(content.address, content.head, pair, content.role, content.name)
