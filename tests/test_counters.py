"""Counts of calls and bytes: each thread has a table, and nothing is lost when threads end."""

from __future__ import annotations

import gc
import threading

import pytest

from rlinf_actors import counters
from rlinf_actors.counters import BOUNDS_S, DONE, FAILED, FIRST_BUCKET, MOST_NAMES, MOST_TABLES, SECONDS


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Counters of this test alone."""
    monkeypatch.setattr(counters, "_tables", [])
    monkeypatch.setattr(counters, "_ended", ({}, {}))
    monkeypatch.setattr(counters, "mine", counters._Mine())


def on_threads(count: int, work) -> None:
    for _ in range(count):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()


def test_a_call_counts_in_the_bucket_of_its_duration():
    for seconds in (0.0001, 0.002, 1000.0):
        counters.call_done("step", seconds)
    counters.call_failed("step")
    counts = counters.calls()["step"]
    assert (counts[DONE], counts[FAILED], counts[SECONDS]) == (3, 1, 1000.0021)
    buckets = counts[FIRST_BUCKET:]
    assert len(buckets) == len(BOUNDS_S) + 1
    assert [at for at, number in enumerate(buckets) if number] == [0, BOUNDS_S.index(0.003), len(BOUNDS_S)]


def test_counts_of_threads_that_have_ended_are_kept_in_bounded_memory():
    def work() -> None:
        counters.call_done("step", 0.5)
        counters.sent("inline", 10)

    on_threads(3 * MOST_TABLES, work)
    assert len(counters._tables) <= MOST_TABLES + 1
    for _ in range(2):  # reading changes nothing
        assert counters.calls()["step"][DONE] == 3 * MOST_TABLES
        assert counters.sent_by_path() == {"inline": [3 * MOST_TABLES, 30 * MOST_TABLES]}


def test_names_are_bounded_and_none_is_lost():
    def work() -> None:
        for number in range(2 * MOST_NAMES):
            counters.call_failed(f"{threading.get_ident()}-{number}" + "x" * 500)

    on_threads(2, work)
    found = counters.calls()
    assert len(found) <= MOST_NAMES
    assert sum(counts[FAILED] for counts in found.values()) == 4 * MOST_NAMES
    assert max(map(len, found)) <= counters.NAME_CHARS
