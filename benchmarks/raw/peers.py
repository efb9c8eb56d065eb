"""Limits of what two workers can say to each other: ZeroMQ's round trip, memcpy of an array."""

from __future__ import annotations

from benchmarks.model import Figures
from benchmarks.raw.memcpy import echo_numpy
from benchmarks.raw.messages import one_call


def messages() -> Figures:
    return {**one_call(), **echo_numpy()}
