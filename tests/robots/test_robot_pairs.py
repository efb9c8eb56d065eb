"""Whatever stands still around a moving robot, alone and in pairs: its arm moves no longer than its lease.

Each way to move an arm (`HOWS`) is tried with each way to stop it: on_lease_lost ("hook"), stop_hardware ("outside"),
and both. `--robot-rounds N` repeats all of it in new clusters, and the bound then holds for the longest of N.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import matrix_scene as ms
import pytest
from nightly import Figures
from pair_workers import LOCKED, SOURCE

sys.path.append(str(Path(__file__).resolve().parents[1] / "netns"))

import netns_kit

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(0),  # the first row waits for all of them; each wait within has its own end
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)"),
]

BOUND_S = 1.9
"""From the fault to the last command at the arm, less the machine's own stand still. 2 s are promised."""
MODES = {"hook": "Hook", "outside": "Outside", "both": "Both"}
PARTS = ("worker", "watchdog", "template", "agentd")
PAIRS = dict(enumerate([*((part,) for part in PARTS), *itertools.combinations(PARTS, 2)], 1))
WITH_HEAD = dict(enumerate([("head",), *((part, "head") for part in PARTS)], 1))
"""What stands still in which lab."""
HOWS = {
    "own": "a robot worker, of which something stands still",
    "locking": "one whose C code holds the interpreter's lock as well",
    "launcher": "a group that a robot worker launched, of which something stands still",
    "launcher-elsewhere": "the same, with the group on another node",
    "launched-elsewhere": "such a group, of which something stands still, and nothing on the launcher's node",
    "exec": "a robot worker that replaces itself by another program",
    "crowd": "a robot worker beside which 100 workers are launched, when its agentd stands still",
}
CALLS = {"locking": "hold_the_lock", "exec": "replace_itself"}
ALONE = len(PAIRS) + 1
"""The last lab, where nothing stands still. Labs 1 to 10 have a fault each; nothing stands still on lab 0 either."""
AGAIN_S = 0.45
"""Most seconds for which a stopped worker moves when it continues. Its watchdog kills it after 0.3 s, if its guard
cannot run.
"""
SOON_S = 0.5
"""Within so many seconds from the call, a process beside C code with the lock stands still. Later, it is another row:
its watchdog may have ended the lease.
"""
APART_S = 0.25
CROWD_S = 0.5
"""How long the launch of the crowd goes on, before the agentd stands still."""


@dataclass(frozen=True)
class Row(ms.Row):
    """*cls* is the class of the worker that moves the arm.

    Attributes:
        how: of `HOWS`.
        mode: of `MODES`.
        still: the processes that stand still.
        lab: where it stands still.
    """

    how: str
    mode: str
    still: tuple[str, ...]
    lab: int


def rows(hows: Collection[str], faults: Mapping[int, tuple[str, ...]]) -> list[Row]:
    """Return the rows of some faults, by lab."""
    return [
        Row("-".join([how, mode, *(still or ["alone"])]), BOUND_S, cls, how, mode, still, lab)
        for (lab, still), how, (mode, cls) in itertools.product(faults.items(), hows, MODES.items())
    ]


ALL_ALONE = {ALONE: ()}
ACTS = [
    rows(["own", "locking"], PAIRS) + rows(["locking", "exec"], ALL_ALONE),
    rows(["launcher"], PAIRS),
    rows(["launcher-elsewhere", "launched-elsewhere"], PAIRS),
    *(rows([how], WITH_HEAD) for how in list(HOWS)[:5]),
    rows(["crowd"], {ALONE: ("agentd",)}),
]
"""The rows of an act happen together: those of a lab at the same time, the labs APART_S after each other if each has
a fault of its own. Else the machine would be slow because hundreds of processes end at once.
"""
ROWS = [row for act in ACTS for row in act]
ARMS = [len(MODES) * len(PAIRS), *[len(MODES) * 2] * ALONE]
"""In each lab."""


def components() -> dict[str, dict[str, str]]:
    return {
        f"lab{lab}-{arm}": {"node_group": f"lab{lab}", "placement": str(arm)}
        for lab, count in enumerate(ARMS)
        for arm in range(count)
    }


class Round:
    """Some of the rows, or all, in a scene of its own."""

    def __init__(self, scene: ms.Scene) -> None:
        self._scene = scene
        self._driver = scene.driver(scene.others[0], range(ALONE + 1), components())
        self._driver.answer()

    def _tell(self, do: str, **what: object) -> object:
        self._driver.order(do=do, **what)
        return self._driver.answer()

    def play(self, act: Collection[Row]) -> list[ms.Run]:
        begun = time.monotonic()
        runs = self._launch(act)
        for run in runs:
            run.until_streaming()
        if act[0].how == "crowd":
            self._tell("crowd", node=ALONE)
            time.sleep(CROWD_S)  # the launch goes on meanwhile
        labs = [list(together) for _, together in itertools.groupby(runs, lambda run: run.row.lab)]
        apart_s = APART_S if "head" not in act[0].still else 0.0
        steps = [(n * apart_s, self._hurt, together) for n, together in enumerate(labs)]
        steps += [(after + ms.STILL_S, self._continue, together) for after, _, together in steps]
        start = time.monotonic()
        for after, step, together in sorted(steps, key=lambda step: step[0]):
            time.sleep(max(0.0, start + after - time.monotonic()))
            step(together)
        for run in runs:
            run.until_closed()
            self._judge(run, begun)
        self._tell("end")
        return runs

    def _hurt(self, runs: list[ms.Run]) -> None:
        """Let the processes of a lab stand still."""
        for run in runs:
            if run.row.how in CALLS:
                run.cut = time.monotonic()
                self._tell("call", method=CALLS[run.row.how], names=[run.name])
        for run in runs:
            if run.row.how == "locking":
                run.arms[0].until(lambda said, run=run: locks(run, said), f"{run.name} holds the lock")
        for run in runs:
            run.cut = run.cut or time.monotonic()
            if run.row.still and time.monotonic() > run.cut + SOON_S:
                run.stall = ms.STILL_S
            self._signal(run, signal.SIGSTOP)

    def _continue(self, runs: list[ms.Run]) -> None:
        """Continue the processes of a lab, when they have stood still for long enough."""
        time.sleep(max(0.0, runs[-1].cut + ms.STILL_S - time.monotonic()))
        for run in runs:
            run.went_on = time.monotonic()
            self._signal(run, signal.SIGCONT)

    def _launch(self, act: Collection[Row]) -> list[ms.Run]:
        free = {lab: itertools.count() for lab in range(ALONE + 1)}
        runs, orders = [], []
        for row in act:
            place = 0 if row.how == "launched-elsewhere" else row.lab
            arm = next(free[place])
            order = {"name": row.name, "cls": row.cls, "component": f"lab{place}-{arm}"}
            if row.how in ("launcher", "launched-elsewhere"):
                order["node"] = row.lab
            elif row.how == "launcher-elsewhere":
                order["node"] = 0
            orders.append(order)
            runs.append(ms.Run(row, [self._scene.arms[place][arm]]))
        pids = self._tell("launch", rows=orders)
        for run in runs:
            moving, launcher = pids[run.name]
            run.worker, run.watchdog, run.template = moving if run.row.how == "launched-elsewhere" else launcher
        return runs

    def _signal(self, run: ms.Run, number: signal.Signals) -> None:
        pids = {"agentd": self._scene.agents[run.row.lab].pid, "head": self._scene.head.pid}
        for part in run.row.still:
            with contextlib.suppress(ProcessLookupError):  # killed since
                os.kill(pids.get(part) or getattr(run, part), number)

    def _judge(self, run: ms.Run, begun: float) -> None:
        (arm,), row = run.arms, run.row
        said = [one for one in run.of(arm, arm.commands()) if not one.text.startswith("hello")]
        moves = [one.at for one in said if one.text.startswith("move")]
        run.told = self._scene.told(run.name)
        texts = [one.text for one in said]
        before = [one.text for one in said if one.at < run.cut]
        run.must("stop" not in before, f"it was stopped before anything stood still: {before[-3:]}")
        # a stopped worker that continues moves until its guard runs; with stop_hardware it has been killed
        again = "worker" in row.still and row.mode == "hook" and row.how in ("own", "locking", "launched-elsewhere")
        if again:
            moves = [at for at in moves if not run.went_on < at < run.went_on + AGAIN_S]
        if row.mode == "hook" and (row.how in ("locking", "exec") or ends_without_hook(row)):
            run.last = moves[-1]
        elif again:
            run.last = moves[-1]
            run.must("stop" in texts, f"no stop command: {texts[-3:]}")
        else:
            run.last = said[-1].at
            if run.must_have_stopped(texts):
                after = texts[texts.index("stop") :]
                run.must(set(after) == {"stop"}, f"after its stop the arm was told {after}")
        run.stall = max(run.stall, self._scene.stall(run.cut, run.last))


def ends_without_hook(row: Row) -> bool:
    """Its watchdog is killed, and the worker with it, before the worker continues."""
    return {"worker", "watchdog"} <= set(row.still) and row.how in ("own", "launched-elsewhere")


def locks(run: ms.Run, said: Collection[ms.Command]) -> bool:
    return any(one.text == LOCKED for one in run.of(run.arms[0], said))


def play(wanted: Collection[Row]) -> list[ms.Run]:
    with contextlib.ExitStack() as stack:
        playing = Round(ms.scene(stack, ALONE + 1, 1, ARMS, "pair_workers", SOURCE, own=False))
        acts = [[row for row in act if row in wanted] for act in ACTS]
        return [run for act in acts if act for run in playing.play(act)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> ms.Results:
    """Every row, so many times."""
    return ms.play_rounds(ROWS, request.config.getoption("robot_rounds"), play)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_arm_moves_no_longer_than_its_lease(
    row: Row, results: ms.Results, figures: Figures, request: pytest.FixtureRequest
) -> None:
    ms.check(row, results, figures, request.config.getoption("robot_rounds"))
