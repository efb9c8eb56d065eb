"""The shell of a daemon's pure core: commands, deadlines, and stalls of the process."""

from __future__ import annotations

import asyncio
import math

import pytest

from rlinf_actors.net.daemon import CoreShell
from rlinf_actors.net.failure_detection import STALL_S

pytestmark = pytest.mark.virtual_time

TICK = "tick"


class Core:
    """Returns each event as a command; the test sets its deadline."""

    def __init__(self) -> None:
        self.deadline = math.inf
        self.events: list[object] = []
        self.done: list[object] = []
        self.shell = CoreShell[object, object](
            asyncio.get_running_loop(), "a daemon", self.decide, lambda: self.deadline, self.done.append,
            tick=TICK, stalled=lambda seconds: seconds,
        )  # fmt: skip

    def decide(self, event: object, now: float) -> list[object]:
        self.events.append(event)
        if event is TICK:
            self.deadline = math.inf
        return [event]


async def test_an_event_becomes_commands():
    core = Core()
    core.shell.handle("hello")
    assert core.done == ["hello"]


async def test_the_core_ticks_at_its_deadline_even_if_the_deadline_moves_earlier():
    core, loop = Core(), asyncio.get_running_loop()
    core.deadline = loop.time() + 5.0
    core.shell.handle("a")
    await asyncio.sleep(1.0)
    core.deadline = loop.time() + 2.0
    core.shell.handle("b")
    await asyncio.sleep(1.9)
    assert core.events == ["a", "b"]
    await asyncio.sleep(0.2)
    assert core.events == ["a", "b", TICK]
    await asyncio.sleep(10.0)
    assert core.events == ["a", "b", TICK]


async def test_a_late_timer_reports_the_stall_before_the_tick(caplog):
    core, loop = Core(), asyncio.get_running_loop()
    core.shell._tick(loop.time() - 2 * STALL_S)
    stall, tick = core.events
    assert (stall, tick) == (pytest.approx(2 * STALL_S), TICK)
    assert "a daemon stood still for 1.0 s" in caplog.text


async def test_events_and_deadlines_after_close_are_ignored():
    core, loop = Core(), asyncio.get_running_loop()
    core.deadline = loop.time() + 1.0
    core.shell.handle("a")
    core.shell.close()
    core.shell.close()
    core.shell.handle("b")
    await asyncio.sleep(2.0)
    assert core.events == ["a"]


async def test_long_work_lets_the_loop_run_between_its_slices(monkeypatch):
    monkeypatch.setattr("rlinf_actors.net.daemon.SLICE_S", 0.0)  # one slice a turn
    left, done = ["a", "b", "c"], []
    shell = CoreShell[object, object](
        asyncio.get_running_loop(), "a daemon", lambda event, now: [left.pop(0)] if event == "more" else [],
        lambda: math.inf,
        done.append, tick=TICK, stalled=lambda seconds: seconds, unfinished=lambda: bool(left), more="more",
    )  # fmt: skip
    shell.handle("begin")
    seen = []
    for _ in range(6):
        await asyncio.sleep(0)  # other callbacks of the loop have their turn
        seen.append(len(done))
    assert done == ["a", "b", "c"]
    assert seen == sorted(seen)
    assert {1, 2} <= set(seen)
    left.append("never")
    shell.handle("begin")
    shell.close()
    await asyncio.sleep(0)
    assert left == ["never"]
