"""The table of answering, silent and busy workers, with a clock that the test moves."""

from __future__ import annotations

import os
import signal
import subprocess

from agentd.health import NO_ANSWER, NO_TEMPLATE, HealthTable, silence_of
from rlinf_actors.wire.template_protocol import Pong
from rlinf_actors.wire.values import WorkerHealth


class Kit:
    """Workers a and b of template 1, c of template 2; probes every 2 s."""

    def __init__(self) -> None:
        self.table = HealthTable(silent_s=5.0, long_s=10.0)
        self.now = 100.0
        for id, template in (("a", 1), ("b", 1), ("c", 2)):
            self.table.worker_up(id, template, self.now)

    def round(self, *pongs: Pong | str, after: float = 2.0, templates: tuple[int, ...] = (1, 2)) -> list[WorkerHealth]:
        """One probe, and the templates' answers 0.01 s later."""
        self.now += after
        changes = self.table.changes(self.now)
        self.table.to_probe(self.now)
        self.now += 0.01
        answers = [pong if isinstance(pong, Pong) else Pong(pong) for pong in pongs]
        for template in templates:
            self.table.answered(template, [pong for pong in answers if (pong.id == "c") == (template == 2)], self.now)
        return changes + self.table.changes(self.now)


def reported(changes: list[WorkerHealth]) -> list[tuple[str, str]]:
    return [(one.id, one.unresponsive) for one in changes]


def test_answering_workers_cause_no_report():
    kit = Kit()
    for _ in range(10):
        assert kit.round("a", "b", "c") == []


def test_silent_worker_is_reported_once_and_again_when_it_answers():
    kit = Kit()
    assert [reported(kit.round("a", "c")) for _ in range(4)] == [[], [], [("b", NO_ANSWER)], []]
    (back,) = kit.round("a", "b", "c")
    assert back == WorkerHealth("b")
    assert kit.round("a", "b", "c") == []


def test_time_in_a_breakpoint_is_counted_from_its_begin_also_over_steps():
    kit, found = Kit(), []
    for place, stop in (("t.py:1", 1), ("t.py:1", 1), ("t.py:2", 1), ("", 0), ("t.py:3", 2), ("t.py:3", 3)):
        found += kit.round(Pong("a", breakpoint=place, stop=stop), "b", "c")
    assert [(one.breakpoint, one.stop, round(one.breakpoint_s)) for one in found] == [
        ("t.py:1", 1, 0), ("t.py:2", 1, 4), ("", 0, 0), ("t.py:3", 2, 0), ("t.py:3", 3, 0),
    ]  # fmt: skip


def test_silence_is_counted_from_the_last_answer():
    kit = Kit()
    kit.round("a", "b", "c")
    kit.round("a", "c")
    kit.round("a", "c")
    (change,) = kit.round("a", "c")
    assert round(change.for_s, 2) == 6.02


def test_silent_template_is_reported_and_its_workers_are_not_counted_silent():
    kit = Kit()
    kit.round("a", "b", "c")
    for _ in range(3):
        assert kit.round("c", templates=(2,)) == []
    assert reported(kit.round("c", templates=(2,))) == [("a", NO_TEMPLATE), ("b", NO_TEMPLATE)]
    assert reported(kit.round("c", "a")) == [("a", ""), ("b", "")]  # b's answer may still wait in the template
    assert kit.round("a", "c") == []
    assert reported(kit.round("a", "c")) == [("b", NO_ANSWER)]


def test_template_with_an_unanswered_probe_is_not_probed_again():
    kit = Kit()
    assert kit.table.to_probe(100.0) == [1, 2]
    kit.table.answered(2, [], 100.1)
    assert kit.table.to_probe(102.0) == [2]
    kit.table.template_ended(1)
    assert kit.table.to_probe(104.0) == [1]


def test_own_stall_does_not_count_as_silence_of_workers():
    kit = Kit()
    kit.round("a", "b", "c")
    kit.table.to_probe(kit.now)
    kit.now += 60.0
    kit.table.stalled(60.0, kit.now)
    assert kit.table.changes(kit.now) == []
    assert kit.round("a", "b", "c", after=1.0) == []


def test_long_call_is_reported_and_its_end_too():
    kit = Kit()
    call = Pong("a", "step", 100.5, 3)
    assert [kit.round(call, "b", "c") for _ in range(5)] == [[]] * 5
    (change,) = kit.round(call, "b", "c")
    assert (change.id, change.method, change.waiting, round(change.for_s, 2)) == ("a", "step", 3, 11.55)
    assert kit.round(call, "b", "c") == []
    assert kit.round("a", "b", "c") == [WorkerHealth("a")]


def test_next_long_call_of_the_same_method_is_reported_again():
    kit = Kit()
    first, second = Pong("a", "step", 90.5), Pong("a", "step", 90.75)
    assert len(kit.round(first, "b", "c")) == 1
    (change,) = kit.round(second, "b", "c")
    assert round(change.for_s, 2) == 13.27


def test_silent_worker_in_a_long_call_is_unresponsive():
    kit = Kit()
    kit.round(Pong("a", "step", 90.0), "b", "c")
    changes = [kit.round("b", "c") for _ in range(3)]
    assert (reported(changes[2]), changes[2][0].method) == ([("a", NO_ANSWER)], "")


def test_ended_worker_is_not_reported_as_silent():
    kit = Kit()
    kit.table.worker_ended("b")
    for _ in range(10):
        assert kit.round("a", "c") == []


def test_a_stopped_process_is_said_to_be_stopped():
    with subprocess.Popen(["sleep", "100"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        said = silence_of(process.pid)
        process.kill()
    assert said == f"its process is stopped (state T): `kill -CONT {process.pid}` on its node lets it go on"
    assert silence_of(os.getpid()) == NO_ANSWER
