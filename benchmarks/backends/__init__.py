"""The backends: this project, the raw limits of the machine, a prototype of our design, and Ray."""

from __future__ import annotations

import importlib
from typing import cast

from benchmarks.model import Backend

BACKENDS = {
    "ours": "benchmarks.backends.ours",
    "zmq": "benchmarks.backends.limits",
    "prototype": "benchmarks.backends.prototype",
    "ray": "benchmarks.backends.on_ray",
}


def load_backend(name: str) -> Backend:
    """Import and return a backend."""
    return cast("Backend", importlib.import_module(BACKENDS[name]).BACKEND)
