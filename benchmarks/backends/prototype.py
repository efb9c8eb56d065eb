"""A prototype of our design, without errors, keys and other machines. On the command line: ``prototype``."""

from __future__ import annotations

import importlib

from benchmarks.model import Case, Figures

CASES = ("one_call", "in_flight", "fan_out", "transfers", "queues")


class Prototype:
    def measure(self, case: Case) -> Figures:
        return getattr(importlib.import_module("benchmarks.raw.prototype"), case.name)()


BACKEND = Prototype()
