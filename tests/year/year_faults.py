"""The faults of the year. Each happens to a running job or its machines, and must be explained without the code.

A fault returns when it is over. It asserts what its driver, `events`, `logs` or `stack` say about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pace
from year_site import AGENTD, HEAD, LOG_TOTAL, NEXT, ROOT, Driver, Machine, Site, size, stats

from rlinf_actors.wire.event_values import ClusterEvent

DAY_S = 86400.0

Fault = Callable[[Site, Driver], None]


def of(driver: Driver, kind: str, text: str, rank: int | None = None) -> Callable[[ClusterEvent], bool]:
    """Return a function that recognizes an event of a driver's job by its kind, its rank and a part of its text."""
    return lambda event: (
        event.namespace == driver.job and event.kind == kind and text in event.text and rank in (None, event.rank)
    )


def of_node(machine: Machine, kind: str, text: str) -> Callable[[ClusterEvent], bool]:
    return lambda event: event.node == machine.name and event.kind == kind and text in event.text


def logs(site: Site, driver: Driver, rank: int) -> str:
    return site.cli("logs", f"hands:{rank}", "--job", driver.job)


def works(driver: Driver, why: str) -> None:
    answer = driver.ask("work")
    assert answer == "ok worked", f"{why}: {answer}"


def worker_killed(site: Site, driver: Driver) -> None:
    since = site.last_event()
    site.two.kill(driver.pids[1])
    event = site.event(of(driver, "worker_died", "was ended by signal 9 (SIGKILL)", 1), since)
    assert event.node == "two"
    answer = driver.ask("work")
    assert "hands:1" in answer, answer
    assert "SIGKILL" in answer, answer
    assert f"hand 1 of {driver.job} is at work" in logs(site, driver, 1), "the output of a dead worker is there"


def worker_exits(site: Site, driver: Driver) -> None:
    since = site.last_event()
    answer = driver.ask("exit 0")
    assert "exited with code 3" in answer, answer
    event = site.event(of(driver, "worker_died", "exited with code 3", 0), since)
    assert event.exit is not None
    assert f"planned exit of {driver.job}" in "\n".join(event.exit.stderr_tail)
    assert f"planned exit of {driver.job}" in logs(site, driver, 0)


def driver_killed(site: Site, driver: Driver) -> None:
    since = site.last_event()
    pid = site.one.run("pgrep", "-f", f"year_driver.py {driver.job}$").split()[0]
    site.one.kill(pid)
    event = site.event(of(driver, "driver_ended", "has ended"), since)
    assert "signal 9" in event.text or "killed" in event.text or "its process" in event.text, event.text
    site.event(of(driver, "group_ended", "hands"), since)


def driver_raises(site: Site, driver: Driver) -> None:
    since = site.last_event()
    assert driver.end("raise") == 1
    site.event(of(driver, "driver_ended", f"RuntimeError: planned failure of {driver.job}"), since)


def worker_hangs(site: Site, driver: Driver) -> None:
    assert driver.ask("hang 1") == "ok hangs"
    asked = ("stack", "hands:1", "--job", driver.job)
    hangs = pace.again_like(lambda: "hang" in site.cli(*asked), True)  # the driver answers before the call begins
    shown = site.cli(*asked)
    assert hangs, shown
    assert "year_driver.py" in shown, shown


def worker_stops(site: Site, driver: Driver) -> None:
    since = site.last_event()
    site.two.kill(driver.pids[1], "STOP")
    event = site.event(of(driver, "worker_unresponsive", "is unresponsive", 1), since)
    assert "stopped" in event.text, event.text
    site.two.kill(driver.pids[1], "CONT")
    site.event(of(driver, "worker_responsive", "answers again", 1), since)
    works(driver, "it goes on")


def agentd_killed(site: Site, driver: Driver, machine: Machine | None = None) -> None:
    machine, since = machine or site.two, site.last_event()
    machine.kill(machine.main(AGENTD))
    site.event(of_node(machine, "node_joined", "is here again: its agentd has restarted"), since)
    works(driver, "workers outlive their agentd")


def first_agentd_killed(site: Site, driver: Driver) -> None:
    agentd_killed(site, driver, site.one)


def head_killed(site: Site, driver: Driver) -> None:
    since = site.last_event()
    site.one.kill(site.one.main(HEAD))
    event = site.event(lambda event: event.kind == "head_started", since)
    assert "again" in event.text, event.text
    for machine in site.machines:
        site.event(of_node(machine, "node_joined", "is here"), since)
    works(driver, "workers outlive the head")


def robots_stopped(site: Site, driver: Driver | None = None) -> None:
    since = site.last_event()
    site.cli("estop", "--head", site.address, "--reason", "a hand in the cell")
    site.event(lambda event: event.kind == "estop" and "a hand in the cell" in event.text, since)
    site.cli("estop", "--head", site.address, "--release")


def hooks_fail(site: Site, driver: Driver) -> None:
    """The program of [notify] does what its sandbox forbids, and its page is down. The next head has both mended."""
    robots_stopped(site)
    states = {hook["name"]: hook for hook in settled_hooks(site)}
    shown = site.cli("status")
    for name, why in (
        ("command", "/var/log/told: Read-only file system"),
        ("webhook", "the server cannot be reached: Connection refused"),
    ):
        assert states[name]["sent"] == 0, states
        assert re.search(f"notify +{name}: 0 sent, 1 failed; the last one: .*{why}", shown), shown
        look = ("journalctl", "--no-pager", "-p", "err", "-u", HEAD, "-g", rf"\[notify\] {name} failed")
        told = pace.again_like(lambda look=look, why=why: why in site.one.run(*look), True)
        assert told, site.one.run(*look)
    site.hooks.mend()
    site.told_since = site.last_event()


def settled_hooks(site: Site) -> list[dict[str, object]]:
    """Wait until no event waits for a hook, and return the states of the hooks."""
    looks: list[list[dict[str, object]]] = []

    def settled() -> bool:
        looks.append(site.json("status")["hooks"])
        return not any(hook["waiting"] for hook in looks[-1])

    assert pace.again_like(settled, True), looks[-1]
    return looks[-1]


def node_stands_still(site: Site) -> None:
    """A whole machine stops for longer than the lease, while no job runs there."""
    since, freezer = site.last_event(), site.two.box.cgroup / "cgroup.freeze"
    freezer.write_text("1")
    try:
        site.event(of_node(site.two, "node_lost", "it was silent for"), since)
    finally:
        freezer.write_text("0")
    site.event(of_node(site.two, "node_joined", "is here"), since)


def node_drained(site: Site, driver: Driver) -> None:
    since = site.last_event()
    site.cli("node", "drain", "two", "--reason", "a new disk")
    site.event(of_node(site.two, "node_draining", "a new disk"), since)
    works(driver, "what runs there goes on")
    site.cli("node", "undrain", "two")
    site.event(of_node(site.two, "node_undrained", "takes new workers again"), since)


def upgraded(site: Site, driver: Driver) -> None:
    """The second node's agentd gets the other version, in turn."""
    since, there = site.last_event(), site.two.units.get("code", str(ROOT))
    site.two.units["code"] = str(site.place / "next") if there == str(ROOT) else str(ROOT)
    site.two.upgrade(Path(there), Path(site.two.units["code"]))
    version = NEXT if site.two.units["code"] != str(ROOT) else "0.1.0)"
    site.event(of_node(site.two, "node_joined", f"rlinf-actors {version}"), since)
    works(driver, "an upgrade keeps workers")


def key_rotated(site: Site, driver: Driver) -> None:
    since = site.last_event()
    site.cli("keys", "rotate", "--dir", str(site.place / driver.name), keys=driver.name)
    site.event(lambda event: event.kind == "key_rotated" and repr(driver.name) in event.text, since)
    works(driver, "the running driver goes on")


def logs_rotated(site: Site, driver: Driver) -> None:
    assert driver.ask("say 0 2000") == "ok done"
    files = {file.name for file in site.one.logs().rglob("hands-0.out*")}
    assert "hands-0.out.1" in files, files
    assert "00001999 x" in logs(site, driver, 0), "the newest output is kept"


def a_day_passes(site: Site, driver: Driver) -> None:
    """The log files of both machines become a day old, and agentd looks at them, as it does at each reload."""
    said = logs(site, driver, 0)
    for machine in site.machines:
        machine.logs_were_full |= size(machine.logs()) > LOG_TOTAL
        for path, found in stats(machine.logs()):
            with contextlib.suppress(FileNotFoundError):  # agentd looks at them by itself, too
                os.utime(path, (found.st_mtime, found.st_mtime - DAY_S))
        machine.box.ctl("reload", AGENTD)
    for machine in site.machines:
        kept = pace.again_like(lambda machine=machine: size(machine.logs()) <= LOG_TOTAL, True)
        assert kept, f"the log files of {machine.name} take {size(machine.logs())} bytes"
    assert said
    assert logs(site, driver, 0) == said, "the files of living workers stay"


def disk_full(site: Site, driver: Driver) -> None:
    since, ballast = site.last_event(), site.two.logs() / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    try:
        assert driver.ask("say 1 50") == "ok done", "the worker goes on"
        site.event(of(driver, "output_lost", "No space left on device", 1), since)
        found = json.loads(site.cli("doctor", "--json", "--no-paths", code=1))["findings"]
        assert any(one["check"] == "logs" and one["status"] == "fail" and "two" in one["nodes"] for one in found)
    finally:
        ballast.unlink()
    assert driver.ask("say 1 50") == "ok done"
    site.event(of(driver, "output_written", "written again", 1), since)
    assert re.search("bytes of output are missing here", logs(site, driver, 1)), "the file says what is missing"


EARLY: tuple[Fault, ...] = (hooks_fail, head_killed, first_agentd_killed)
"""Faults that restart the processes whose memory is compared: only before the comparison."""
FAULTS: tuple[Fault, ...] = (
    worker_killed, agentd_killed, driver_killed, worker_stops, worker_exits, logs_rotated, driver_raises, upgraded,
    node_drained, key_rotated, worker_hangs, disk_full, a_day_passes, robots_stopped,
)  # fmt: skip
ENDING: tuple[Fault, ...] = (worker_killed, driver_killed, worker_exits, driver_raises)
"""Faults that end their job."""
SHORT: tuple[Fault, ...] = (
    hooks_fail, head_killed, upgraded, worker_stops, disk_full, key_rotated, robots_stopped, worker_hangs,
    worker_killed, driver_killed, driver_raises,
)  # fmt: skip
"""The faults of the short form: those after worker_hangs end the three jobs."""
