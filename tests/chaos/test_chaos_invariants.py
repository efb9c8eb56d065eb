"""The judge of a chaos run finds all violations, and accepts the effects of faults. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from chaos_invariants import SCENE, Limits, faults, noticed, outcomes, violations
from chaos_plan import KINDS, Plan
from chaos_record import Line, Record, read
from chaos_report import Report

from rlinf_actors.errors import ConfigError

LIMITS = Limits(operation=10.0, orphan=5.0)
DRIVER = Line(0.0, "driver", {"pid": 1})


def begin(at: float, number: int = 1, doing: str = "put", **more: Any) -> Line:
    return Line(at, "begin", {"id": number, "doing": doing, "label": "l", **more})


def end(at: float, number: int = 1, outcome: str = "ok") -> Line:
    return Line(at, "end", {"id": number, "outcome": outcome, "text": "its text"})


def born(at: float, me: str = "l:0", **more: Any) -> Line:
    return Line(at, "born", {"me": me, "group": "g", "rank": 0, "owner": 1, "pid": 9, **more})


def item(what: str, stream: tuple[str, str, str], n: int = 0, note: str = "") -> Line:
    return Line(0.0, "item", {"what": what, "stream": stream, "n": n, "note": note})


def one(records: dict[str, list[Line]], now: float = 100.0) -> str:
    (found,) = violations(records, now, LIMITS)
    return found


def test_judge_accepts_operations_that_end_in_time() -> None:
    lines = [DRIVER, begin(1), end(2), begin(3, 2), end(4, 2, "WorkerDiedError"), begin(95, 3)]
    assert violations({"d": lines}, 100.0, LIMITS) == []


def test_judge_finds_hanging_and_slow_operations() -> None:
    assert one({"d": [DRIVER, begin(1)]}) == "d: put l hangs: it began 99.0 s before now"
    assert "took 19.0 s" in one({"d": [DRIVER, begin(1), end(20)]})


def test_judge_accepts_operations_that_a_killed_driver_just_began() -> None:
    ended = {SCENE: [Line(5.0, "ended", {"pid": 1, "who": "d"})]}
    assert violations({"d": [DRIVER, begin(1)], **ended}, 100.0, LIMITS) == []
    ended = {SCENE: [Line(50.0, "ended", {"pid": 1, "who": "d"})]}
    assert "hangs: it began 49.0 s before its end" in one({"d": [DRIVER, begin(1)], **ended})


@pytest.mark.parametrize("outcome", ["CallTimeoutError", "NameInUseError", "bug"])
def test_judge_finds_unexplained_errors(outcome: str) -> None:
    assert f"ended with {outcome} after 1.0 s: its text" in one({"d": [DRIVER, begin(1), end(2, 1, outcome)]})


def test_judge_finds_operations_that_end_twice() -> None:
    assert "ended 2 times" in one({"d": [DRIVER, begin(1), end(2), end(3)]})


def test_judge_finds_calls_that_did_not_run_once_on_each_rank() -> None:
    ran = Line(1.5, "ran", {"call": "c"})
    driver = [DRIVER, begin(1, 1, "call", call="c"), end(2)]
    both = {"w0": [born(1), ran], "w1": [born(1, "l:1", rank=1), ran]}
    assert violations({"d": driver, **both}, 100.0, LIMITS) == []
    assert "was answered and ran in ['l:0']" in one({"d": driver, "w0": [born(1), ran]})
    assert "ran 2 times in l:0" in one({"d": driver, **both, "w0": [born(1), ran, ran]})
    again = {**both, "next": [born(3), Line(4, "ran", {"call": "c"})]}
    assert "ran 2 times in l:0" in one({"d": driver, **again})


def fault(at: float, kind: str, seconds: float = 1.0) -> Line:
    return Line(at, "fault", {"kind": kind, "pid": 0, "who": "x", "seconds": seconds})


def test_judge_finds_a_rank_in_two_processes_at_once() -> None:
    alive = Line(5.0, "alive", {})
    assert violations({"first": [born(1), alive], "second": [born(6)]}, 100.0, LIMITS) == []
    assert "still there 1.00 s after second" in one({"first": [born(1), alive], "second": [born(4)]})
    assert violations({"first": [born(1), alive], "other": [born(4, owner=2)]}, 100.0, LIMITS) == []


def test_judge_accepts_a_name_in_use_only_after_a_node_loss() -> None:
    begin = Line(1.0, "begin", {"id": 1, "doing": "launch", "label": "l"})

    def refused(text: str) -> Line:
        return Line(2.0, "end", {"id": 1, "outcome": "NameInUseError", "text": text})

    assert violations({"d": [DRIVER, begin, refused("worker g:0 was lost with node n and may")]}, 9.0, LIMITS) == []
    assert "ended with NameInUseError" in one({"d": [DRIVER, begin, refused("a group named 'g' is running")]})


def test_judge_finds_workers_that_outlive_their_driver() -> None:
    ended = Line(5.0, "ended", {"pid": 1, "who": "d"})
    assert violations({"w": [born(1), Line(9.0, "alive", {})], SCENE: [ended]}, 100.0, LIMITS) == []
    late = {"w": [born(1), Line(11.0, "alive", {})]}
    assert "was there 6.0 s after" in one({**late, SCENE: [ended]})
    assert violations({**late, SCENE: [ended, fault(6.0, "kill head")]}, 100.0, LIMITS) == []
    assert "was there 6.0 s after" in one({**late, SCENE: [ended, fault(6.0, "kill worker")]})


def test_judge_finds_lost_items_of_a_completed_round() -> None:
    stream = ("queue", "l:0", "place")
    producer = [born(1), item("offer", stream), item("sent", stream), Line(2, "rest", {})]
    driver = [DRIVER, Line(3, "drained", {"place": "place"}), Line(4, "bye", {})]
    assert "were put and never got" in one({"w": producer, "d": driver})
    assert violations({"w": producer, "d": [DRIVER]}, 100.0, LIMITS) == []
    taken = [item("ask", ("queue", "", "place")), item("got", stream)]
    assert violations({"w": producer, "d": [*driver, *taken]}, 100.0, LIMITS) == []
    again = [born(1, "l:1", rank=1), *taken, Line(2, "rest", {})]
    assert "got more than once by the living" in one({"w": producer, "d": [*driver, *taken], "again": again})


def test_judge_finds_disorder_and_refusals_between_living_workers() -> None:
    pair = ("pair", "l:0", "l:1")
    sender = [born(1), *(item(what, pair, n) for n in (0, 1) for what in ("offer", "sent")), Line(2, "rest", {})]
    receiver = [born(1, "l:1", rank=1), item("got", pair, 1)]
    assert "came out of order" in one({"a": sender, "b": receiver})
    refused = [born(1), item("offer", pair), item("refused", pair, 0, "send"), Line(2, "rest", {})]
    alive = [born(1, "l:1", rank=1), Line(2, "rest", {})]
    assert "was refused though nobody in it was killed" in one({"a": refused, "b": alive})
    assert violations({"a": refused, "b": alive[:1]}, 100.0, LIMITS) == []


def test_report_counts_faults_outcomes_and_notice_times() -> None:
    scene = [Line(2.0, "fault", {"kind": "kill worker", "pid": 9, "who": "x", "seconds": 1.0})]
    driver = [DRIVER, begin(1), end(2.25, 1, "WorkerDiedError"), begin(3, 2), end(4, 2)]
    records = {SCENE: scene, "d": driver, "w": [born(0.5)]}
    assert noticed(records) == [0.25]
    assert faults(records) == {"kill worker": 1}
    assert outcomes(records) == {"put": {"WorkerDiedError": 1, "ok": 1}}
    text = Report.of(records, 7, 60.0, 2.0, ["something"]).text()
    assert "seed 7" in text
    assert "250.0 ms (p50)" in text
    assert text.endswith("violations: 1\n  something")


def test_same_seed_gives_the_same_plan() -> None:
    def made(seed: int) -> list[Any]:
        plan = Plan(seed, lease_s=3.0)
        return [plan.next() for _ in range(300)]

    assert made(1) == made(1) != made(2)
    assert {strike.kind for strike in made(1)} == set(KINDS)
    assert all(strike.seconds > 3.0 for strike in made(1) if strike.how == "cut")
    with pytest.raises(ConfigError, match="'kill all' is no kind of fault"):
        Plan(1, ["kill all"])


def test_unfinished_last_line_of_a_record_is_ignored(tmp_path: Any) -> None:
    record = Record(str(tmp_path), "one")
    record.write("item", what="got", n=1)
    record.close()
    with open(tmp_path / "one.events", "ab") as file:
        file.write(b'[1.0, "half')
    (line,) = read(str(tmp_path))["one"]
    assert (line.what, line["what"], line["n"]) == ("item", "got", 1)
    assert read(str(tmp_path), line.at - 1.0)["one"] == []


def test_judge_distinguishes_drivers_with_a_reused_pid() -> None:
    begin = Line(1.0, "begin", {"id": 1, "doing": "launch", "label": "l"})
    ends = [Line(at, "ended", {"pid": 1, "who": who}) for at, who in ((2.0, "d"), (500.0, "later"))]
    later = [Line(400.0, "driver", {"pid": 1})]
    assert violations({"d": [DRIVER, begin], "later": later, SCENE: ends}, 600.0, LIMITS) == []
    worker = [born(410, owner=1), Line(499.0, "alive", {})]
    assert violations({"d": [DRIVER], "later": later, "w": worker, SCENE: ends}, 600.0, LIMITS) == []
    left = [born(1, owner=1), Line(300.0, "alive", {})]
    assert "after the end of its driver" in one({"d": [DRIVER], "later": later, "w": left, SCENE: ends})
