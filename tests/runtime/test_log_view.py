"""Which lines of workers a driver shows: equal ones of several ranks together, and of a flood some, with a count."""

from __future__ import annotations

import io
import random
import sys
from collections import Counter

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.runtime import log_view
from rlinf_actors.runtime.log_printer import LogPrinter
from rlinf_actors.runtime.log_view import BURST_S, HOLD_S, NOTE_S, WORKERS_AT_BURST, LogView
from rlinf_actors.runtime.worker_output import WorkerOutput, place_of
from rlinf_actors.settings import Settings
from rlinf_actors.wire.agent_messages import CUT, UPDATE, LogLines

pytestmark = pytest.mark.quick


def view(rate=0.0, joins=True):
    return LogView(rate, joins, lambda name: f"logs {name}")


def said(lines):
    return [f"[{line.who}] {line.text}" for line in lines]


def out(rank, *texts, group="actor", stream="out"):
    return [(f"{group}:{rank}", stream, text) for text in texts]


def test_equal_lines_of_ranks_become_one_with_their_number():
    shown = view()
    for rank in range(8):
        shown.add("n1", out(rank, "loading model"), rank / 100)
    assert shown.due(HOLD_S - 0.01) == []
    assert said(shown.due(HOLD_S)) == ["[actor:0-7@n1 x8] loading model"]
    assert shown.next_at is None


def test_nodes_are_named_if_all_ranks_are_on_one():
    shown = view()
    shown.add("n1", out(0, "a", "b"), 0)
    shown.add("n2", out(3, "a", "c"), 0)
    assert said(shown.rest(0)) == ["[actor:0, 3 x2] a", "[actor:0@n1] b", "[actor:3@n2] c"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (out(0, "a "), out(1, "a")), (out(0, "a"), out(1, "a", stream="err")), (out(0, "a"), out(1, "a", group="env")),
        (out(0, f"a{CUT}"), out(1, f"a{CUT}")), (out(0, f"50%{UPDATE}"), out(1, f"50%{UPDATE}")),
    ],
)  # fmt: skip
def test_only_whole_equal_lines_of_a_group_and_stream_are_joined(first, second):
    shown = view()
    shown.add("n1", first + second, 0)
    assert [line.count for line in shown.rest(0)] == [1, 1]


def test_late_line_is_a_line_of_its_own():
    shown = view()
    shown.add("n1", out(0, "a"), 0)
    assert said(shown.due(HOLD_S)) == ["[actor:0@n1] a"]
    shown.add("n1", out(1, "a"), HOLD_S)
    assert shown.next_at == 2 * HOLD_S
    assert said(shown.due(2 * HOLD_S)) == ["[actor:1@n1] a"]


def test_traceback_of_all_ranks_is_shown_once_and_in_order():
    shown, lines = view(), [f"line {n}" for n in range(20)]
    for rank in range(4):
        shown.add("n1", out(rank, *lines, f"rank {rank} failed"), rank / 50)
    text = said(shown.rest(1))
    assert text[:20] == [f"[actor:0-3@n1 x4] {line}" for line in lines]
    assert text[20:] == [f"[actor:{rank}@n1] rank {rank} failed" for rank in range(4)]


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_each_worker_keep_their_order_and_their_number(seed):
    chosen = random.Random(seed)
    shown, given, got = view(), {}, []
    now = 0.0
    for _ in range(300):
        now += chosen.random() * HOLD_S / 5
        rank, text = chosen.randrange(4), chosen.choice("abc")
        given.setdefault(f"actor:{rank}", []).append(text)
        shown.add("n1", out(rank, text), now)
        got += shown.due(now)
    got += shown.rest(now)
    assert sum(line.count for line in got) == 300
    for worker, texts in given.items():
        mine = [line.text for line in got if worker in line.members]
        runs = [text for at, text in enumerate(texts) if not at or texts[at - 1] != text]
        left = iter(mine)
        assert all(text in left for text in runs), "in this order, if a line of several rows of equal ones counts once"
        assert Counter(mine).keys() == Counter(texts).keys()


def test_without_joining_every_line_is_shown_at_once():
    shown = view(joins=False)
    shown.add("n1", out(0, "a") + out(1, "a"), 5)
    assert said(shown.due(5)) == ["[actor:0@n1] a", "[actor:1@n1] a"]


def flood(shown, rank, count, now, stream="out"):
    shown.add("n1", out(rank, *(f"{now} {n}" for n in range(count)), stream=stream), now)
    return said(shown.due(now))


def test_flood_is_held_back_and_counted():
    shown = view(10, joins=False)
    burst = 10 * BURST_S
    assert len(flood(shown, 3, 50_000, 0)) == burst
    assert flood(shown, 3, 210, 1) == [], "nothing is shown until the note, so that what is shown is in one piece"
    assert len(flood(shown, 3, 7, 2, "err")) == 7, "a flood of stdout does not hide stderr"
    assert shown.next_at == NOTE_S
    (note,) = shown.due(NOTE_S)
    assert f"[{note.who}] {note.text}" == (
        f"[rlinf-actors] actor:3: {50_210 - burst:,} lines held back in the last 5 s; all of them: logs actor:3"
    )
    assert (note.stream, note.count, note.node) == ("err", 50_210 - burst, "n1")
    assert len(flood(shown, 3, 1000, NOTE_S)) == 10 * NOTE_S
    assert len(flood(shown, 4, 10, NOTE_S)) == 10


def test_floods_of_many_ranks_have_one_note_and_a_limit_together():
    shown = view(10, joins=False)
    counts = [len(flood(shown, rank, 1000, 0)) for rank in range(100)]
    assert sum(counts) == 10 * BURST_S * WORKERS_AT_BURST
    assert len(flood(shown, 0, 7, 0, "err")) == 7
    notes = [line.text for line in shown.due(NOTE_S)]
    held = 100_000 - sum(counts)
    assert notes == [f"actor:0-99: {held:,} lines held back in the last 5 s; all of them: logs actor"]


def test_equal_lines_cost_nothing():
    shown = view(1)
    shown.add("n1", [("actor:0", "out", "again")] * 1000, 0)
    assert said(shown.rest(0)) == ["[actor:0@n1 x1000] again"]


def test_quiet_worker_may_print_a_burst_again():
    shown = view(10, joins=False)
    flood(shown, 0, 10 * BURST_S, 0)
    assert len(flood(shown, 0, 10_000, BURST_S)) == 10 * BURST_S


def test_what_was_held_back_is_told_at_the_end():
    shown = view(1, joins=False)
    flood(shown, 0, BURST_S + 1, 0)
    assert said(shown.rest(0.2)) == [
        "[rlinf-actors] actor:0: 1 line held back in the last 1 s; all of them: logs actor:0"
    ]
    assert shown.rest(1) == []


def test_quiet_workers_are_forgotten(monkeypatch):
    monkeypatch.setattr(log_view, "MOST_SOURCES", 10)
    shown, got = view(1), []
    for rank in range(1000):
        shown.add("n1", out(rank, f"line {rank}"), float(rank))
        got += shown.due(float(rank))
    got += shown.rest(1000.0)
    assert len(got) == 1000
    assert len(shown._last) + len(shown._budgets) <= 30


def test_no_limit_shows_all():
    assert len(flood(view(0, joins=False), 0, 100_000, 0)) == 100_000


# --- with the printer ---


def printed(monkeypatch, *batches, patience_s=2.0):
    streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    printer = LogPrinter(lambda credit: None, False, view(10))
    for batch in batches:
        printer.show(LogLines("job", "n1", batch))
    printer.close(patience_s)
    return streams["stdout"].getvalue(), streams["stderr"].getvalue(), printer.left


def test_printer_prints_joined_lines_and_notes(monkeypatch, rlinf_leak_check):
    got, notes, left = printed(monkeypatch, out(0, "a", "b"), out(1, "a"), out(2, *map(str, range(1000))))
    assert got.startswith("[actor:0-1@n1 x2] a\n[actor:0@n1] b\n[actor:2@n1] 0\n")
    assert notes.startswith("[rlinf-actors] actor:2: 500 lines held back in the last 1 s; all of them: logs actor:2\n")
    assert left == {}


def test_joined_end_of_progress_bars_replaces_each(monkeypatch, rlinf_leak_check):
    got, _, _ = printed(monkeypatch, out(0, f"9%{UPDATE}") + out(1, f"9%{UPDATE}"), out(0, "100%") + out(1, "100%"))
    assert got == "[actor:0-1@n1 x2] 100%\n"


def test_waiting_lines_that_cannot_be_printed_any_more_are_counted(monkeypatch, rlinf_leak_check):
    printer = LogPrinter(lambda credit: None, False, view())
    printer.show(LogLines("job", "n1", out(0, "a") + out(1, "a") + out(2, "b")))
    printer.hurry()
    printer.close()
    assert printer.left == {("n1", ""): 3}


def test_lines_held_back_count_as_left_out_if_their_note_cannot_be_printed(monkeypatch, rlinf_leak_check):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    printer = LogPrinter(lambda credit: None, False, view(10, joins=False))
    printer.show(LogLines("job", "n1", out(0, *map(str, range(1000)))))
    printer.hurry()
    printer.close()
    assert sum(printer.left.values()) + sys.stdout.getvalue().count("\n") == 1000


@pytest.mark.parametrize(
    ("directory", "name", "where"),
    [
        (None, "actor:3", "rlinf-actors logs actor:3"), (None, "actor", "rlinf-actors logs actor"),
        ("logs", "actor:3", "logs/actor/rank_3.log"), ("logs", "actor", "logs/actor"),
    ],
)  # fmt: skip
def test_notes_say_where_all_lines_are(tmp_path, monkeypatch, directory, name, where):
    monkeypatch.chdir(tmp_path)
    assert WorkerOutput(directory, lambda credit: None)._all_of(name) == where


@pytest.mark.parametrize(
    ("places", "moved", "where"),
    [
        (["/r/cell/a-0.out"], ("", ""), "/r/cell/a-0.out"),
        (["/r/cell/a-0.out", ""], ("", ""), "/r/cell"),  # lines of other workers came, and were not printed
        (["/r/cell/a-0.out", "/r/cell/a-2.err"], ("/r", "/kept/r"), "/kept/r/cell"),
        (["/r/cell", "/r/other/a-0.out", ""], ("", ""), "/r"),
        ([""], ("", ""), ""),
    ],
)
def test_lines_left_out_are_in_the_directory_of_all_files_that_may_have_them(places, moved, where):
    left = {("n1", place): 1 for place in places} | {("n2", "/r/cell/a-1.out"): 1}
    assert place_of("n1", left, moved) == where


def test_variables_switch_both_off():
    settings = Settings.load({"RLINF_ACTORS_LOG_JOIN": "0", "RLINF_ACTORS_LOG_RATE": "0"})
    assert (settings.log_join, settings.log_rate) == (False, 0.0)
    assert (Settings.load({}).log_join, Settings.load({}).log_rate) == (True, 100.0)
    with pytest.raises(ConfigError, match="RLINF_ACTORS_LOG_RATE"):
        Settings.load({"RLINF_ACTORS_LOG_RATE": "fast"})
