"""Medians, ratios, verdicts and tables: pure."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import runner, summary, table
from benchmarks.backends.limits import LIMITS
from benchmarks.cases import CASES
from benchmarks.model import Case, Figure
from benchmarks.runner import Session

CALL = Figure("call", "one call", "us", "lower", "ping", reach_limit=2, reach_ray=4)
RATE = Figure("rate", "calls", "/s", "higher", reach_limit=0.5)
CASE = Case("speed", "Speed", (CALL, RATE), lambda runtime: {})


def session(backend: str, repetition: int = 1, **figures: float) -> Session:
    return Session("speed", backend, repetition, figures)


def row(figure: Figure, *sessions: Session) -> summary.Row:
    return summary.row(CASE, figure, sessions)


def test_the_median_of_ours_is_divided_by_the_raw_figure_that_is_named() -> None:
    got = row(CALL, session("ours", 1, call=150), session("ours", 2, call=900), session("ours", 3, call=160),
              session("zmq", ping=80), session("ray", call=800))  # fmt: skip
    assert (got.ours, got.raw, got.ray) == (160, 80, 800)
    assert (got.ours_raw, got.ray_ours) == (2, 5)
    assert got.reached is True


@pytest.mark.parametrize(("ours", "reached"), [(160, True), (161, False), (201, False)])
def test_a_time_is_reached_when_both_ratios_are(ours: float, reached: bool) -> None:
    assert row(CALL, session("ours", call=ours), session("zmq", ping=80), session("ray", call=800)).reached is reached


@pytest.mark.parametrize(("ours", "reached"), [(50, True), (49, False)])
def test_a_rate_is_reached_from_the_other_side(ours: float, reached: bool) -> None:
    assert row(RATE, session("ours", rate=ours), session("zmq", rate=100)).reached is reached


@pytest.mark.parametrize(("ours", "reached"), [(160, True), (161, False)])
def test_a_missing_ray_leaves_the_verdict_to_raw(ours: float, reached: bool) -> None:
    got = row(CALL, session("ours", call=ours), session("zmq", ping=80))
    assert got.ray_ours is None
    assert got.reached is reached


@pytest.mark.parametrize(("ours", "reached"), [(80, True), (79, False)])
def test_the_prototype_is_a_target_of_its_own(ours: float, reached: bool) -> None:
    figure = dataclasses.replace(RATE, reach_prototype=0.8)
    got = row(figure, session("ours", rate=ours), session("zmq", rate=100), session("prototype", rate=100))
    assert (got.ours_prototype, got.reached) == (ours / 100, reached)


def test_without_any_ratio_there_is_no_verdict() -> None:
    assert row(CALL, session("ours", call=100)).reached is None


def test_figures_that_nobody_gave_have_no_row() -> None:
    assert [line.name for line in summary.rows([CASE], [session("zmq", ping=80)])] == ["call"]


def test_a_rows_text_says_which_way_is_reached() -> None:
    report = summary.as_json([CASE], [session("ours", call=100, rate=5), session("zmq", ping=80)], 1, ["ours"], {}, "x")
    call, rate = (table.cells(line) for line in report["rows"])  # type: ignore[attr-defined]
    assert call == ["one call", "100 us", "80 us", "", "-", "-", "1.25", "≤ 2", "-", "", "-", "≥ 4", "yes"]
    assert rate[7] == "≥ 0.5"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (81.26, "us", "81.3 us"),
        (2600, "us", "2.6 ms"),
        (384_912, "/s", "385,000/s"),
        (100, "/s", "100/s"),
        (3, "", "3"),
        (None, "s", "-"),
    ],
)
def test_quantities_have_three_digits(value: float | None, unit: str, shown: str) -> None:
    assert table.quantity(value, unit) == shown


def test_the_figures_of_a_document_are_replaced_and_the_rest_is_kept() -> None:
    document = f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n"
    once = table.put_between(document, "new")
    assert once == f"above\n{table.BEGIN}\nnew\n{table.END}\nbelow\n"
    assert table.put_between(once, "new") == once
    with pytest.raises(ValueError, match="figures: begin"):
        table.put_between("no marks", "new")


def test_every_case_has_a_raw_limit_and_distinct_figures() -> None:
    assert LIMITS.keys() == CASES.keys()
    for case in CASES.values():
        names = [figure.name for figure in case.figures]
        assert len(set(names)) == len(names)


def test_backends_take_turns_and_those_that_have_no_such_thing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_one", lambda case, backend, _python, n: Session(case.name, backend, n, {}))
    lane = dataclasses.replace(CASE, name="lane", without=("ray",))
    sessions = runner.run([CASE, lane], {"ours": "python", "ray": "other"}, 2, lambda session: None)
    assert [(s.case, s.repetition, s.backend) for s in sessions] == [
        ("speed", 1, "ours"), ("speed", 1, "ray"), ("speed", 2, "ours"), ("speed", 2, "ray"),
        ("lane", 1, "ours"), ("lane", 2, "ours"),
    ]  # fmt: skip
