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
from collections.abc import Callable, Collection
from pathlib import Path

import matrix_scene as ms
import pytest
from matrix_workers import SOURCE
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


def _row(name: str, bound_s: float = LEASE_BOUND_S, cls: str = "Streamer") -> ms.Row:
    return ms.Row(name, bound_s, cls)


OWNERS = [
    _row("cut-head-to-driver"),
    _row("cut-driver-to-head"),
    _row("cut-driver-both-ways"),
    _row("remote-driver-killed"),
    _row("remote-driver-stopped"),
    _row("remote-driver-stopped-beside-an-agent"),
    _row("local-driver-killed", TOLD_BOUND_S),
]
"""The worker's owner is hurt; it is on lab 0, which is not."""
LABS = [
    _row("cut-head-to-lab"),
    _row("cut-lab-to-head"),
    _row("cut-lab-both-ways"),
    _row("agentd-stopped"),
    _row("agentd-killed", TOLD_BOUND_S),
    _row("template-stopped"),
    _row("template-killed", TOLD_BOUND_S),
]
"""Each in a lab of its own, from lab 1 on."""
WORKERS = [
    _row("worker-stopped", TOLD_BOUND_S),
    _row("worker-sigterm", TOLD_BOUND_S),
    _row("worker-sigint", TOLD_BOUND_S),
]
"""On lab 0. The time of the one that stands still counts from when it is continued."""
KINDS = [
    "Streamer", "Beside", "Concurrent", "Generating", "Async", "Masked", "Forking", "DoubleForking", "Popening",
    "Uninterruptible", "Native", "NativeWithLock", "HookBlocks", "HookRaises", "HookCalls",
]  # fmt: skip
"""Ways to move an arm, and to stop it. The first has two arms."""
HEAD_STOPPED = [_row(f"head-stopped-{cls}", cls=cls) for cls in KINDS]
PRESSED = [
    _row(f"estop-under-load-{cls}", TOLD_BOUND_S, cls)
    for cls in ("Streamer", "Masked", "Forking", "Native", "HookBlocks", "Starting")
]
"""The bound counts from the end of the command. Starting: the emergency stop comes during its launch."""
ARMED = [_row("estop-armed-under-load", TOLD_BOUND_S / 2)]
"""The bound counts from Enter."""
HEAD_KILLED = [
    _row(f"head-killed-under-load-{cls}", cls=cls)
    for cls in ("Streamer", "Async", "Forking", "Native", "NativeWithLock")
]
ROWS = [*OWNERS, *LABS, *WORKERS, *HEAD_STOPPED, *PRESSED, *ARMED, *HEAD_KILLED]
ARMS = len(KINDS) + 1
"""In lab 0; the others have one each."""
BUSY = 4
"""Processes that only take time, where the machine is under load."""


def components() -> dict[str, dict[str, str]]:
    """Where the workers of a component are placed: on the arms of lab 0 by number, on the one of another lab."""
    arms = {f"arm{n}": {"node_group": "lab0", "placement": str(n)} for n in range(ARMS)}
    both = {"both": {"node_group": "lab0", "placement": f"{ARMS - 2}-{ARMS - 1}:0"}}
    labs = {f"lab{n}": {"node_group": f"lab{n}", "placement": "0"} for n in range(1, 1 + len(LABS))}
    return {**arms, **both, **labs}


class Round:
    """One round in a scene of its own: some of the rows, or all."""

    def __init__(self, scene: ms.Scene, rows: Collection[ms.Row]) -> None:
        self._scene = scene
        self._rows = rows
        self._runs: list[ms.Run] = []
        arms = {name: one for name, one in components().items() if one["node_group"] == "lab0"}
        watched, local = scene.labs[-1], scene.labs[0]
        hosts = [*scene.others[1:6], watched, local]
        self._owners = [scene.driver(host, [0], arms) for host in hosts]
        self._main = scene.driver(scene.others[0], range(1 + len(LABS)), components())
        for driver in (*self._owners, self._main):
            driver.answer()

    def run(self) -> list[ms.Run]:
        """Play the rows, and judge them."""
        self._owners_labs_and_workers()
        self._head_stopped()
        self._pressed()
        self._armed()
        self._head_killed()
        for run in self._runs:
            self._judge(run)
        return self._runs

    def _judge(self, run: ms.Run) -> None:
        arms = [ms.Arm(arm.address, arm.record, run.of(arm, arm.commands())) for arm in run.arms]
        run.last = max((arm.said[-1].at for arm in arms if arm.said), default=0.0)
        run.stall = self._scene.stall(run.cut, run.last)
        run.told = self._scene.told(run.name)
        for arm in arms:
            texts = [one.text for one in arm.said]
            if not run.must_have_stopped(texts):
                continue
            run.must(texts.index("stop") == len(texts) - 1, f"after its stop the arm was told {texts[-5:]}")
            again = [one for one in arm.said[:-1] if run.went_on and one.at >= run.went_on]
            # a stopped worker makes the system call that it was about to make
            run.must(len(again) <= (run.cut == run.went_on), f"after it went on the arm was told {again}")

    def _launch(self, driver: ms.Driver, row: ms.Row, component: str) -> ms.Run:
        scene = self._scene
        options = {"wait_for_hardware": 30}
        driver.order(**{"group": row.name, "class": row.cls, "component": component, "options": options})
        if component == "both":
            arms = scene.arms[0][-2:]
        elif component.startswith("arm"):
            arms = [scene.arms[0][int(component[3:])]]
        else:
            arms = scene.arms[int(component[3:])]
        run = ms.Run(row, arms)
        self._runs.append(run)
        return run

    def _up(self, driver: ms.Driver, run: ms.Run) -> None:
        pids = driver.answer().get("pids")
        if pids is not None:
            run.worker, run.watchdog, run.template = pids

    def _owners_labs_and_workers(self) -> None:
        scene, head, owners = self._scene, self._scene.head_host, self._owners
        places = [(owners[n], one, f"arm{n}") for n, one in enumerate(OWNERS)]
        places += [(self._main, one, f"lab{n + 1}") for n, one in enumerate(LABS)]
        places += [(self._main, one, f"arm{n + len(OWNERS)}") for n, one in enumerate(WORKERS)]
        wanted = [one for one in places if one[1] in self._rows]
        runs = {row.name: self._launch(driver, row, component) for driver, row, component in wanted}
        for driver, row, _ in wanted:
            self._up(driver, runs[row.name])
        for run in runs.values():
            run.until_streaming()
        pids, kill = [driver.process.pid for driver in owners], os.kill
        cuts: dict[str, Callable[[ms.Run], object]] = {
            "cut-head-to-driver": lambda _: head.drop(to=scene.others[1]),
            "cut-driver-to-head": lambda _: scene.others[2].drop(to=head),
            "cut-driver-both-ways": lambda _: scene.others[3].link("down"),
            "remote-driver-killed": lambda _: kill(pids[3], signal.SIGKILL),
            "remote-driver-stopped": lambda _: kill(pids[4], signal.SIGSTOP),
            "remote-driver-stopped-beside-an-agent": lambda _: kill(pids[5], signal.SIGSTOP),
            "local-driver-killed": lambda _: kill(pids[6], signal.SIGKILL),
            "cut-head-to-lab": lambda _: head.drop(to=scene.labs[1]),
            "cut-lab-to-head": lambda _: scene.labs[2].drop(to=head),
            "cut-lab-both-ways": lambda _: scene.labs[3].link("down"),
            "agentd-stopped": lambda _: kill(scene.agents[4].pid, signal.SIGSTOP),
            "agentd-killed": lambda _: kill(scene.agents[5].pid, signal.SIGKILL),
            "template-stopped": lambda run: kill(run.template, signal.SIGSTOP),
            "template-killed": lambda run: kill(run.template, signal.SIGKILL),
            "worker-stopped": lambda run: kill(run.worker, signal.SIGSTOP),
            "worker-sigterm": lambda run: kill(run.worker, signal.SIGTERM),
            "worker-sigint": lambda run: kill(run.worker, signal.SIGINT),
        }
        begun = time.monotonic()
        for name, run in runs.items():
            run.cut = time.monotonic()
            cuts[name](run)
        still = runs.get("worker-stopped")
        for run in runs.values():
            if run is not still:
                run.until_closed()
        time.sleep(max(0.0, begun + ms.STILL_S - time.monotonic()))  # how long they stand still is what is tested
        stopped = {"remote-driver-stopped": pids[4], "remote-driver-stopped-beside-an-agent": pids[5]}
        stopped |= {"agentd-stopped": scene.agents[4].pid}
        for name, run in runs.items():
            pid = {**stopped, "template-stopped": run.template, "worker-stopped": run.worker}.get(name)
            if pid:
                run.went_on = time.monotonic()
                with contextlib.suppress(ProcessLookupError):  # a template that stood still was killed
                    kill(pid, signal.SIGCONT)
        if still is not None:
            still.cut = still.went_on
            still.until_closed()
        for driver in owners:
            ms.end(driver.process)  # their arms are free for what follows, whatever has failed
        if "cut-head-to-lab" in runs:
            head.undrop(to=scene.labs[1])
        if "cut-lab-to-head" in runs:
            scene.labs[2].undrop(to=head)
        scene.labs[3].link("up")

    def _kinds(self, rows: list[ms.Row]) -> list[ms.Run]:
        """Launch them on lab 0; all stream when this returns."""
        wanted = [row for row in rows if row in self._rows and (self._scene.library or "Native" not in row.cls)]
        places = {row.name: f"arm{n - 1}" if n else "both" for n, row in enumerate(rows)}
        runs = [self._launch(self._main, row, places[row.name]) for row in wanted]
        for run in runs:
            self._up(self._main, run)
        for run in runs:
            run.until_streaming()
        return runs

    def _head_stopped(self) -> None:
        runs, head = self._kinds(HEAD_STOPPED), self._scene.head
        if not runs:
            return
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
        if not runs:
            return
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
        if not runs:
            return
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


def play(rows: Collection[ms.Row]) -> list[ms.Run]:
    with contextlib.ExitStack() as stack:
        arms = [ARMS, *[1] * (len(LABS) + 1)]
        scene = ms.scene(stack, 2 + len(LABS), 6, arms, "matrix_workers", SOURCE)
        return Round(scene, rows).run()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> ms.Results:
    """Every row, so many times."""
    return ms.play_rounds(ROWS, request.config.getoption("robot_rounds"), play)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_arm_stops_in_time_and_nothing_follows(
    row: ms.Row, results: ms.Results, figures: Figures, request: pytest.FixtureRequest
) -> None:
    if "Native" in row.cls and shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc)")
    ms.check(row, results, figures, request.config.getoption("robot_rounds"))
