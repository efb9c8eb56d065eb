"""The checker finds all faults, and accepts the effects of deaths. Pure."""

from __future__ import annotations

import pytest
from deliveries import Event, Stream, growth, open_operations, problems, quarters

PAIR = Stream("pair", "a", "b")
CAST = Stream("cast", "a", "0:a,b,c")
QUEUE = Stream("queue", "a", "jobs/k")
ASK = Stream("queue", "", "jobs/k")


def sent(stream: Stream, *numbers: int) -> list[Event]:
    return [Event(what, stream, n) for n in numbers for what in ("offer", "sent")]  # type: ignore[arg-type]


def got(stream: Stream, *numbers: int, note: str = "") -> list[Event]:
    if stream.kind != "queue":
        return [Event("got", stream, n, note) for n in numbers]
    return [event for n in numbers for event in (Event("ask", ASK), Event("got", stream, n, note))]


def one(logs: dict[str, list[Event]], killed: str = "") -> str:
    (found,) = problems(logs, killed.split())
    return found


@pytest.mark.parametrize("stream", [PAIR, QUEUE])
def test_checker_accepts_orderly_logs(stream: Stream) -> None:
    assert problems({"a": sent(stream, 0, 1, 2), "b": got(stream, 0, 1, 2)}, []) == []


def test_checker_finds_faults_of_a_pair() -> None:
    log = {"a": sent(PAIR, 0, 1, 2)}
    assert "item 2 of" in one({**log, "b": got(PAIR, 0, 2, 1)})
    assert "came again: 2 was due" in one({**log, "b": got(PAIR, 0, 1, 1, 2)})
    assert "items 2 of" in one({**log, "b": got(PAIR, 0, 1)})
    assert "item 1 of" in one({**log, "b": [*got(PAIR, 0), *got(PAIR, 1, note="damaged"), *got(PAIR, 2)]})


@pytest.mark.parametrize("killed", ["a", "b"])
def test_checker_accepts_a_cut_off_stream_after_a_death(killed: str) -> None:
    refused = [Event("refused", PAIR, 2, "get")]
    assert problems({"a": sent(PAIR, 0, 1, 2), "b": got(PAIR, 0, 1) + refused}, [killed]) == []
    assert "came out of order" in one({"a": sent(PAIR, 0, 1, 2), "b": got(PAIR, 0, 2)}, killed)


def test_checker_finds_refusals_without_a_death() -> None:
    assert "was refused though" in one({"a": [Event("offer", PAIR), Event("refused", PAIR, 0, "send")]})
    assert "was refused though" in one({"a": [Event("refused", QUEUE, 0, "put")]}, "b")


def test_checker_finds_missing_broadcasts() -> None:
    members = {"a": sent(CAST, 0, 1), "b": got(CAST, 0, 1), "c": got(CAST, 0)}
    assert "c: items 1 of" in one(members)
    assert problems(members, ["b"]) == []
    assert "c: item 1 of" in one({**members, "c": got(CAST, 1, 0)}, "b")


def test_checker_names_operations_that_took_too_long() -> None:
    assert one({"a": [Event("late", PAIR, 7, "send")]}) == f"a: send on {PAIR}, item 7, did not end in time"


def test_checker_compares_items_of_several_consumers() -> None:
    log = {"a": sent(QUEUE, 0, 1, 2, 3)}
    assert problems({**log, "b": got(QUEUE, 0, 3), "c": got(QUEUE, 1, 2)}, []) == []
    assert "b: item 0 of" in one({**log, "b": got(QUEUE, 3, 0), "c": got(QUEUE, 1, 2)})
    assert "more than once by the living: b, c" in one({**log, "b": got(QUEUE, 0, 3), "c": got(QUEUE, 0, 1, 2)})
    assert "1 of a (3) were put and never got" in one({**log, "b": got(QUEUE, 0), "c": got(QUEUE, 1, 2)})
    assert "which nobody put" in one({**log, "b": got(QUEUE, 0, 1, 2, 3, 4)})
    assert "no consumer there died" in one({**log, "b": got(QUEUE, 0, 1, 2), "c": got(QUEUE, 3, note="again")})


def test_checker_accepts_items_lost_in_a_killed_consumers_gets() -> None:
    log = {"a": sent(QUEUE, 0, 1, 2)}
    killed = {**log, "b": [*got(QUEUE, 0), Event("ask", ASK)]}
    assert problems({**killed, "c": got(QUEUE, 2)}, ["b"]) == []
    assert "killed consumers had 1 gets open" in one({**killed, "c": []}, "b")
    assert "killed consumers had 0 gets open" in one({**log, "b": got(QUEUE, 0), "c": got(QUEUE, 2)}, "b")


def test_checker_finds_unmarked_redeliveries() -> None:
    log = {"a": sent(QUEUE, 0, 1), "b": [*got(QUEUE, 0), Event("ask", ASK)]}
    assert problems({**log, "c": got(QUEUE, 0, note="again") + got(QUEUE, 1)}, ["b"]) == []
    assert problems({**log, "c": got(QUEUE, 1) + got(QUEUE, 0, note="again")}, ["b"]) == []
    assert "without a mark: b, c" in one({**log, "c": got(QUEUE, 0, 1)}, "b")


def test_checker_accepts_either_outcome_of_a_killed_producers_put() -> None:
    offered = [*sent(QUEUE, 0), Event("offer", QUEUE, 1)]
    assert problems({"a": offered, "b": got(QUEUE, 0)}, ["a"]) == []
    assert problems({"a": offered, "b": got(QUEUE, 0, 1)}, ["a"]) == []
    assert "never got" in one({"a": offered, "b": []}, "a")


def test_open_operations_lists_unfinished_ones() -> None:
    log = [*sent(PAIR, 0), Event("offer", PAIR, 1), *got(QUEUE, 0), Event("ask", ASK)]
    assert open_operations(log) == [f"sending on {PAIR}: 1 open", f"getting from {ASK}: 1 open"]


def test_growth_compares_the_halves_after_the_first_quarter() -> None:
    assert growth([0, 50, 100, 101, 99, 100, 101, 100]) == 0
    assert growth([0, 50, 100, 110, 120, 130, 140, 150]) == 30
    assert growth([1, 2, 3]) == 0


def test_quarters_hold_all_samples() -> None:
    assert quarters([1, 2, 3, 4, 5, 6, 7, 8]) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert quarters([1, 2, 3, 4, 5]) == [[1, 2], [3, 4], [5]]
    assert quarters([1]) == [[1]]
