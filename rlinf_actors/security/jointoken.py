"""Join tokens: all that a machine needs to list its own key, once, as one word that can be copied."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.publickey import check_name, check_public

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
