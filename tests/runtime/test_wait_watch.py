"""A driver that waits long says what the workers do, and so do errors of time limits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from types import SimpleNamespace

import pytest

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.runtime import late_report, timeout_facts, wait_watch
from rlinf_actors.runtime.future import AsyncWork, Promise
from rlinf_actors.runtime.late_report import LateReport
from rlinf_actors.runtime.wait_watch import LONGEST_S, QuietWaits, WaitWatch
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import NO_PARTS
from rlinf_actors.wire.stack_values import Wait


class FakePeer(SimpleNamespace):
    """A connection to a worker that waits for the workers *on*. If *answers* is False, it says nothing."""

    def __init__(self, rank: int, *on: int, method: str = "step", answers: bool = True) -> None:
        super().__init__(name=f"ring:{rank}", rank=rank, node="n0", connected=True, pending={}, asked=[])
        self.waits = [Wait(f"recv() from ring:{to}", 312.0, [f"ring:{to}"], blocks=True) for to in on]
        self.method, self.answers = method, answers

    __hash__ = object.__hash__

    def open(self, request) -> int:
        self.pending[7] = request
        return 7

    def send(self, frame: frames.WhatRuns, now: bool = False) -> None:
        assert frame.waits
        self.asked.append(frame)
        if self.answers:
            self.pending.pop(7).answer(frames.Runs(7, self.method, 60.0, waits=self.waits), NO_PARTS)


def ring(*waits_for: int) -> list[FakePeer]:
    return [FakePeer(rank, to) for rank, to in enumerate(waits_for)]


# --- when a line is due; pure ---


def test_lines_come_after_growing_times():
    quiet, lines = QuietWaits(60.0), []
    for now in range(0, 7200, 15):
        lines += [now for _ in quiet.due([("w", 5.0, 0)], float(now))]
    assert lines[:5] == [75, 150, 300, 600, 1200]
    assert [after - before for before, after in itertools.pairwise(lines[5:])] == [LONGEST_S] * 2


def test_progress_begins_the_time_anew_and_a_wait_that_ended_is_forgotten():
    quiet = QuietWaits(60.0)
    assert quiet.due([("w", 0.0, 1)], 59.0) == []
    assert quiet.due([("w", 0.0, 2)], 61.0) == []
    assert quiet.due([("w", 0.0, 2)], 122.0) == [("w", 61.0)]
    assert quiet.due([], 123.0) == []
    assert quiet.due([("w", 123.0, 2)], 124.0) == []


# --- what the workers say ---


def test_text_names_a_deadlock_once_and_who_waits_for_it():
    peers = [*ring(1, 2, 0), FakePeer(3, 0), FakePeer(4)]
    text = LateReport(peers).describe()
    assert text.startswith(
        "deadlock: ring:0 waits in recv() from ring:1 (5 min), ring:1 waits in recv() from ring:2 (5 min), "
        "ring:2 waits in recv() from ring:0 (5 min); ring:3 on n0 has been running step() for 60.0 s, waits in "
    )
    assert text.count("ring:1 waits") == 1
    assert text.endswith("ring:4 on n0 has been running step() for 60.0 s")


def test_the_question_follows_the_waits_to_workers_that_were_not_called():
    first, second, third = FakePeer(0, 1), FakePeer(1, 2), FakePeer(2, method="")
    others = {peer.name: peer for peer in (second, third)}
    text = LateReport([first], others.get).describe()
    assert [len(peer.asked) for peer in (first, second, third)] == [1, 1, 1]
    assert text.endswith("ring:2 on n0 runs nothing")
    assert "ring:2 on n0" not in LateReport([first], others.get, only_busy=True).describe()


def test_a_worker_that_does_not_answer_is_named_and_its_late_answer_is_ignored():
    silent = FakePeer(0, answers=False)
    report = LateReport([silent])
    assert not report.done()
    assert "ring:0 on n0 does not answer" in report.describe()
    assert silent.pending == {}


def test_many_workers_are_neither_asked_nor_named_without_bound():
    peers = [FakePeer(rank, *range(100, 200)) for rank in range(40)]
    others = {f"ring:{rank}": FakePeer(rank) for rank in range(100, 200)}
    text = LateReport(peers, others.get).describe()
    assert sum(len(peer.asked) for peer in (*peers, *others.values())) == 2 * late_report.MAX_ASKED
    assert text.endswith("and 24 more")
    assert len(text) < 10_000


# --- the watch ---


@pytest.fixture
async def watch(monkeypatch):
    """Watches, with a ring of three ranks, which wait for one another, as the job."""
    group = SimpleNamespace(name="ring", namespace="job", peers=ring(1, 2, 0))
    other = SimpleNamespace(name="other", namespace="another", peers=[FakePeer(9)])
    host = SimpleNamespace(name="channel@c", namespace="job", peers=[FakePeer(8)])
    groups = [group, other, host]
    watch = WaitWatch(asyncio.get_running_loop(), 0.04, lambda name: None, lambda: groups, "job")
    watch.start()
    yield watch
    watch.close()


async def test_a_wait_without_progress_is_logged_with_the_deadlock(watch, caplog):
    promise: Promise[None] = Promise("get() from channel 'rollouts'")

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "'rollouts'" in record.getMessage():
                promise.resolve(None)

    handler = Lines()
    wait_watch.log.addHandler(handler)
    try:
        await promise
    finally:
        wait_watch.log.removeHandler(handler)
    lines = [record.getMessage() for record in caplog.records if record.name == wait_watch.__name__]
    (line,) = [line for line in lines if "'rollouts'" in line]  # threads of other tests may wait, too
    said = r"waiting for get\(\) from channel 'rollouts' for \d s: deadlock: ring:0 waits in recv\(\) from "
    assert re.match(said, line)
    assert "ring:8" not in line
    assert "ring:9" not in line


async def test_error_of_a_time_limit_says_what_the_workers_do(watch, monkeypatch):
    monkeypatch.setattr(wait_watch, "MIN_LIMIT_S", 0.01)
    work: AsyncWork[None] = AsyncWork("get() from channel 'rollouts'")
    with pytest.raises(CallTimeoutError, match=r"was not done within 0.01 s; it goes on; deadlock: ring:0 waits"):
        await asyncio.to_thread(work.wait, 0.01)
    with pytest.raises(CallTimeoutError, match=r"it goes on$"):  # not again at once
        await asyncio.to_thread(work.wait, 0.01)
    watch.close()
    assert timeout_facts.job_report is None


async def test_silent_workers_delay_an_error_by_a_bounded_moment(watch, monkeypatch):
    monkeypatch.setattr(wait_watch, "MIN_LIMIT_S", 0.01)
    monkeypatch.setattr(wait_watch, "ANSWER_S", 0.01)
    for peer in watch._peers():
        peer.answers = False
    work: AsyncWork[None] = AsyncWork("get()")
    with pytest.raises(CallTimeoutError, match=r"ring:0 on n0 does not answer"):
        await asyncio.to_thread(work.wait, 0.01)


async def test_a_driver_that_wants_no_lines_has_no_timer():
    watch = WaitWatch(asyncio.get_running_loop(), 0.0, lambda name: None, list, "job")
    watch.start()
    assert (watch._timer, timeout_facts.job_report) == (None, None)
    watch.close()
