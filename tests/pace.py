"""How fast clusters of tests beat, and how long tests wait for what must come: one place, so that a slow machine may
have it slower (``pytest --slowness 3``).
"""

from __future__ import annotations

slowness = 1.0
"""Of this machine. conftest sets it before any test module is imported."""

PATIENCE_S = 60.0
"""For what must come: it costs nothing where that comes, and a machine may be ten times slower than ours."""
LIVE_TIMEOUT_S = 120.0
"""A live test that takes longer hangs. They take up to some seconds on a quiet machine."""


def timers(**seconds: float) -> dict[str, dict[str, float]]:
    """``[timers]`` of agentd.toml, for the *options* of a LocalCluster."""
    return {"timers": {name: value * slowness for name, value in seconds.items()}}
