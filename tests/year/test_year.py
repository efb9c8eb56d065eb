"""A year in an hour: two machines under real systemd, jobs of three users, and every fault that a year brings.

The short form has three jobs, to which most faults happen. The long form has each fault, and goes on with jobs and
faults for `--year-minutes` after small jobs have filled all that daemons keep of ended ones: then memory, descriptors,
threads and disk must stay the same.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from year_faults import (
    EARLY,
    ENDING,
    FAULTS,
    SHORT,
    Fault,
    a_day_passes,
    head_killed,
    hooks_fail,
    node_stands_still,
    settled_hooks,
)
from year_site import AGENTD, DRIVERS, HEAD, WORKERS, Driver, Machine, Site, site, systemd_box
from year_sizes import JOBS, Sizes, unreached

from rlinf_actors.cluster.event_stream import EventCursor
from rlinf_actors.head import notify
from rlinf_actors.net.host import HeldPorts

WHY_NOT = systemd_box.unusable()
pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

BURST = 800
"""Small jobs of each user at a time, until the bounds are reached. Their log files fit on the small disk."""
SMALL = 64
"""Small jobs of each user in each later round: so many that their events, which are short, remain most of the log."""


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

    def reach_the_bounds(self) -> None:
        """Run small jobs until the daemons keep nothing of the first ones."""
        while unreached(self.cluster, self.jobs):
            self.small(BURST, 2)
            self.round([a_day_passes])

    def small(self, count: int, at_once: int = 1) -> None:
        self.cluster.run_small(f"small-{self.jobs}", count, at_once)
        self.jobs += count * len(DRIVERS)

    def go_on(self, faults: Sequence[Fault], minutes: float, sizes: Sizes) -> None:
        """Go on with jobs and faults for so long, and take the sizes after each of them."""
        begun = time.monotonic()
        numbers = itertools.count()
        while (at := (time.monotonic() - begun) / (60 * minutes)) < 1:
            self.round([faults[next(numbers) % len(faults)]])
            self.small(SMALL)
            self.settle()
            sizes.take(at)

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


def hooks_told_all(cluster: Site) -> None:
    """Check that both hooks of the head have told of all events of their kinds since they work, in their order."""
    settled_hooks(cluster)
    events = [event for answer in cluster.read(EventCursor(None, cluster.told_since)) for event in answer.events]
    wanted = {event.seq: event.kind for event in events if event.kind in notify.DEFAULT_KINDS}
    assert wanted
    for name, told in cluster.hooks.told().items():
        assert [seq for seq in told if seq in wanted] == list(wanted), f"{name} of [notify]"


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
    year = Year(cluster)
    begun = time.monotonic()
    chosen = request.config.option.year_faults.split(",")
    every = (*EARLY, *FAULTS) if minutes or chosen != [""] else SHORT
    faults = [fault for fault in every if chosen == [""] or fault.__name__ in chosen]
    for some in plan(faults):
        year.round(some)
    if minutes:
        year.reach_the_bounds()
        figures.add("bounds reached", f"after {year.jobs} jobs and {time.monotonic() - begun:.0f} s")
        sizes = Sizes(cluster)
        year.go_on([fault for fault in faults if fault not in EARLY], minutes, sizes)
        for name, told in sizes.told().items():
            figures.add(name, told)
        figures.add("jobs and faults", f"{year.jobs} jobs, {year.faults} faults in {time.monotonic() - begun:.0f} s")
        figures.done(year.jobs, JOBS, "jobs")
        assert sizes.grown() == []
    year.settle()
    if every is not SHORT:
        node_stands_still(cluster)
    if hooks_fail in faults and head_killed in faults:
        hooks_told_all(cluster)
    for machine in cluster.machines:
        assert leftovers(machine) == []
    for machine in cluster.machines:
        machine.box.ctl("stop", AGENTD, WORKERS)
        assert machine.box.processes(f"{AGENTD}.service") + machine.box.processes(f"{WORKERS}.service") == []
        assert not list((machine.root / "run").glob("rlinf-agentd/*"))
        assert not list((machine.root / "dev/shm").iterdir())
    cluster.one.box.ctl("stop", HEAD)
