"""The processes of all agents of a simulation. One has as many agents as its descriptors allow."""

from __future__ import annotations

import resource
from collections.abc import Callable

from benchmarks.scale.roles import Answer, Role

AGENT_DESCRIPTORS = 5
"""An agent's connection: a TCP connection, an eventfd, and three for the monitor of its events."""
SPARE_DESCRIPTORS = 500
"""Descriptors that a process needs for everything else."""


class AgentProcesses:
    """The processes of *agents* agents.

    A driver has a connection to each of the *per_agent* workers of an agent, and the process of the agent answers.
    *start* starts a process for the agents from one number on; it is called with that number and how many they are.
    """

    def __init__(self, start: Callable[[int, int], Role], agents: int, per_agent: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._each = max(1, (most - SPARE_DESCRIPTORS) // (AGENT_DESCRIPTORS + per_agent))
        self._processes = [start(first, min(self._each, agents - first)) for first in range(0, agents, self._each)]

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self._processes)

    def ask_all(self, order: str, **given: object) -> list[Answer]:
        """Give all processes an order at one moment; return their answers."""
        for process in self._processes:
            process.give(order, **given)
        return [process.answer(order) for process in self._processes]

    def ask_of(self, order: str, node: int, **given: object) -> Answer:
        """Give an order to the process of one node's agent; return its answer."""
        return self._processes[node // self._each].ask(order, node=node, **given)

    def registrations(self, order: str, **given: object) -> Answer:
        """Let all agents register; return the seconds until the first, half of them and all of them have."""
        times = sorted(after for answer in self.ask_all(order, **given) for after in answer["times"])
        return {"first_s": times[0], "half_s": times[len(times) // 2], "all_s": times[-1]}

    def kill_workers(self, count: int, pause_s: float) -> dict[str, float]:
        """Report the ends of *count* workers one after the other. Return when, by worker id."""
        told: dict[str, float] = {}
        for left, process in zip(range(len(self._processes), 0, -1), self._processes, strict=True):
            told |= process.ask("kill_workers", count=(count - len(told)) // left, pause_s=pause_s)
        return told
