"""The JSON object of an event: for `rlinf-actors events --json`, and for the hooks of the head. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from rlinf_actors.wire.values import ClusterEvent


def event_dict(event: ClusterEvent) -> dict[str, Any]:
    """Return the JSON object of an event. Its keys are stable; new keys may be added."""
    shown: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    shown["exit"] = None if event.exit is None else msgspec.structs.asdict(event.exit)
    return shown
