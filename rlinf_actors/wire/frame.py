"""Frame: base of the headers of all messages that processes of one job send directly to each other."""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the headers of all messages that processes of one job send directly to each other."""
