"""What decoding raises for bytes that are not what they should be. Pure."""

from __future__ import annotations

import msgspec

from rlinf_actors.errors import UsageError

MALFORMED = (
    msgspec.DecodeError,
    UnicodeDecodeError,  # text that is not UTF-8
    RecursionError,  # msgspec bounds the nesting by Python's limit
    UsageError,  # a value that checks itself, like model.restart.RestartPolicy
)
"""Each decoder turns these into RemoteWireError, and nothing else is raised by one."""
