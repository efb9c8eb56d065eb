"""Limit of moving an array: one copy between warm buffers."""

from __future__ import annotations

import numpy as np

from benchmarks.cases.echo_numpy import MIB, RUNS
from benchmarks.model import Figures
from benchmarks.timing import steady


def echo_numpy() -> Figures:
    figures = {}
    for size, runs in RUNS.items():
        source = np.ones(size * MIB, np.uint8)
        target = np.zeros_like(source)
        taken = steady(lambda source=source, target=target: np.copyto(target, source), 3 * runs)
        figures[f"memcpy_{size}"] = source.nbytes / taken / 1e9
    return figures
