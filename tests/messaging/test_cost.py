"""What one send and one receive of a small object cost above the link: Python calls and locks, which do not drift."""

from __future__ import annotations

import _thread
import collections
import sys
from pathlib import Path

import pytest
from message_kit import World, settle

import rlinf_actors
from rlinf_actors.model.address import WorkerAddress

OURS = str(Path(rlinf_actors.__file__).parent)
RUNS = 10
HELD = 7
"""Calls that hold signal handlers back, here and so not again in the link; once more if the handlers have changed."""


class Count:
    """Counts the calls of functions of rlinf_actors, and the locks made, on this thread."""

    def __init__(self):
        self.seen = collections.Counter()

    def __enter__(self):
        sys.setprofile(self._event)

    def __exit__(self, *_exc):
        sys.setprofile(None)

    def _event(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.seen["calls"] += 1
        elif event == "c_call" and (arg is _thread.allocate_lock or arg is _thread.RLock):
            self.seen["locks"] += 1


@pytest.fixture
async def pair():
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    for _ in range(3):
        await a.send("b:0", {"step": 1})
        assert await b.recv("a:0") == {"step": 1}
    return a, b


async def test_a_send_and_a_receive_cost_few_calls_and_locks(pair):
    a, b = pair
    sending, receiving = Count(), Count()
    for _ in range(RUNS):
        with sending:
            assert a.messenger.send("b", 0, {"step": 1}, None, now=True) is None
        await settle()
        with receiving:
            assert b.messenger.receive(WorkerAddress("a", 0)).wait() == {"step": 1}
        await settle()
    assert sending.seen["calls"] <= 11 * RUNS + HELD * (RUNS + 1)
    assert sending.seen["locks"] == 0
    assert receiving.seen["calls"] <= 43 * RUNS
    assert receiving.seen["locks"] <= 2 * RUNS


async def test_a_blocking_receive_of_a_known_sender_costs_fewer(pair):
    a, b = pair
    sending, receiving = Count(), Count()
    for n in range(RUNS + 1):
        if n == 1:
            sending.seen.clear(), receiving.seen.clear()  # the first one looks its sender up
        with sending:
            assert a.messenger.send("b", 0, b"small", None, now=True) is None
        await settle()
        with receiving:
            assert b.messenger.blocking.receive("a", 0, None) == b"small"
        await settle()
    assert sending.seen["calls"] <= 10 * RUNS + HELD * (RUNS + 1)
    assert receiving.seen["calls"] <= 19 * RUNS
    assert receiving.seen["locks"] <= 1 * RUNS


async def test_an_array_is_not_pickled(pair):
    np = pytest.importorskip("numpy")
    a, b = pair
    a.messenger.send("b", 0, np.ones(8), None, now=True)
    await settle()
    work = b.messenger.receive(WorkerAddress("a", 0))
    assert bytes(work._message.parts[0][:1]) == b"N"
    assert list(work.wait()) == [1] * 8


async def test_a_known_receiver_is_not_looked_up_again(pair, monkeypatch):
    a, b = pair
    a.messenger.send("b", 0, 1, None, now=True)
    monkeypatch.setattr(a.messenger.directory, "peer", None)
    assert a.messenger.send("b", 0, 2, None, now=True) is None
    assert [await b.recv("a:0"), await b.recv("a:0")] == [1, 2]


async def test_a_receiver_that_was_launched_again_is_looked_up_again(pair):
    a, b = pair
    b.world.die(b)
    await settle()
    (b,) = b.world.launch("b")
    await a.send("b:0", "hello")
    assert await b.recv("a:0") == "hello"
