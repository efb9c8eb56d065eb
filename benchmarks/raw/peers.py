"""Limits of messages between two workers: a round trip of ZeroMQ, memcpy of an array."""

from __future__ import annotations

from benchmarks.model import Figures
from benchmarks.raw.memcpy import echo_numpy
from benchmarks.raw.messages import one_call


def messages() -> Figures:
    return {**one_call(), **echo_numpy()}
