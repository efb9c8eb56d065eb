"""Numbers of workers by state in lists of groups and jobs, and how many of them are unresponsive or in a breakpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rlinf_actors.wire.values import WorkerState


def counts_dict(workers: Iterable[WorkerState]) -> dict[str, Any]:
    """Return the keys of a JSON object of something that has workers: their number by state, and those that wait."""
    workers = list(workers)
    pulses = [worker.pulse for worker in workers if worker.pulse is not None]
    return {
        "workers": dict(Counter(worker.state for worker in workers)),
        "unresponsive": sum(bool(pulse.unresponsive) for pulse in pulses),
        "in_breakpoints": sum(bool(pulse.breakpoint) and not pulse.unresponsive for pulse in pulses),
    }


def counts_text(row: dict[str, Any]) -> str:
    """Return what `counts_dict` says, for people: "17 running (1 unresponsive, 2 in breakpoints), 1 gone"."""
    waiting = [f"{row['unresponsive']} unresponsive"] * bool(row["unresponsive"])
    if row["in_breakpoints"]:
        waiting.append(f"{row['in_breakpoints']} in {'a breakpoint' if row['in_breakpoints'] == 1 else 'breakpoints'}")
    more = f" ({', '.join(waiting)})" if waiting else ""
    states = row["workers"]
    last = "running" if "running" in states else next(reversed(states), "")
    return ", ".join(f"{count} {state}{more * (state == last)}" for state, count in states.items()) or "none"
