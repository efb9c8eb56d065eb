"""The grammar of the names of groups, channels, namespaces and nodes. Pure.

Driver and head refuse other names. Names are parts of paths (log files), of addresses (``group:rank``) and of lines on
terminals, so they have no spaces, slashes, colons or control characters, and no letters that look alike. Names of
keys and users have grammars of their own (security.members).
"""

from __future__ import annotations

import re

RULE = "a name has 1 to 128 letters (A-Z, a-z), digits, '_', '.', '@', '+' and '-', the first a letter, digit or '_'"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}")


def wrong_name(name: object, of: str) -> str:
    """Return why *name* cannot be the name of *of*, such as "a group", with the grammar; "" if it can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return ""
    shown = ascii(name)
    return f"{shown if len(shown) <= 100 else shown[:99] + '…'} cannot be {of}'s name: {RULE}"


def name_of_class(name: str) -> str:
    """Return the name of a class with underscores for the characters that names of groups cannot have."""
    return re.sub(r"[^A-Za-z0-9_.@+-]", "_", name)[:100]
