"""Keys as `rlinf-actors keys` shows them: for programs, and as rows of a table."""

from __future__ import annotations

import time
from typing import Any

from rlinf_actors.cli.output import seconds
from rlinf_actors.security.publickey import fingerprint
from rlinf_actors.wire.keys import KeyState


def key_dict(key: KeyState) -> dict[str, Any]:
    """A key as `--json` shows it; keys are stable, new ones may be added. Times in seconds since the epoch."""
    return {
        "name": key.name,
        "role": key.role,
        "state": state_of(key),
        "token": key.token,
        "public": key.public,
        "added_at": key.added_at,
        "added_by": key.added_by,
        "expires_at": key.expires_at,
        "ended_at": key.ended_at,
        "why": key.why,
    }


def state_of(key: KeyState) -> str:
    """One word: good, token (a join token that was not used), retiring (replaced by another), or ended."""
    if key.ended_at is not None:
        return "ended"
    if key.token:
        return "token"
    return "good" if key.expires_at is None else "retiring"


def row_of(key: KeyState, at: float) -> tuple[str, ...]:
    """A key in the table; *at* is the head's time, in seconds since the epoch."""
    ends = "-" if key.expires_at is None else f"in {seconds(key.expires_at - at)}"
    if key.ended_at is not None:
        ends = f"{seconds(at - key.ended_at)} ago: {key.why}"
    listed = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.added_at))
    return key.name, key.role, state_of(key), fingerprint(key.public), listed, key.added_by, ends
