"""A year in an hour: two machines under real systemd, jobs of three users, and every fault that a year brings.

The short form has three jobs, to which most faults happen. The long form has each fault, and goes on with jobs and
faults for `--year-minutes`: memory of head and agentd and the disk must be the same at its end as after a quarter.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from year_faults import EARLY, ENDING, FAULTS, SHORT, Fault
from year_site import AGENTD, DRIVERS, HEAD, WORKERS, Driver, Machine, Site, site, systemd_box

from rlinf_actors.net.host import HeldPorts

WHY_NOT = systemd_box.unusable()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

MIB = 1 << 20
MORE_MEMORY = {"head": 14 * MIB, "agentd of one": 6 * MIB}
"""By how much a daemon may be larger at the end than after a quarter. The head fills its event log meanwhile: 10,000
entries of about 1 KiB. agentd keeps the last lines of its own log.
"""
MORE_DISK = 24 * MIB
"""By how much the disk may be fuller: log files of workers have a limit of their own, as has the event log."""


@pytest.fixture
def cluster() -> Iterator[Site]:
    ports = HeldPorts()
    port = ports.hold()
    ports.close()
    with tempfile.TemporaryDirectory(prefix="rly-", dir="/tmp") as place, site(Path(place), port) as made:
        yield made


class Year:
    """The jobs and faults of one run."""

    def __init__(self, cluster: Site) -> None:
        self.cluster = cluster
        self.jobs = 0
        self.faults = 0

    def round(self, faults: Sequence[Fault]) -> None:
        """Run a job of each user. The faults happen to one after the other, the last of each may end it; jobs that had
        none must not notice.
        """
        cluster = self.cluster
        drivers = [cluster.start(name, f"job-{self.jobs + number}") for number, name in enumerate(DRIVERS)]
        for driver in drivers:
            cluster.wait_up(driver)
        self.jobs += len(drivers)
        hit: list[Driver] = []
        for fault in faults:
            victim = drivers[self.faults % len(drivers)]
            self.faults += 1
            fault(cluster, victim)
            hit.append(victim)
        for driver in drivers:
            if driver not in hit:
                answer = driver.ask("work")
                assert answer == "ok worked", f"{[one.__name__ for one in faults]} reached {driver.job}: {answer}"
                assert driver.end() == 0
            elif driver.process.poll() is None:
                driver.end()
            else:
                driver.process.communicate()
            cluster.drivers.remove(driver)

    def settle(self) -> None:
        """Wait until the head knows of no group."""
        for job in {group["namespace"] for group in self.cluster.json("groups")}:
            self.cluster.event(lambda event, job=job: event.kind == "group_ended" and event.namespace == job, 0)


def plan(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return the faults in as few rounds as possible: all that spare their jobs in the first, then for each user's job
    one that ends it.
    """
    sparing = [fault for fault in faults if fault not in ENDING]
    ending = [fault for fault in faults if fault in ENDING]
    rounds = [ending[at : at + len(DRIVERS)] for at in range(0, len(ending), len(DRIVERS))] or [[]]
    return [[*sparing, *rounds[0]], *rounds[1:]]


def sizes(cluster: Site) -> dict[str, int]:
    rss = {f"agentd of {machine.name}": machine.rss(AGENTD) for machine in cluster.machines}
    return {"head": cluster.one.rss(HEAD), **rss, "disk": sum(machine.disk() for machine in cluster.machines)}


def leftovers(machine: Machine) -> list[str]:
    """Return what ended jobs have left on a machine: sockets, cgroups, and processes that are neither daemons nor idle
    templates.
    """
    run = machine.root / "run" / AGENTD
    found = [str(path) for path in run.glob("root*/**/w/*")]
    found += [str(path) for path in machine.box.cgroup.glob(f"**/{WORKERS}.service/rlinf-actors/*") if path.is_dir()
              and path.name != "keeper" and (path / "cgroup.procs").read_text().strip()]  # fmt: skip
    for pid in machine.box.processes(f"{WORKERS}.service"):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if not command.startswith("rlinf: template") and "/agentd/keeper.py" not in command:
            found.append(f"process {pid}: {command}")
    return found


def test_year_leaves_nothing_and_explains_each_failure(cluster: Site, request: pytest.FixtureRequest, figures) -> None:
    minutes = request.config.option.year_minutes
    shared = set(os.listdir("/dev/shm"))
    year = Year(cluster)
    begun = time.monotonic()
    chosen = request.config.option.year_faults.split(",")
    every = (*EARLY, *FAULTS) if minutes or chosen != [""] else SHORT
    faults = [fault for fault in every if chosen == [""] or fault.__name__ in chosen]
    for some in plan(faults):
        year.round(some)
    year.settle()
    quarter = sizes(cluster)
    number, later = 0, [fault for fault in faults if fault not in EARLY]
    while minutes and (time.monotonic() - begun < 60 * minutes or year.jobs < request.config.option.year_jobs):
        year.round([later[number % len(later)]])
        number += 1
        if time.monotonic() - begun < 15 * minutes:
            quarter = sizes(cluster)
        figures.done(year.jobs, request.config.option.year_jobs, "jobs")
    year.settle()
    for machine in cluster.machines:
        assert leftovers(machine) == []
    if minutes:
        end = sizes(cluster)
        for name, before in quarter.items():
            figures.add(name, f"{before / MIB:.1f} MiB after a quarter, {end[name] / MIB:.1f} MiB at the end")
        figures.add("jobs and faults", f"{year.jobs} jobs, {year.faults} faults in {time.monotonic() - begun:.0f} s")
        more = {name: end[name] - before for name, before in quarter.items()}
        assert more["disk"] < MORE_DISK
        assert {name: more[name] for name, most in MORE_MEMORY.items() if more[name] > most} == {}
    for machine in cluster.machines:
        machine.box.ctl("stop", AGENTD, WORKERS)
        assert machine.box.processes(f"{AGENTD}.service") + machine.box.processes(f"{WORKERS}.service") == []
        assert not list((machine.root / "run").glob("rlinf-agentd/*"))
    cluster.one.box.ctl("stop", HEAD)
    assert set(os.listdir("/dev/shm")) <= shared
