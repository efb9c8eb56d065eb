"""How fast clusters of tests beat, and how long tests wait for what must come: one place, so that a slow machine may
have it slower (``pytest --slowness 3``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

slowness = 1.0
"""Of this machine. conftest sets it before any test module is imported."""
rounds = 1
"""How many times as many examples and schedules the random tests run. conftest sets it likewise."""

PATIENCE_S = 60.0
"""For what must come: it costs nothing where that comes, and a machine may be ten times slower than ours."""
LIVE_TIMEOUT_S = 120.0
"""A live test that takes longer hangs. They take up to some seconds on a quiet machine."""
CLEANUP_S = 120.0
"""How long the fixtures of a test that hangs may take to clean up, before the whole run ends with all its stacks."""


def timers(**seconds: float) -> dict[str, dict[str, float]]:
    """``[timers]`` of agentd.toml, for the *options* of a LocalCluster."""
    return {"timers": {name: value * slowness for name, value in seconds.items()}}


def slowness_now() -> float:
    """How many times longer than its own work a process of the kind of an emergency stop takes now: the control."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", "import zmq, msgspec, argparse, json"])
    _, code, used = os.wait4(process.pid, 0)
    took = time.monotonic() - began
    process.returncode = code
    return max(1.0, took / (used.ru_utime + used.ru_stime))


def settled(look: Callable[[], T]) -> T:
    """What another process holds, once two looks in a row are equal: libzmq closes on threads of its own, silently."""
    deadline = time.monotonic() + PATIENCE_S
    before: T | None = None
    now = look()
    while now != before and time.monotonic() < deadline:
        time.sleep(0.2)
        before, now = now, look()
    return now


def again_like(look: Callable[[], T], before: T) -> T:
    """The same, once it is as *before*; where that does not come, what it is instead."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := look()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return now
