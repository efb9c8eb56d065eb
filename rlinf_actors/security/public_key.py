"""Public keys and names of members as text. Pure."""

from __future__ import annotations

import functools
import re

from rlinf_actors.errors import ConfigError

KEY_CHARS = 40
"""A key of 32 bytes as Z85 text (ZeroMQ RFC 32)."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_', '@' and '-', the first a letter or digit"


def is_key(text: str) -> bool:
    """Whether a text can be a key, public or secret: not every five of these characters stand for four bytes."""
    if _Z85.fullmatch(text) is None:
        return False
    groups = (text[at : at + 5] for at in range(0, KEY_CHARS, 5))
    return all(functools.reduce(lambda sum, char: sum * 85 + _DIGITS.index(char), group, 0) < 2**32 for group in groups)


def is_name(text: str) -> bool:
    """Whether a member may have this name."""
    return _NAME.fullmatch(text) is not None


def check_public(public: str, path: str) -> None:
    """Refuse what is no public key; *path* says where it was written.

    Raises:
        ConfigError: it is no key.
    """
    if not is_key(public):
        raise ConfigError(f"is {public[:60]!r}; a public key has {KEY_CHARS} characters of Z85", path=path)


def check_name(name: str, path: str) -> None:
    """Refuse a name that no member may have; *path* says where it was written.

    Raises:
        ConfigError: it is none.
    """
    if not is_name(name):
        raise ConfigError(f"is {name[:100]!r}; {NAME_RULE}", path=path)


def fingerprint(public: str) -> str:
    """The start of a public key, by which people tell keys apart."""
    return public[:8]
