"""What all control messages have in common: their base, and the version of the protocol."""

from __future__ import annotations

import msgspec

PROTOCOL = 5
"""Raised whenever two versions of the control messages (`wire.messages`), of values.py or of frames.py, would not
understand one another."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages; the tag is the class's name."""
