"""The raw limits of the machine: ZeroMQ, fork, memcpy and an empty interpreter. On the command line: ``zmq``."""

from __future__ import annotations

import importlib

from benchmarks.model import Case, Figures

# loaded one at a time: what one limit imports (numpy) would weigh on another's forks
LIMITS = {
    "import_time": "interpreter:import_time",
    "cluster_start": "interpreter:cluster_start",
    "first_call": "forks:first_call",
    "first_call_torch": "forks:first_call_torch",
    "idle_memory": "forks:idle_memory",
    "one_call": "messages:one_call",
    "in_flight": "messages:in_flight",
    "fan_out": "messages:fan_out",
    "echo_numpy": "memcpy:echo_numpy",
    "messages": "peers:messages",
    "transfers": "transfers:transfers",
    "transfers_lane": "transfers:transfers_lane",
    "transfers_tcp": "transfers:transfers_tcp",
    "broadcast": "queues:broadcast",
    "queues": "queues:queues",
    "worker_death": "deaths:worker",
    "driver_death": "deaths:driver",
}


class Limits:
    def measure(self, case: Case) -> Figures:
        module, _, function = LIMITS[case.name].partition(":")
        return getattr(importlib.import_module(f"benchmarks.raw.{module}"), function)()


BACKEND = Limits()
