"""Whatever is cut, stopped or killed around a streaming robot: the arm stops in time, and nothing follows its stop.

Each row of the table is one thing that goes wrong; most happen at the same time, to workers that share nothing that is
touched. `--robot-rounds N` repeats all of it in new clusters, and the bounds then hold for the longest of N.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matrix_scene as ms
import pace
import pytest
from nightly import Figures

sys.path.append(str(Path(__file__).resolve().parents[1] / "netns"))

import netns_kit

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(0),  # the first row waits for all of them; each wait within has its own end
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

LEASE_BOUND_S = 1.9
"""From what went wrong to the stop command at the arm, less the machine's own stand still. 2 s are promised."""
TOLD_BOUND_S = 1.0
"""The same where somebody is told, and nothing has to run out."""
STILL_S = 2.4
"""For how long a worker stands still: longer than its lease."""


@dataclass(frozen=True)
class Row:
    """One thing that goes wrong.

    Attributes:
        name: also of the worker's group.
        bound_s: of the time to the stop command.
        cls: how the worker moves its arm.
    """

    name: str
    bound_s: float = LEASE_BOUND_S
    cls: str = "Streamer"


OWNERS = [
    Row("cut-head-to-driver"),
    Row("cut-driver-to-head"),
    Row("cut-driver-both-ways"),
    Row("remote-driver-killed"),
    Row("remote-driver-stopped"),
    Row("remote-driver-stopped-beside-an-agent"),
    Row("local-driver-killed", TOLD_BOUND_S),
]
"""The worker's owner is hurt; it is on lab 0, which is not."""
LABS = [
    Row("cut-head-to-lab"),
    Row("cut-lab-to-head"),
    Row("cut-lab-both-ways"),
    Row("agentd-stopped"),
    Row("agentd-killed", TOLD_BOUND_S),
    Row("template-stopped"),
    Row("template-killed", TOLD_BOUND_S),
]
"""Each in a lab of its own, from lab 1 on."""
WORKERS = [
    Row("worker-stopped", TOLD_BOUND_S),
    Row("worker-sigterm", TOLD_BOUND_S),
    Row("worker-sigint", TOLD_BOUND_S),
]
"""On lab 0. The time of the one that stands still counts from when it is continued."""
KINDS = [
    "Streamer", "Beside", "Concurrent", "Generating", "Async", "Masked", "Forking", "DoubleForking", "Popening",
    "Uninterruptible", "Native", "NativeWithLock", "HookBlocks", "HookRaises", "HookCalls",
]  # fmt: skip
"""Ways to move an arm, and to stop it. The first has two arms."""
HEAD_STOPPED = [Row(f"head-stopped-{cls}", cls=cls) for cls in KINDS]
PRESSED = [
    Row(f"estop-under-load-{cls}", TOLD_BOUND_S, cls)
    for cls in ("Streamer", "Masked", "Forking", "Native", "HookBlocks", "Starting")
]
"""The bound counts from the end of the command. Starting: the emergency stop comes during its launch."""
ARMED = [Row("estop-armed-under-load", TOLD_BOUND_S / 2)]
"""The bound counts from Enter."""
HEAD_KILLED = [
    Row(f"head-killed-under-load-{cls}", cls=cls)
    for cls in ("Streamer", "Async", "Forking", "Native", "NativeWithLock")
]
ROWS = [*OWNERS, *LABS, *WORKERS, *HEAD_STOPPED, *PRESSED, *ARMED, *HEAD_KILLED]
ARMS = len(KINDS) + 1
"""In lab 0; the others have one each."""
BUSY = 4
"""Processes that only take time, where the machine is under load."""
TOO_SLOW = 8.0
"""Where a process takes so many times its own work, leases run out and guards are killed whatever is cut: the row is
skipped if it was late, or its worker was killed before it could stop the arm. A move after the stop fails anywhere.
"""
Results = dict[str, list[tuple[ms.Run, float]]]
"""What became of each row in each round, with the machine's stand still meanwhile."""


def components() -> dict[str, dict[str, str]]:
    """Where the workers of a component are placed: on the arms of lab 0 by number, on the one of another lab."""
    arms = {f"arm{n}": {"node_group": "lab0", "placement": str(n)} for n in range(ARMS)}
    both = {"both": {"node_group": "lab0", "placement": f"{ARMS - 2}-{ARMS - 1}:0"}}
    labs = {f"lab{n}": {"node_group": f"lab{n}", "placement": "0"} for n in range(1, 1 + len(LABS))}
    return {**arms, **both, **labs}


class Round:
    """One round in a scene of its own."""

    def __init__(self, scene: ms.Scene) -> None:
        self._scene = scene
        self._runs: list[ms.Run] = []
        arms = {name: one for name, one in components().items() if one["node_group"] == "lab0"}
        watched, local = scene.labs[-1], scene.labs[0]
        hosts = [*scene.others[1:6], watched, local]
        starting = [scene.driver(host, [0], arms) for host in hosts]
        self._main = scene.driver(scene.others[0], range(1 + len(LABS)), components())
        for driver in (*starting, self._main):
            driver.answer()
        self._owners = starting

    def run(self) -> list[ms.Run]:
        """All rows; returns their runs."""
        self._owners_labs_and_workers()
        self._head_stopped()
        self._pressed()
        self._armed()
        self._head_killed()
        return self._runs

    def _launch(self, driver: ms.Driver, row: Row, component: str) -> ms.Run:
        scene = self._scene
        options = {"wait_for_hardware": 30}
        driver.order(**{"group": row.name, "class": row.cls, "component": component, "options": options})
        if component == "both":
            arms = scene.arms[0][-2:]
        elif component.startswith("arm"):
            arms = [scene.arms[0][int(component[3:])]]
        else:
            arms = scene.arms[int(component[3:])]
        run = ms.Run(row.name, arms)
        self._runs.append(run)
        return run

    def _up(self, driver: ms.Driver, run: ms.Run) -> None:
        answer = driver.answer()
        run.worker, run.template = answer.get("worker", 0), answer.get("template", 0)

    def _owners_labs_and_workers(self) -> None:
        scene, head = self._scene, self._scene.head_host
        owners = list(zip(self._owners, OWNERS, strict=True))
        owned = [self._launch(driver, row, f"arm{n}") for n, (driver, row) in enumerate(owners)]
        labs = [self._launch(self._main, row, f"lab{n + 1}") for n, row in enumerate(LABS)]
        workers = [self._launch(self._main, row, f"arm{n + len(OWNERS)}") for n, row in enumerate(WORKERS)]
        for driver, run in zip(self._owners, owned, strict=True):
            self._up(driver, run)
        for run in (*labs, *workers):
            self._up(self._main, run)
        for run in (*owned, *labs, *workers):
            run.until_streaming()
        pids = [driver.process.pid for driver in self._owners]
        kill = os.kill
        cuts = [
            lambda: head.drop(to=scene.others[1]),
            lambda: scene.others[2].drop(to=head),
            lambda: scene.others[3].link("down"),
            lambda: kill(pids[3], signal.SIGKILL),
            lambda: kill(pids[4], signal.SIGSTOP),
            lambda: kill(pids[5], signal.SIGSTOP),
            lambda: kill(pids[6], signal.SIGKILL),
            lambda: head.drop(to=scene.labs[1]),
            lambda: scene.labs[2].drop(to=head),
            lambda: scene.labs[3].link("down"),
            lambda: kill(scene.agents[4].pid, signal.SIGSTOP),
            lambda: kill(scene.agents[5].pid, signal.SIGKILL),
            lambda: kill(labs[5].template, signal.SIGSTOP),
            lambda: kill(labs[6].template, signal.SIGKILL),
            lambda: kill(workers[0].worker, signal.SIGSTOP),
            lambda: kill(workers[1].worker, signal.SIGTERM),
            lambda: kill(workers[2].worker, signal.SIGINT),
        ]
        everyone = [*owned, *labs, *workers]
        for run, cut in zip(everyone, cuts, strict=True):
            run.cut = time.monotonic()
            cut()
        for run in everyone:
            if run is not workers[0]:
                run.until_closed()
        time.sleep(max(0.0, workers[0].cut + STILL_S - time.monotonic()))  # how long it stands still is what is tested
        stopped = {labs[3]: scene.agents[4].pid, labs[5]: labs[5].template, workers[0]: workers[0].worker}
        stopped |= {owned[4]: pids[4], owned[5]: pids[5]}
        for run, pid in stopped.items():
            run.went_on = time.monotonic()
            kill(pid, signal.SIGCONT)
        workers[0].cut = workers[0].went_on
        workers[0].until_closed()
        for driver in self._owners:
            ms.end(driver.process)  # their arms are free for what follows, whatever has failed
        head.undrop(to=scene.labs[1])
        scene.labs[2].undrop(to=head)
        scene.labs[3].link("up")

    def _kinds(self, rows: list[Row]) -> list[ms.Run]:
        """Launch them on lab 0; all stream when this returns."""
        rows = [row for row in rows if self._scene.library or "Native" not in row.cls]
        runs = [self._launch(self._main, row, f"arm{n - 1}" if n else "both") for n, row in enumerate(rows)]
        for run in runs:
            self._up(self._main, run)
        for run in runs:
            run.until_streaming()
        return runs

    def _head_stopped(self) -> None:
        runs, head = self._kinds(HEAD_STOPPED), self._scene.head
        cut = time.monotonic()
        head.send_signal(signal.SIGSTOP)
        for run in runs:
            run.cut = cut
            run.until_closed()
        for run in runs:
            run.went_on = time.monotonic()
        head.send_signal(signal.SIGCONT)

    def _pressed(self) -> None:
        runs, scene = self._kinds(PRESSED), self._scene
        busy = scene.busy(BUSY)
        enter = time.monotonic()
        read = {"stdout": subprocess.PIPE, "text": True}
        pressed = [scene.press("--reason", "a hand in the cell", **read), scene.press(**read)]
        assert [one.stdout.readline()[:9] for one in pressed] == ["stopping "] * 2
        cut = time.monotonic()
        for run in runs:
            run.cut, run.pressed = cut, enter
            run.until_closed()
        for one in pressed:
            one.communicate(timeout=60)  # 69 if the lost workers of earlier rows are not certain to have ended
        assert not [run.name for run in runs if "NOT CONFIRMED" in scene.told(run.name)]
        for one in busy:
            ms.end(one)
        assert scene.press("--release").wait(60) == 0

    def _armed(self) -> None:
        runs, scene = self._kinds(ARMED), self._scene
        busy = scene.busy(BUSY)
        button = scene.press("--arm", "--json", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while json.loads(button.stdout.readline())["armed"] != 1:
            continue
        for run in runs:
            run.cut = time.monotonic()
            button.stdin.write("\n")
            button.stdin.flush()
            run.until_closed()
        button.communicate(timeout=60)
        for one in busy:
            ms.end(one)
        assert scene.press("--release").wait(60) == 0

    def _head_killed(self) -> None:
        runs, scene = self._kinds(HEAD_KILLED), self._scene
        busy = scene.busy(BUSY)
        cut = time.monotonic()
        scene.head.kill()
        for run in runs:
            run.cut = cut
            run.until_closed()
        for one in busy:
            ms.end(one)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """Every row, so many times."""
    found: Results = {row.name: [] for row in ROWS}
    for _ in range(request.config.getoption("robot_rounds")):
        with contextlib.ExitStack() as stack:
            slowness = pace.slowness_now()
            scene = ms.scene(stack, 2 + len(LABS), 6, [ARMS, *[1] * (len(LABS) + 1)])
            try:
                runs = Round(scene).run()
            except AssertionError as error:
                slowness = max(slowness, pace.slowness_now())
                if slowness > TOO_SLOW:
                    pytest.skip(f"a process takes {slowness:.0f} times its own work on this machine now: {error}"[:500])
                raise
            slowness = max(slowness, pace.slowness_now())
            for run in runs:
                run.slowness = slowness
                run.arms = [ms.Arm(arm.address, arm.record, run.of(arm, arm.commands())) for arm in run.arms]
                stopped = [one.at for arm in run.arms for one in arm.said if one.text == "stop"]
                run.told = scene.told(run.name)
                found[run.name].append((run, scene.stall(run.cut, max(stopped, default=run.cut))))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_arm_stops_in_time_and_nothing_follows(
    row: Row, results: Results, figures: Figures, request: pytest.FixtureRequest
) -> None:
    if "Native" in row.cls and shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc)")
    figures.done(len(results[row.name]), request.config.getoption("robot_rounds"), "rounds")
    longest = 0.0
    for run, stall in results[row.name]:
        late = [run.left] if run.left else []
        for arm in run.arms:
            texts = [one.text for one in arm.said]
            if "stop" not in texts:
                late.append(f"no stop command: {texts[-3:]}\n{run.told}")
                continue
            assert texts.index("stop") == len(texts) - 1, f"after its stop the arm was told {texts[-5:]}\n{run.told}"
            again = [one for one in arm.said[:-1] if run.went_on and one.at >= run.went_on]
            # a stopped worker makes the system call that it was about to make
            at_most = 1 if run.cut == run.went_on else 0
            assert len(again) <= at_most, f"after it went on the arm was told {again}\n{run.told}"
            after = arm.said[-1].at - run.cut
            longest = max(longest, arm.said[-1].at - (run.pressed or run.cut) - stall)
            if after - stall > row.bound_s:
                late.append(
                    f"the arm had its stop command {after:.3f} s after the cut; {row.bound_s} s are allowed, and the "
                    f"machine itself stood still for {stall:.3f} s of that by a control timer"
                )
        if late and run.slowness > TOO_SLOW:
            pytest.skip(f"a process takes {run.slowness:.0f} times its own work on this machine now: {late[0][:300]}")
        assert not late, late[0]
    assert results[row.name]
    figures.add(f"{row.name}, longest of {len(results[row.name])}", f"{longest:.3f} s")
