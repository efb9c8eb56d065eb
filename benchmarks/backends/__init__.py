"""The backends: the project, the limits of the machine, and Ray."""

from __future__ import annotations

import importlib
from typing import cast

from benchmarks.model import Backend

BACKENDS = {
    "ours": "benchmarks.backends.ours",
    "zmq": "benchmarks.backends.limits",
    "ray": "benchmarks.backends.on_ray",
}


def load_backend(name: str) -> Backend:
    """The backend; imports what it needs."""
    return cast("Backend", importlib.import_module(BACKENDS[name]).BACKEND)
