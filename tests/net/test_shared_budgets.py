"""Bandwidth groups with members in several processes."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import subprocess
import sys
import time

import pytest

from rlinf_actors.net import shared_budgets
from rlinf_actors.net.budget_memory import Place, inherited, make
from rlinf_actors.net.shared_budgets import FORGET_S, SharedBudgets

CHILD = """
import sys
from rlinf_actors.net.shared_budgets import SharedBudgets
stage = SharedBudgets(tuple(map(int, sys.argv[1:5])), "job")("0 up", 1e6)
now = float(sys.argv[5])
print([stage.carry((now, now), 1_000_000)[1] - now for _ in range(int(sys.argv[6]))][-1])
"""


@functools.cache
def place() -> Place:
    """The memory that this module's tests share, as the workers of a user do."""
    return make()


def stage(namespace="job", name="0 up", rate=1e6):
    return SharedBudgets(place(), namespace)(name, rate)


def took(one, now, size=1_000_000):
    return one.carry((now, now), size)[1] - now


def test_processes_share_one_bandwidth():
    now = time.monotonic()
    assert took(stage("job"), now) == pytest.approx(1.0)
    arguments = [*map(str, place()), str(now), "500"]
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    last = [float(child.communicate()[0]) for child in children]
    assert max(last) == pytest.approx(1501.0), "no transfer was lost between three processes"
    assert took(stage("job"), now) == pytest.approx(1502.0)


def test_a_keeper_that_passed_no_memory_on_leaves_none_inherited():
    _, fd, device, inode = place()
    assert inherited(fd, device, inode) == (fd, device, inode)
    with open(os.devnull) as other:
        assert inherited(other.fileno(), device, inode) == (-1, 0, 0)
        closed = other.fileno()
    assert inherited(closed, device, inode) == (-1, 0, 0)


def test_jobs_groups_and_directions_are_apart():
    now = time.monotonic()
    for one in (stage("a"), stage("b"), stage("a", "0 down"), stage("a", "1 up")):
        assert took(one, now) == pytest.approx(1.0)


def test_rows_of_ended_jobs_are_used_again(monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(shared_budgets, "_ROWS", 64)
    monkeypatch.setattr(shared_budgets, "_PROBES", 64)
    for number in range(100):
        stage(f"old {number}").carry((now - 2 * FORGET_S, now - 2 * FORGET_S), 0)
    assert took(stage("new"), now) == pytest.approx(1.0)
    assert took(stage("new"), now) == pytest.approx(2.0)


def test_lock_of_a_stopped_process_does_not_block():
    pid, fd, _, _ = place()
    held = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert took(stage("blocked"), time.monotonic()) == pytest.approx(1.0)
    os.close(held)


def test_without_the_memory_each_process_has_the_bandwidth_and_says_so(caplog):
    caplog.set_level(logging.WARNING)
    one = SharedBudgets((0, 0, 0, 0), "job")("0 up", 1e6)
    assert took(one, 5.0) == pytest.approx(1.0)
    assert took(one, 5.0) == pytest.approx(2.0)
    assert "each process has the bandwidth of its group for itself" in caplog.text


def test_bandwidth_is_shared_in_the_first_minute_of_a_machine(monkeypatch):
    monkeypatch.setattr(shared_budgets.time, "monotonic", lambda: FORGET_S / 2)
    one = stage("booting")
    assert took(one, FORGET_S / 2) == pytest.approx(1.0)
    assert took(one, FORGET_S / 2) == pytest.approx(2.0)
