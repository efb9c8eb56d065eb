"""The Chrome trace: spans of one tid lie within each other, arrows begin and end in spans, every tid has a name."""

from __future__ import annotations

import random
from typing import Any

from rlinf_actors.tracing.clocks import HeadClock, Sample, offset_at
from rlinf_actors.tracing.ring import Point, ProcessTrace, TraceSpan
from rlinf_actors.tracing.timeline import Timeline
from tests.tracing.chrome import check


def trace(*spans: TraceSpan, points: list[Point] | None = None) -> ProcessTrace:
    last = max([span.end for span in spans] + [span.start for span in spans])
    return ProcessTrace({}, {1: "MainThread"}, list(spans), points or [], last)


def of(*traces: ProcessTrace) -> list[dict[str, Any]]:
    timeline = Timeline()
    events = [event for number, one in enumerate(traces) for event in timeline.process(one, f"w:{number}")]
    return [*events, *timeline.arrows()]


def test_overlapping_spans_of_one_thread_get_lanes() -> None:
    events = of(
        trace(
            TraceSpan(1, "a", "c", 1, 0, 50_000),
            TraceSpan(2, "b", "c", 1, 10_000, 90_000),
            TraceSpan(3, "in a", "", 1, 5, 9),
        )
    )
    check(events)
    tids = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert tids["a"] == tids["in a"] != tids["b"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert (names[tids["a"]], names[tids["b"]]) == ("MainThread", "MainThread (2)")


def test_random_spans_never_cross_on_a_lane() -> None:
    rng = random.Random(5)
    for _ in range(50):
        spans = []
        for number in range(1, 60):
            start = rng.randrange(1000)
            spans.append(TraceSpan(number, "x", "c", rng.choice((1, 2)), start, start + rng.randrange(300)))
        check(of(trace(*spans)))


def test_span_without_an_end_lasts_until_the_last_event_and_says_so() -> None:
    events = of(trace(TraceSpan(1, "killed here", "c", 1, 1000), TraceSpan(2, "x", "c", 1, 2000, 5000)))
    check(events)
    (killed,) = [event for event in events if event["name"] == "killed here"]
    assert (killed["dur"], killed["args"]) == (4.0, {"unfinished": True})


def test_arrow_goes_from_span_to_span_and_one_call_of_two_ranks_makes_two() -> None:
    caller = trace(TraceSpan(1, "call", "c", 1, 0, 9000), points=[Point("out", 100, 77, 1)])
    callee = [trace(TraceSpan(5, "step", "c", 1, 2000, 3000), points=[Point("in", 1999, 77, 5)]) for _ in range(2)]
    events = of(caller, *callee)
    check(events)
    starts, ends = ([event for event in events if event["ph"] == kind] for kind in "sf")
    assert [(one["pid"], one["ts"]) for one in starts] == [(1, 0.1), (1, 0.1)]
    assert [(one["pid"], one["ts"], one["bp"]) for one in ends] == [(2, 2.0, "e"), (3, 2.0, "e")]
    assert len({one["id"] for one in starts}) == 2


def test_arrow_without_its_other_end_is_left_out() -> None:
    events = of(trace(TraceSpan(1, "call", "c", 1, 0, 9000), points=[Point("out", 100, 77, 1)]))
    assert not [event for event in events if event["ph"] in "sf"]


def test_clock_takes_the_beat_with_the_shortest_round_trip() -> None:
    clock = HeadClock()
    for sent, back in ((10.0, 0.5), (11.0, 0.01), (12.0, 0.3)):
        clock.answered(sent, sent + back, sent + 100 + back / 2)
    offset, error = offset_at(clock.samples(), 20.0)
    assert abs(offset - 100) < 1e-9
    assert error < 0.007


def test_clock_follows_a_drift() -> None:
    samples = [Sample(0.0, 5.0, 0.001), Sample(1000.0, 5.1, 0.002)]
    offset, error = offset_at(samples, 500.0)
    assert abs(offset - 5.05) < 1e-9
    assert error == 0.002
    assert offset_at([], 3.0) == (0.0, 0.0)


def test_clock_of_another_head_is_not_mixed_with_the_last_one() -> None:
    clock = HeadClock()
    clock.answered(1.0, 1.1, 50.0)
    clock.forget()
    assert clock.samples() == []
