"""The head's log file: workers that start or stop together on a node share a line, and events keep their order."""

from __future__ import annotations

import logging

import pytest

from rlinf_actors.head.commands import LogEvent
from rlinf_actors.head.log_lines import LogLines
from rlinf_actors.model.readable import ranges
from rlinf_actors.wire.values import ExitReport


def up(rank: int, node: str = "n0") -> LogEvent:
    return LogEvent("worker_started", f"g:{rank} is up", f"host-{node}", node, "ns", "g", rank, f"g-{rank}")


def stopped(rank: int, reason: str) -> LogEvent:
    exit = ExitReport("stopped", reason=reason)
    return LogEvent("worker_stopped", f"g:{rank} was stopped", "host-n0", "n0", "ns", "g", rank, f"g-{rank}", 0, exit)


@pytest.fixture
def written(caplog):
    caplog.set_level(logging.INFO, "rlinf_actors.head")

    def write(*events: LogEvent) -> list[str]:
        lines = LogLines()
        for event in events:
            lines.add(event)
        lines.flush()
        lines.flush()
        return caplog.messages

    return write


def test_workers_of_a_launch_share_a_line_a_node(written):
    assert written(*map(up, (2, 3, 5)), up(0, "n1"), up(1, "n1")) == [
        "3 workers of group 'g' of job 'ns' on node host-n0 are up: ranks 2-3, 5",
        "2 workers of group 'g' of job 'ns' on node host-n1 are up: ranks 0-1",
    ]


def test_worker_alone_has_the_line_of_its_event(written):
    assert written(up(7)) == ["g:7 is up"]


def test_events_keep_their_order(written):
    died = LogEvent("worker_died", "g:1 died", "host-n0", "n0", "ns", "g", 1)
    assert written(up(0), up(1), died, up(2))[1:] == ["g:1 died", "g:2 is up"]


def test_workers_that_were_stopped_for_another_reason_have_a_line_of_their_own(written):
    assert written(stopped(0, "the job ended"), stopped(1, "the job ended"), stopped(2, "")) == [
        "2 workers of group 'g' of job 'ns' on node host-n0 were stopped: the job ended: ranks 0-1",
        "g:2 was stopped",
    ]


def test_ranges():
    assert ranges([9, 3, 1, 2, 7, 8, 9]) == "1-3, 7-9"
