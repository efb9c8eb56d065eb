"""A worker's children: who may be which, and what is told to those who ask for them."""

from __future__ import annotations

import itertools

import pytest

from rlinf_actors.wire.frames import ChildEnded, ChildIs, WhereIs
from rlinf_actors.wire.values import Endpoint, ExitReport
from rlinf_actors.worker import child_table
from rlinf_actors.worker.child_table import ChildRefused, ChildTable

pids = itertools.count(100)
HERE = Endpoint("host", "ipc:///run/w")
KILLED = ExitReport("signalled", signal=9)


@pytest.fixture
def table():
    return ChildTable("g-0", "g:0")


def up(table, *path, pid=None):
    child = table.reserve(path, next(pids) if pid is None else pid)
    return child, table.listens(child.id, HERE)


def test_question_is_answered_when_the_child_listens(table):
    child = table.reserve((1,), 1)
    assert table.asked(b"a", WhereIs(5, [1])) == []
    assert table.listens(child.id, HERE) == [(b"a", ChildIs(5, child.id, HERE))]
    assert table.asked(b"b", WhereIs(6, [1])) == [(b"b", ChildIs(6, child.id, HERE))]
    assert table.asked(b"b", WhereIs(7, [1, 0])) == []  # a child of that one


def test_end_is_sent_once_to_every_asker(table):
    child, _ = up(table, 1)
    table.asked(b"a", WhereIs(5, [1]))
    table.asked(b"a", WhereIs(6, [1]))
    told = table.ended(child.id, KILLED)
    assert told == [(b"a", ChildEnded(5, child.id, KILLED)), (b"a", ChildEnded(6, child.id, KILLED))]
    assert table.asked(b"b", WhereIs(7, [1])) == [(b"b", ChildEnded(7, child.id, KILLED))]
    second, told = up(table, 1)
    assert told == []
    assert table.asked(b"a", WhereIs(8, [1])) == [(b"a", ChildIs(8, second.id, HERE))]


def test_rank_of_a_living_child_is_taken(table):
    child, _ = up(table, 0, pid=17)
    with pytest.raises(ChildRefused, match="g:0:0 is process 17, which runs"):
        table.reserve((0,), 18)
    table.ended(child.id, KILLED)
    assert table.reserve((0,), 18).id != child.id


def test_process_is_one_child(table):
    child, _ = up(table, 0, pid=17)
    with pytest.raises(ChildRefused, match="process 17 is g:0:0 already: g:0:1 needs a process of its own"):
        table.reserve((1,), 17)
    table.ended(child.id, KILLED)
    assert table.reserve((1,), 17)


def test_end_of_a_child_that_never_listened_leaves_the_askers_waiting(table):
    child = table.reserve((1,), 1)
    table.asked(b"a", WhereIs(5, [1]))
    assert table.ended(child.id, KILLED) == []
    second, told = up(table, 1)
    assert told == [(b"a", ChildIs(5, second.id, HERE))]


def test_closed_links_are_forgotten(table):
    for link in (b"a", b"b"):
        table.asked(link, WhereIs(5, [1]))
    table.forget(b"a")
    table.forget(b"a")
    child, told = up(table, 1)
    assert told == [(b"b", ChildIs(5, child.id, HERE))]
    table.forget(b"b")
    assert table.ended(child.id, KILLED) == []


def test_everything_is_bounded(table, monkeypatch):
    monkeypatch.setattr(child_table, "MAX_CHILDREN", 3)
    monkeypatch.setattr(child_table, "MAX_QUESTIONS", 2)
    for rank in range(3):
        up(table, rank)
    with pytest.raises(ChildRefused, match="has 3 children, as many as a worker may have"):
        table.reserve((3,), 1)
    for number in range(2):
        assert table.asked(b"a", WhereIs(number, [9])) == []
    ((_, answer),) = table.asked(b"a", WhereIs(3, [9]))
    assert "was asked for more than 2 children" in answer.exit.reason
    assert table.asked(b"b", WhereIs(0, [9])) == []
    for rank in range(30):
        table.ended(next(iter(table._living)), KILLED)
        up(table, rank + 10)
    assert len(table._at) <= 6


def test_repeated_question_counts_once(table):
    child, _ = up(table, 1)
    other, _ = up(table, 2)
    table.asked(b"a", WhereIs(5, [1]))
    assert table.asked(b"a", WhereIs(5, [2])) == []
    table.asked(b"b", WhereIs(6, [2]))
    assert table.ended(child.id, KILLED) == [(b"a", ChildEnded(5, child.id, KILLED))]
    assert table.ended(other.id, KILLED) == [(b"b", ChildEnded(6, other.id, KILLED))]
    table.forget(b"a")
