"""What the daemons of the year hold, and whether it stays the same once their bounds are reached.

All that the daemons keep of ended jobs has a bound: `unreached` says which of them a run has not reached yet. After
that the jobs and faults go on, and `Sizes` compares what was held in two quarters of that time.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from year_site import AGENTD, DRIVERS, HEAD, LOG_TOTAL, WORKERS, Machine, Site, size

from agentd import node_state, worker_table
from rlinf_actors.head import audit, commands, event_log, jobs

MIB = 1 << 20
JOBS = max(commands.KEPT, jobs.KEPT_OWNERS, node_state.PROCESSES_KEPT, worker_table.EXITS_KEPT) + event_log.JOBS
"""After so many jobs the head has forgotten the first, and so has agentd."""
MORE: Mapping[str, tuple[float, str]] = {
    "memory": (2.0, "MiB"),
    "largest template": (1.0, "MiB"),
    "templates": (0, ""),
    "descriptors": (6, ""),
    "threads": (2, ""),
    "logs": (1.5, "MiB"),
    "state": (1.0, "MiB"),
    "audit log": (1.0, "MiB"),
    "run directories": (0.1, "MiB"),
    "shared memory": (0.0, "MiB"),
}
"""By how much the largest size of the last quarter may exceed that of the second one, and the unit.

memory: the texts of 10,000 events differ in length, and malloc places them anew. A leak of 1 KiB for each job exceeds
it in ten minutes. descriptors: connections of drivers that have just ended, and of commands. threads: those of
asyncio's executor, which start with the load. logs: workers that live when the limit is applied keep theirs. state:
SQLite writes pages to its log until a checkpoint. audit log: after its share each member may write a line in 5 s.
"""


def unreached(site: Site, ran: int) -> list[str]:
    """Return the bounds that *site* has not reached after so many jobs."""
    found = [f"{JOBS} jobs: {ran}"] if ran < JOBS else []
    if not site.dropped_events():
        found.append(f"{event_log.KEPT_EVENTS} events: none was dropped")
    lines = (site.one.root / "var/lib/rlinf-head/audit/accepted.jsonl").read_text().splitlines()
    written = Counter(json.loads(line)["member"] for line in lines)
    for driver in DRIVERS:
        if (count := written[f"driver {driver!r}"]) < audit.SHARE:
            found.append(f"{audit.SHARE} lines of {driver} in the audit log: {count}")
    found += [f"{LOG_TOTAL} bytes of logs of {one.name}" for one in site.machines if not one.logs_were_full]
    return found


class Sizes:
    """What daemons, templates and disks hold, at several times."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._taken: list[tuple[float, dict[str, float]]] = []

    def take(self, at: float) -> None:
        """Measure at the time *at*, a part of the whole from 0 to 1."""
        self._taken.append((at, _held(self._site)))

    def compared(self) -> dict[str, tuple[float, float]]:
        """Return the largest size of everything in the second quarter, and in the last."""
        second, last = ([sizes for at, sizes in self._taken if begin <= at < begin + 0.25] for begin in (0.25, 0.75))
        assert second, "no size was taken in the second quarter"
        assert last, "no size was taken in the last quarter"
        return {name: (max(one[name] for one in second), max(one[name] for one in last)) for name in second[0]}

    def grown(self) -> list[str]:
        """Return what has grown by more than MORE."""
        return [
            f"{name}: {before:.1f} {_unit(name)} in the second quarter, {after:.1f} in the last"
            for name, (before, after) in self.compared().items()
            if after - before > MORE[_what(name)][0]
        ]

    def told(self) -> dict[str, str]:
        """Return both sizes of everything, for people."""
        return {
            name: f"{before:.4g} {_unit(name)} in the second quarter, {after:.4g} in the last".replace("  ", " ")
            for name, (before, after) in self.compared().items()
        }


def _what(name: str) -> str:
    return name.partition(" of ")[0]


def _unit(name: str) -> str:
    return MORE[_what(name)][1]


def _held(site: Site) -> dict[str, float]:
    held = _process(site.one, HEAD)
    for machine in site.machines:
        held |= _process(machine, AGENTD)
        held |= _templates(machine)
        held |= {f"{what} of {machine.name}": size(machine.root / place) / MIB for what, place in PLACES}
    held[f"state of {site.one.name}"] -= held[f"audit log of {site.one.name}"]
    return held


PLACES = (
    ("logs", f"var/log/{AGENTD}"), ("state", "var/lib"), ("audit log", f"var/lib/{HEAD}/audit"),
    ("run directories", f"run/{AGENTD}"), ("shared memory", "dev/shm"),
)  # fmt: skip


def _process(machine: Machine, unit: str) -> dict[str, float]:
    proc = machine.root / "proc" / machine.main(unit)
    status = _status(proc)
    name = f"{unit} of {machine.name}"
    return {
        f"memory of {name}": int(status["VmRSS"].split()[0]) / 1024,
        f"descriptors of {name}": len(list((proc / "fd").iterdir())),
        f"threads of {name}": int(status["Threads"]),
    }


def _templates(machine: Machine) -> dict[str, float]:
    found = []
    for pid in machine.box.processes(f"{WORKERS}.service"):
        proc = Path("/proc", str(pid))
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (proc / "cmdline").read_bytes().startswith(b"rlinf: template"):
                found.append(int(_status(proc)["VmRSS"].split()[0]) / 1024)
    return {f"largest template of {machine.name}": max(found, default=0), f"templates of {machine.name}": len(found)}


def _status(proc: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (proc / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}
